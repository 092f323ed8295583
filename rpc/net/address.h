#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weir::rpc {

/// A literal TCP address. Names are never resolved: nothing here waits for DNS.
struct Address {
  bool v6 = false;
  std::array<std::uint8_t, 16> ip{};  ///< IPv4 uses the first four bytes
  std::uint16_t port = 0;
  friend bool operator==(const Address&, const Address&) = default;
};

/// Reads "127.0.0.1:7400" or "[::1]:7400". Empty if it is neither; `error` then says what was
/// expected. Scope ids ("fe80::1%eth0") are not read.
std::optional<Address> parse_address(std::string_view text, std::string& error);

/// The text that parse_address reads back.
std::string to_string(const Address& address);

/// An address that parse_address reads, with another port.
std::string with_port(const std::string& address, std::uint16_t port);

/// The text without the port, and without brackets.
std::string host_of(const Address& address);

/// Fills `out` and returns its length.
socklen_t to_sockaddr(const Address& address, sockaddr_storage& out);
/// The address in a sockaddr; a zero address for a family other than IPv4 and IPv6.
Address from_sockaddr(const sockaddr_storage& in);

}  // namespace weir::rpc
