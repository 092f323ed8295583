#include <weir/node/access/token.h>

#include <sodium.h>

#include <stdexcept>

namespace weir::node {
namespace {

constexpr std::string_view kTokenStart = "weir_";
constexpr std::string_view kHashStart = "blake2b:";
constexpr std::string_view kDigits = "0123456789abcdef";

void append_hex(std::string& out, const TokenHash& bytes) {
  for (const std::uint8_t byte : bytes) {
    out.push_back(kDigits[byte >> 4]);
    out.push_back(kDigits[byte & 15]);
  }
}

}  // namespace

std::string make_token() {
  if (sodium_init() < 0) throw std::runtime_error("there is no source of random numbers");
  TokenHash random{};
  randombytes_buf(random.data(), random.size());
  std::string out(kTokenStart);
  append_hex(out, random);
  return out;
}

TokenHash hash_token(std::string_view token) {
  TokenHash out{};
  crypto_generichash(out.data(), out.size(), reinterpret_cast<const unsigned char*>(token.data()),
                     token.size(), nullptr, 0);
  return out;
}

std::string to_string(const TokenHash& hash) {
  std::string out(kHashStart);
  append_hex(out, hash);
  return out;
}

std::optional<TokenHash> parse_token_hash(std::string_view text) {
  TokenHash out{};
  if (!text.starts_with(kHashStart)) return std::nullopt;
  text.remove_prefix(kHashStart.size());
  if (text.size() != 2 * out.size()) return std::nullopt;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t digit = kDigits.find(text[i]);
    if (digit == kDigits.npos) return std::nullopt;
    out[i / 2] = static_cast<std::uint8_t>(out[i / 2] << 4 | digit);
  }
  return out;
}

}  // namespace weir::node
