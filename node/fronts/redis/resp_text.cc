#include <weir/node/fronts/redis/resp_text.h>

#include <algorithm>
#include <limits>

namespace weir::node {
namespace {

constexpr std::size_t kMaxErrorText = 512;

void append_number(rpc::Output& out, char kind, std::uint64_t value) {
  out.push_back(kind);
  out.append_decimal(value);
  out.append("\r\n");
}

}  // namespace

void append_resp_simple(rpc::Output& out, std::string_view text) {
  out.push_back('+');
  out.append(text);
  out.append("\r\n");
}

void append_resp_error(rpc::Output& out, std::string_view text) {
  out.push_back('-');
  for (const char byte : text.substr(0, kMaxErrorText)) {
    const auto value = static_cast<unsigned char>(byte);
    out.push_back(value < 0x20 || value == 0x7f ? ' ' : byte);
  }
  out.append("\r\n");
}

void append_resp_integer(rpc::Output& out, std::uint64_t value) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  append_number(out, ':', std::min(value, kMost));
}

void append_resp_minus_one(rpc::Output& out) {
  out.append(":-1\r\n");
}

void append_resp_bulk(rpc::Output& out, std::string_view bytes) {
  append_number(out, '$', bytes.size());
  out.append(bytes);
  out.append("\r\n");
}

void append_resp_nil(rpc::Output& out, bool resp3) {
  out.append(resp3 ? "_\r\n" : "$-1\r\n");
}

void append_resp_array(rpc::Output& out, std::size_t count) {
  append_number(out, '*', count);
}

void append_resp_map(rpc::Output& out, std::size_t count, bool resp3) {
  append_number(out, resp3 ? '%' : '*', resp3 ? count : 2 * count);
}

}  // namespace weir::node
