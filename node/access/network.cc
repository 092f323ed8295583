#include <weir/node/access/network.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace weir::node {

Ip mapped(const rpc::Address& address) {
  if (address.v6) return address.ip;
  Ip out{};
  out[10] = out[11] = 0xff;
  std::copy_n(address.ip.begin(), 4, out.begin() + 12);
  return out;
}

bool holds(const MatchCidr& network, const Ip& ip) {
  const std::size_t whole = network.bits / 8;
  if (std::memcmp(network.network.data(), ip.data(), whole) != 0) return false;
  const unsigned rest = network.bits % 8;
  return rest == 0 || (network.network[whole] ^ ip[whole]) >> (8 - rest) == 0;
}

bool holds(const std::vector<MatchCidr>& networks, const Ip& ip) {
  return std::any_of(networks.begin(), networks.end(),
                     [&](const MatchCidr& one) { return holds(one, ip); });
}

bool within(const MatchCidr& inner, const MatchCidr& outer) {
  return inner.bits >= outer.bits && holds(outer, inner.network);
}

const std::vector<MatchCidr>& loopback() {
  static const std::vector<MatchCidr> networks = {*parse_cidr("127.0.0.0/8"),
                                                  *parse_cidr("::1/128")};
  return networks;
}

}  // namespace weir::node
