#pragma once

#include <envoy/service/auth/v3/external_auth.pb.h>
#include <google/protobuf/arena.h>

#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/node/fronts/grpc/grpc_messages.h>

namespace weir::node {

/// Envoy's external authorization (docs/envoy.md), as pure functions of messages.

/// What the attributes say of an HTTP request, as a request of one descriptor. The route's
/// context_extensions say what it asks for: `domain`; `hits`, 1 if it is not there; `header.NAME`,
/// the header whose value is the entry NAME; what else there is are entries as they stand. Behind
/// them come the entries method, path (without its query), host, ip and principal, as far as they
/// are known. Texts are those of `in`, the list is in the arena.
GrpcError read_authz(const envoy::service::auth::v3::CheckRequest& in,
                     google::protobuf::Arena& arena, Request& out);

/// The answer: headers as over HTTP, and for a denial its status and body. An error `closed` is a
/// denial. Other errors are not told here. `now` is the Unix time.
void write_authz(const Reply& reply, Nanos now, envoy::service::auth::v3::CheckResponse& out);

}  // namespace weir::node
