#include <weir/node/address.h>

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include <fmt/format.h>

namespace weir::node {
namespace {

std::optional<std::uint16_t> parse_port(std::string_view text) {
  if (text.empty() || text.size() > 5) return std::nullopt;
  unsigned port = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    port = port * 10 + static_cast<unsigned>(c - '0');
  }
  if (port > 65535) return std::nullopt;
  return static_cast<std::uint16_t>(port);
}

}  // namespace

std::uint16_t Address::port() const {
  if (is_ipv6()) {
    sockaddr_in6 in6{};
    std::memcpy(&in6, &storage, sizeof(in6));
    return ntohs(in6.sin6_port);
  }
  sockaddr_in in{};
  std::memcpy(&in, &storage, sizeof(in));
  return ntohs(in.sin_port);
}

std::string Address::to_string() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (is_ipv6()) {
    sockaddr_in6 in6{};
    std::memcpy(&in6, &storage, sizeof(in6));
    inet_ntop(AF_INET6, &in6.sin6_addr, text, sizeof(text));
    return fmt::format("[{}]:{}", text, port());
  }
  sockaddr_in in{};
  std::memcpy(&in, &storage, sizeof(in));
  inet_ntop(AF_INET, &in.sin_addr, text, sizeof(text));
  return fmt::format("{}:{}", text, port());
}

std::optional<Address> parse_address(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<std::uint16_t> port = parse_port(text.substr(colon + 1));
  if (!port) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  // inet_pton stops at a NUL, and nothing else would notice what stands behind it.
  if (host.find('\0') != std::string_view::npos) return std::nullopt;

  Address out;
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    const std::string literal(host.substr(1, host.size() - 2));
    sockaddr_in6 in6{};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(*port);
    if (inet_pton(AF_INET6, literal.c_str(), &in6.sin6_addr) != 1) return std::nullopt;
    std::memcpy(&out.storage, &in6, sizeof(in6));
    out.length = sizeof(in6);
    return out;
  }
  sockaddr_in in{};
  in.sin_family = AF_INET;
  in.sin_port = htons(*port);
  if (inet_pton(AF_INET, std::string(host).c_str(), &in.sin_addr) != 1) return std::nullopt;
  std::memcpy(&out.storage, &in, sizeof(in));
  out.length = sizeof(in);
  return out;
}

}  // namespace weir::node
