// Fuzz target (scripts/fuzz): arbitrary text as node.yaml.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <weir/node/config.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const weir::node::LoadedConfig loaded = weir::node::parse_config(text, "node.yaml");
  if (!loaded.config && loaded.errors.empty()) std::abort();
  return 0;
}
