#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weir::node {

/// Of a token: BLAKE2b-256 (libsodium's crypto_generichash). Tokens are random, so that a plain
/// hash of them tells nothing.
using TokenHash = std::array<std::uint8_t, 32>;

inline constexpr std::size_t kMaxToken = 512;

/// "weir_" and 256 random bits. Throws std::runtime_error without a source of random numbers.
std::string make_token();
TokenHash hash_token(std::string_view token);
/// "blake2b:…", as a file has it.
std::string to_string(const TokenHash& hash);
/// The other way round; empty if it is anything else.
std::optional<TokenHash> parse_token_hash(std::string_view text);

}  // namespace weir::node
