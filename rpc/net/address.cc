#include <weir/rpc/net/address.h>

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>

namespace weir::rpc {

std::optional<Address> parse_address(std::string_view text, std::string& error) {
  auto fail = [&]() -> std::optional<Address> {
    error = "expected an address such as 127.0.0.1:7400 or [::1]:7400, not \"" +
            std::string(text.substr(0, 64)) + "\"";
    return std::nullopt;
  };
  std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return fail();
  std::string_view host = text.substr(0, colon);
  std::string_view port = text.substr(colon + 1);

  Address out;
  auto [end, code] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (port.empty() || code != std::errc{} || end != port.data() + port.size()) return fail();

  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    out.v6 = true;
    host = host.substr(1, host.size() - 2);
  }
  if (host.size() >= INET6_ADDRSTRLEN) return fail();
  std::string literal(host);
  if (literal.find('\0') != std::string::npos) return fail();
  if (::inet_pton(out.v6 ? AF_INET6 : AF_INET, literal.c_str(), out.ip.data()) != 1) return fail();
  return out;
}

std::string with_port(const std::string& text, std::uint16_t port) {
  std::string unused;
  std::optional<Address> address = parse_address(text, unused);
  if (!address) return text;
  address->port = port;
  return to_string(*address);
}

std::string host_of(const Address& address) {
  char text[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(address.v6 ? AF_INET6 : AF_INET, address.ip.data(), text, sizeof text);
  return text;
}

std::string to_string(const Address& address) {
  const std::string host = host_of(address);
  return (address.v6 ? "[" + host + "]" : host) + ":" + std::to_string(address.port);
}

socklen_t to_sockaddr(const Address& address, sockaddr_storage& out) {
  std::memset(&out, 0, sizeof out);
  if (address.v6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(address.port);
    std::memcpy(&v6.sin6_addr, address.ip.data(), 16);
    std::memcpy(&out, &v6, sizeof v6);
    return sizeof v6;
  }
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(address.port);
  std::memcpy(&v4.sin_addr, address.ip.data(), 4);
  std::memcpy(&out, &v4, sizeof v4);
  return sizeof v4;
}

Address from_sockaddr(const sockaddr_storage& in) {
  Address out;
  if (in.ss_family == AF_INET6) {
    sockaddr_in6 v6{};
    std::memcpy(&v6, &in, sizeof v6);
    out.v6 = true;
    out.port = ntohs(v6.sin6_port);
    std::memcpy(out.ip.data(), &v6.sin6_addr, 16);
  } else if (in.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &in, sizeof v4);
    out.port = ntohs(v4.sin_port);
    std::memcpy(out.ip.data(), &v4.sin_addr, 4);
  }
  return out;
}

}  // namespace weir::rpc
