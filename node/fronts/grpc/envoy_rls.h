#pragma once

#include <envoy/service/ratelimit/v3/rls.pb.h>
#include <google/protobuf/arena.h>

#include <cstddef>

#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/node/fronts/grpc/grpc_messages.h>

namespace weir::node {

/// Envoy's rate limit service (docs/envoy.md), as pure functions of messages.

/// All descriptors as one request, which passes as a whole or consumes nothing. Its texts are those
/// of `in`, its lists are in the arena. A descriptor asks for its own hits_addend (0 peeks), else
/// for the request's, and for 1 if that is 0. What weir does not do (a limit in the request, hits
/// that are given back) is an error.
GrpcError read_rls(const envoy::service::ratelimit::v3::RateLimitRequest& in,
                   google::protobuf::Arena& arena, Request& out);

/// The answer to a request of so many descriptors: a status for each, with the denying rule that
/// takes longest, else the one with the least remaining. A denial has headers (Retry-After,
/// RateLimit, RateLimit-Policy) and a body. An error `closed` is a denial too, since Envoy lets
/// pass what fails. Other errors are not told here. `now` is the Unix time.
void write_rls(const Reply& reply, std::size_t descriptors, Nanos now,
               envoy::service::ratelimit::v3::RateLimitResponse& out);

}  // namespace weir::node
