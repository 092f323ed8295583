#include <weir/node/fronts/grpc/grpc_messages.h>

#include <algorithm>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_json.h>
#include <weir/rpc/check.h>

namespace weir::node {

GrpcCode grpc_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::none:
      return GrpcCode::ok;
    case ErrorKind::invalid:
      return GrpcCode::invalid_argument;
    case ErrorKind::unavailable:
    case ErrorKind::closed:
      return GrpcCode::unavailable;
    case ErrorKind::overloaded:
      return GrpcCode::resource_exhausted;
    case ErrorKind::deadline:
      return GrpcCode::deadline_exceeded;
    case ErrorKind::unsupported:
      return GrpcCode::unimplemented;
    case ErrorKind::unauthenticated:
      return GrpcCode::unauthenticated;
    case ErrorKind::forbidden:
      return GrpcCode::permission_denied;
    case ErrorKind::unknown:
      break;
  }
  return GrpcCode::unknown;
}

GrpcError check_domain(std::string_view domain) {
  if (!domain.empty() && domain.size() <= rpc::kMaxText) return {};
  return invalid(
      fmt::format("domain: expected 1 to {} bytes, got {}", rpc::kMaxText, domain.size()));
}

GrpcError check_entries(std::span<const Entry> entries, std::size_t index) {
  if (entries.size() > rpc::kMaxEntries) {
    return invalid(fmt::format("descriptors[{}]: expected at most {} entries, got {}", index,
                               rpc::kMaxEntries, entries.size()));
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::size_t size = std::max(entries[i].key.size(), entries[i].value.size());
    if (!entries[i].key.empty() && size <= rpc::kMaxText) continue;
    return invalid(
        fmt::format("descriptors[{}].entries[{}]: expected a key of 1 to {} bytes and a value of "
                    "at most as many",
                    index, i, rpc::kMaxText));
  }
  return {};
}

void set_metadata(const Reply& reply, google::protobuf::Struct& out) {
  auto& fields = *out.mutable_fields();
  if (!reply.error.empty()) {
    fields["error"].set_string_value(std::string(to_string(reply.error.kind)));
    return;
  }
  const Status* decider = reply.decider();
  if (decider == nullptr) return;
  const bool degraded = std::any_of(reply.statuses.begin(), reply.statuses.end(),
                                    [](const Status& status) { return status.degraded; });
  fields["rule"].set_string_value(decider->rule);
  fields["remaining"].set_number_value(static_cast<double>(decider->remaining));
  fields["degraded"].set_bool_value(degraded);
}

std::string denial_body(const Reply& reply) {
  rpc::Output body;
  append_answer(body, reply);
  return std::string(body.view());
}

}  // namespace weir::node
