#include <weir/limits/matching/address.h>

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

namespace weir::internal {
namespace {

constexpr std::array<std::uint8_t, 12> kIpv4 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};

bool is_port(std::string_view text) {
  constexpr std::uint32_t kMaxPort = 65'535;
  if (text.empty() || text.size() > 5) return false;
  std::uint32_t port = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
    port = port * 10 + static_cast<std::uint32_t>(c - '0');
  }
  return port <= kMaxPort;
}

}  // namespace

bool parse_address(std::string_view text, Address& out, bool& is_ipv4) {
  std::array<char, INET6_ADDRSTRLEN> copy{};
  if (text.empty() || text.size() >= copy.size()) return false;
  // A byte 0 inside would end the text early for inet_pton.
  if (text.find('\0') != std::string_view::npos) return false;
  std::memcpy(copy.data(), text.data(), text.size());
  is_ipv4 = text.find(':') == std::string_view::npos;
  if (!is_ipv4) return inet_pton(AF_INET6, copy.data(), out.data()) == 1;
  std::copy(kIpv4.begin(), kIpv4.end(), out.begin());
  return inet_pton(AF_INET, copy.data(), out.data() + kIpv4.size()) == 1;
}

bool read_address(std::string_view text, Address& out) {
  const bool bracketed = text.starts_with('[');
  if (bracketed) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return false;
    const std::string_view rest = text.substr(end + 1);
    if (!rest.empty() && (rest[0] != ':' || !is_port(rest.substr(1)))) return false;
    text = text.substr(1, end - 1);
  } else if (const std::size_t colon = text.find(':');
             colon != std::string_view::npos && colon == text.rfind(':')) {
    // Of several colons none can be a port's: that is an IPv6 address.
    if (!is_port(text.substr(colon + 1))) return false;
    text = text.substr(0, colon);
  }
  bool ipv4 = false;
  return parse_address(text, out, ipv4) && !(bracketed && ipv4);
}

bool is_ipv4(const Address& address) {
  return std::equal(kIpv4.begin(), kIpv4.end(), address.begin());
}

void mask_address(Address& address, unsigned bits) {
  for (unsigned byte = 0; byte < address.size(); ++byte) {
    const unsigned kept = bits <= byte * 8 ? 0 : std::min(bits - byte * 8, 8u);
    address[byte] = static_cast<std::uint8_t>(address[byte] & ~(0xFFu >> kept));
  }
}

}  // namespace weir::internal
