#include <weir/node/fronts/grpc/envoy_authz.h>

#include <charconv>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_json.h>

namespace weir::node {
namespace {

namespace v3 = envoy::service::auth::v3;

constexpr std::string_view kDomain = "domain";
constexpr std::string_view kHits = "hits";
constexpr std::string_view kHeader = "header.";
constexpr std::size_t kOwnEntries = 5;  // method, path, host, ip, principal

bool number(std::string_view text, std::uint64_t& out) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, out);
  return error == std::errc() && at == end && out <= kMaxHits;
}

}  // namespace

GrpcError read_authz(const v3::CheckRequest& in, google::protobuf::Arena& arena, Request& out) {
  const v3::AttributeContext& attributes = in.attributes();
  const auto& http = attributes.request().http();
  out = {};
  const std::span<Entry> entries =
      arena_array<Entry>(arena, attributes.context_extensions().size() + kOwnEntries);
  std::size_t count = 0;
  for (const auto& [key, value] : attributes.context_extensions()) {
    if (key == kDomain) {
      out.domain = value;
    } else if (key == kHits) {
      if (number(value, out.hits)) continue;
      return invalid(
          fmt::format("context_extensions.hits: expected a whole number from 0 to {}", kMaxHits));
    } else if (!key.starts_with(kHeader)) {
      entries[count++] = {key, value};
    } else if (const auto at = http.headers().find(value); at != http.headers().end()) {
      entries[count++] = {std::string_view(key).substr(kHeader.size()), at->second};
    }
  }
  if (out.domain.empty()) {
    return invalid("context_extensions.domain: required field is missing");
  }
  const auto add = [&](std::string_view key, std::string_view value) {
    if (!value.empty()) entries[count++] = {key, value};
  };
  const std::string_view path = http.path();
  add("method", http.method());
  add("path", path.substr(0, path.find('?')));
  add("host", http.host());
  add("ip", attributes.source().address().socket_address().address());
  add("principal", attributes.source().principal());
  out.descriptor = entries.first(count);
  if (GrpcError error = check_domain(out.domain); !error.empty()) return error;
  return check_entries(out.descriptor, 0);
}

void write_authz(const Reply& reply, Nanos now, v3::CheckResponse& out) {
  const bool passes = reply.error.empty() && reply.allowed;
  if (reply.decider() != nullptr || !reply.error.empty()) {
    set_metadata(reply, *out.mutable_dynamic_metadata());
  }
  out.mutable_status()->set_code(
      static_cast<int>(passes ? GrpcCode::ok : GrpcCode::permission_denied));
  const auto fill = [](std::string_view name, std::string_view value,
                       envoy::config::core::v3::HeaderValueOption& to) {
    to.mutable_header()->set_key(std::string(name));
    to.mutable_header()->set_value(std::string(value));
    to.set_append_action(envoy::config::core::v3::HeaderValueOption::OVERWRITE_IF_EXISTS_OR_ADD);
  };
  if (passes) {
    each_header(reply, now, [&](std::string_view name, std::string_view value) {
      fill(name, value, *out.mutable_ok_response()->add_response_headers_to_add());
    });
    return;
  }
  auto& denied = *out.mutable_denied_response();
  denied.mutable_status()->set_code(static_cast<envoy::type::v3::StatusCode>(http_status(reply)));
  each_header(reply, now, [&](std::string_view name, std::string_view value) {
    fill(name, value, *denied.add_headers());
  });
  fill("Content-Type", "application/problem+json", *denied.add_headers());
  denied.set_body(denial_body(reply));
}

}  // namespace weir::node
