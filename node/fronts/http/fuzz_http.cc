// Fuzz target (scripts/fuzz): arbitrary bytes as what an HTTP client sends. What it is answered
// must not depend on how the bytes were cut.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <weir/node/fronts/http/http_test_util.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static weir::node::test::PieceServer server;
  if (size == 0) return 0;
  // The first byte says how the second run is cut.
  const std::size_t cut = 1 + data[0] % 64;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto whole = server.ask({bytes});
  const auto cut_up = server.ask(weir::node::test::pieces_of(bytes, cut));
  if (whole.text != cut_up.text || whole.closed != cut_up.closed) std::abort();
  return 0;
}
