#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace weir::internal {

/// An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d. In network order.
using Address = std::array<std::uint8_t, 16>;

/// Reads "10.1.2.3" or "2001:db8::1" as inet_pton does. False if `text` is neither. Not installed.
bool parse_address(std::string_view text, Address& out, bool& is_ipv4);

}  // namespace weir::internal
