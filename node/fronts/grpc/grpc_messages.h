#pragma once

#include <google/protobuf/arena.h>
#include <google/protobuf/struct.pb.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/node/fronts/grpc/grpc_server.h>
#include <weir/node/fronts/http/http_headers.h>

namespace weir::node {

/// Why a message is no request.
struct GrpcError {
  GrpcCode code = GrpcCode::ok;
  std::string text = {};
  bool empty() const { return code == GrpcCode::ok; }
};

inline GrpcError invalid(std::string text) {
  return {GrpcCode::invalid_argument, std::move(text)};
}

/// The status that tells an error. Not for `none`.
GrpcCode grpc_code(ErrorKind kind);

/// What of these breaks a bound that every front keeps.
GrpcError check_domain(std::string_view domain);
/// `index` is the descriptor's, for the text.
GrpcError check_entries(std::span<const Entry> entries, std::size_t index);

/// `count` values in the arena's memory.
template <typename T>
std::span<T> arena_array(google::protobuf::Arena& arena, std::size_t count) {
  static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= 8);
  char* memory = google::protobuf::Arena::CreateArray<char>(&arena, count * sizeof(T));
  T* first = reinterpret_cast<T*>(memory);
  std::uninitialized_value_construct_n(first, count);
  return {first, count};
}

/// Calls `each(name, value)` for every header that tells a client of its quota
/// (append_rate_limit_headers).
template <typename Each>
void each_header(const Reply& reply, Nanos now, Each&& each) {
  rpc::Output lines;
  append_rate_limit_headers(lines, reply, ResetFormat::seconds, now);
  std::string_view left = lines.view();
  while (!left.empty()) {
    const std::string_view line = left.substr(0, left.find("\r\n"));
    left.remove_prefix(line.size() + 2);
    const std::size_t colon = line.find(": ");
    each(line.substr(0, colon), line.substr(colon + 2));
  }
}

/// What a gateway may log of it: `rule` and `remaining` of the rule that decided, `degraded` if any
/// rule was; of an error `error`.
void set_metadata(const Reply& reply, google::protobuf::Struct& out);

/// The body of a denial: that of HTTP.
std::string denial_body(const Reply& reply);

}  // namespace weir::node
