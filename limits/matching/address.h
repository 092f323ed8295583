#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace weir::internal {

/// An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d. In network order.
using Address = std::array<std::uint8_t, 16>;

/// Reads "10.1.2.3" or "2001:db8::1" as inet_pton does. False if `text` is neither. Not installed.
bool parse_address(std::string_view text, Address& out, bool& is_ipv4);

/// Reads what requests bring as an address: as parse_address, and with brackets and a port:
/// "[2001:db8::1]", "[2001:db8::1]:4711", "198.51.100.7:4711". False if it is none.
bool read_address(std::string_view text, Address& out);

/// True for ::ffff:a.b.c.d.
bool is_ipv4(const Address& address);

/// Sets the bits behind the first `bits` to 0.
void mask_address(Address& address, unsigned bits);

}  // namespace weir::internal
