#include <weir/rpc/peers/handshake.h>

#include <sodium.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

namespace weir::rpc {
namespace {

static_assert(kMacBytes == crypto_auth_hmacsha512256_BYTES);
static_assert(std::tuple_size_v<PeerKey> == crypto_auth_hmacsha512256_KEYBYTES);

// Keys the hash, so that the same secret gives another key for another purpose.
constexpr std::string_view kPurpose = "weir peer handshake key";
static_assert(kPurpose.size() >= crypto_generichash_KEYBYTES_MIN &&
              kPurpose.size() <= crypto_generichash_KEYBYTES_MAX);

void start_sodium() {
  // Idempotent and thread-safe; fails only if the system has no randomness to give.
  if (sodium_init() < 0) throw std::runtime_error("libsodium could not be started");
}

class MacState {
 public:
  explicit MacState(const PeerKey& key) {
    crypto_auth_hmacsha512256_init(&state_, key.data(), key.size());
  }
  ~MacState() { sodium_memzero(&state_, sizeof state_); }
  void number(std::uint64_t value) {
    std::array<std::uint8_t, 8> bytes;
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
    raw(bytes);
  }
  void text(std::string_view value) {
    number(value.size());
    raw({reinterpret_cast<const std::uint8_t*>(value.data()), value.size()});
  }
  void party(const Party& party) {
    text(party.member.region);
    text(party.member.node);
    number(party.incarnation.hi);
    number(party.incarnation.lo);
    raw(party.nonce);
  }
  Mac finish() {
    Mac out;
    crypto_auth_hmacsha512256_final(&state_, out.data());
    return out;
  }

 private:
  void raw(std::span<const std::uint8_t> bytes) {
    crypto_auth_hmacsha512256_update(&state_, bytes.data(), bytes.size());
  }
  crypto_auth_hmacsha512256_state state_;
};

}  // namespace

PeerKey derive_key(const std::string& secret) {
  start_sodium();
  PeerKey key;
  crypto_generichash(key.data(), key.size(), reinterpret_cast<const unsigned char*>(secret.data()),
                     secret.size(), reinterpret_cast<const unsigned char*>(kPurpose.data()),
                     kPurpose.size());
  return key;
}

PeerKey bind_key(const PeerKey& key, std::span<const std::uint8_t, 32> connection) {
  start_sodium();
  PeerKey bound;
  crypto_generichash(bound.data(), bound.size(), connection.data(), connection.size(), key.data(),
                     key.size());
  return bound;
}

Nonce fresh_nonce() {
  start_sodium();
  Nonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

Mac prove(const PeerKey& key, Role role, std::uint32_t version, const std::string& cluster,
          const Party& dialer, const Party& acceptor) {
  MacState mac(key);
  mac.text("weir peer handshake");
  mac.number(static_cast<std::uint64_t>(role));
  mac.number(version);
  mac.text(cluster);
  mac.party(dialer);
  mac.party(acceptor);
  return mac.finish();
}

bool same(std::span<const std::uint8_t> claimed, const Mac& expected) {
  return claimed.size() == expected.size() &&
         sodium_memcmp(claimed.data(), expected.data(), expected.size()) == 0;
}

std::uint32_t common_version(std::uint32_t newest, std::uint32_t oldest) {
  std::uint32_t best = std::min(newest, kProtocolVersion);
  return best >= std::max(oldest, kOldestProtocolVersion) ? best : 0;
}

std::string printable(const std::string& text) {
  std::string out = text.substr(0, 128);
  for (char& c : out) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return out;
}

std::string printable(const crdt::Member& member) {
  return printable(printable(member.region) + "/" + printable(member.node));
}

}  // namespace weir::rpc
