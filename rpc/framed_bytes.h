#pragma once

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace weir::rpc::test {

/// A message of its own with what `fill` writes, in Cap'n Proto's standard framing. For tests.
template <typename Root, typename Fill>
std::vector<std::byte> framed(Fill&& fill) {
  capnp::MallocMessageBuilder builder;
  fill(builder.initRoot<Root>());
  auto words = capnp::messageToFlatArray(builder);
  std::vector<std::byte> out(words.asBytes().size());
  std::memcpy(out.data(), words.begin(), out.size());
  return out;
}

/// Has `read` called with what is in `bytes`, as the network's reader would give it. False if
/// `read` says so, or KJ throws.
template <typename Root, typename Read>
bool with_framed(std::span<const std::byte> bytes, Read&& read) {
  bool good = false;
  auto exception = kj::runCatchingExceptions([&] {
    auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
    if (words.size() == 0) return;
    std::memcpy(words.begin(), bytes.data(), words.asBytes().size());
    capnp::FlatArrayMessageReader reader(words, capnp::ReaderOptions{1u << 20, 32});
    good = read(reader.getRoot<Root>());
  });
  return good && exception == nullptr;
}

}  // namespace weir::rpc::test
