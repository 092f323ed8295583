#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weir::node {

/// An IP address and a port, from text such as "127.0.0.1:7402" or "[::1]:7402".
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  std::uint16_t port() const;
  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  /// Compares equal for two spellings of one address.
  std::string to_string() const;
};

/// Literal addresses only: no name is ever looked up. Empty if `text` is anything else.
std::optional<Address> parse_address(std::string_view text);

}  // namespace weir::node
