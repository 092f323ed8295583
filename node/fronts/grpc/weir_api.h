#pragma once

#include <google/protobuf/arena.h>
#include <weir/v1/weir.pb.h>

#include <weir/limits/lease.h>
#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/node/fronts/grpc/grpc_messages.h>

namespace weir::node {

/// weir's own API (proto/weir/v1/weir.proto), as pure functions of messages. Texts of what is read
/// are those of `in`, lists are in the arena.

GrpcError read_check(const v1::CheckRequest& in, google::protobuf::Arena& arena, Request& out);
GrpcError read_reserve(const v1::ReserveRequest& in, google::protobuf::Arena& arena, Request& out,
                       Nanos& timeout);
GrpcError read_settle(const v1::SettleRequest& in);
GrpcError read_lease(const v1::LeaseRequest& in, google::protobuf::Arena& arena, Request& out,
                     LeaseTerms& terms);

void write_check(const Reply& reply, v1::CheckResponse& out);
void write_error(ErrorKind kind, std::string_view detail, v1::CheckResponse& out);
void write_reserve(const ReserveReply& reply, v1::ReserveResponse& out);
void write_settle(const SettleReply& reply, v1::SettleResponse& out);
void write_lease(const LeaseReply& reply, v1::LeaseResponse& out);

}  // namespace weir::node
