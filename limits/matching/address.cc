#include <weir/limits/matching/address.h>

#include <arpa/inet.h>

#include <cstring>

namespace weir::internal {

bool parse_address(std::string_view text, Address& out, bool& is_ipv4) {
  std::array<char, INET6_ADDRSTRLEN> copy{};
  if (text.empty() || text.size() >= copy.size()) return false;
  // A byte 0 inside would end the text early for inet_pton.
  if (text.find('\0') != std::string_view::npos) return false;
  std::memcpy(copy.data(), text.data(), text.size());
  is_ipv4 = text.find(':') == std::string_view::npos;
  if (!is_ipv4) return inet_pton(AF_INET6, copy.data(), out.data()) == 1;
  out = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0, 0, 0, 0};
  return inet_pton(AF_INET, copy.data(), out.data() + 12) == 1;
}

}  // namespace weir::internal
