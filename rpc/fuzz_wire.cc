// libFuzzer target: arbitrary bytes as a peer's message. Built with -DWEIR_FUZZ=ON and clang; run
// as
//   fuzz_wire -max_len=65536 corpus/
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <weir/rpc/wire.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weir;
  crdt::Message message;
  std::string error;
  auto* bytes = reinterpret_cast<const std::byte*>(data);
  if (!rpc::decode_bytes({bytes, size}, message, error)) return 0;

  // What is accepted can be sent on, and means the same there.
  std::vector<std::byte> again;
  crdt::Message twice;
  if (!rpc::encode_bytes(message, again, error)) std::abort();
  if (!rpc::decode_bytes(again, twice, error)) std::abort();
  if (!(twice == message)) std::abort();
  return 0;
}
