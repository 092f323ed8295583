#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <weir/crdt/ids.h>

namespace weir::rpc {

/// The versions of the peer protocol that this build speaks (docs/protocol.md).
inline constexpr std::uint32_t kProtocolVersion = 2;
inline constexpr std::uint32_t kOldestProtocolVersion = 2;

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMacBytes = 32;
using Nonce = std::array<std::uint8_t, kNonceBytes>;
using Mac = std::array<std::uint8_t, kMacBytes>;
using PeerKey = std::array<std::uint8_t, 32>;

/// One end of a handshake.
struct Party {
  crdt::Member member;
  crdt::Incarnation incarnation;
  Nonce nonce{};
};

enum class Role : std::uint8_t { dialer = 1, acceptor = 2 };

/// The key that the members of a cluster share, from their secret, which may be empty where
/// certificates stand for it.
PeerKey derive_key(const std::string& secret);

/// The key of one connection: of what the members share, and of what only the two ends of the TLS
/// connection below know.
PeerKey bind_key(const PeerKey& key, std::span<const std::uint8_t, 32> connection);

Nonce fresh_nonce();

/// What proves `role`'s knowledge of the key in this very exchange: a MAC over the role, the
/// version, the cluster and both parties, each field with its length in front.
Mac prove(const PeerKey& key, Role role, std::uint32_t version, const std::string& cluster,
          const Party& dialer, const Party& acceptor);

/// In constant time.
bool same(std::span<const std::uint8_t> claimed, const Mac& expected);

/// The newest version that both sides speak, 0 if there is none.
std::uint32_t common_version(std::uint32_t newest, std::uint32_t oldest);

/// "region/node" with anything unprintable replaced and at most 128 bytes: text from a stranger
/// that goes into logs.
std::string printable(const crdt::Member& member);
std::string printable(const std::string& text);

}  // namespace weir::rpc
