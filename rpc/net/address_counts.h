#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include <weir/rpc/net/address.h>

namespace weir::rpc {

/// How many of something each address has. An IPv6 address stands for its network of 64 bits, all
/// of which one host may have. Takes memory for those that have some. Not thread-safe.
class AddressCounts {
 public:
  std::size_t of(const Address& address) const {
    const auto at = counts_.find(key_of(address));
    return at == counts_.end() ? 0 : at->second;
  }
  void add(const Address& address) { ++counts_[key_of(address)]; }
  /// Of one that was added.
  void remove(const Address& address) {
    const auto at = counts_.find(key_of(address));
    if (--at->second == 0) counts_.erase(at);
  }
  static bool same(const Address& a, const Address& b) { return key_of(a) == key_of(b); }

 private:
  using Key = std::array<std::uint8_t, 9>;  // the first byte: 4 or 6
  static Key key_of(const Address& address) {
    constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const bool mapped =
        address.v6 && std::equal(kMapped.begin(), kMapped.end(), address.ip.begin());
    Key key{};
    key[0] = address.v6 && !mapped ? 6 : 4;
    std::copy_n(address.ip.begin() + (mapped ? 12 : 0), key[0] == 6 ? 8 : 4, key.begin() + 1);
    return key;
  }
  std::map<Key, std::size_t> counts_;
};

}  // namespace weir::rpc
