// Fuzz target (scripts/fuzz): arbitrary bytes as a peer's message, as what it asks and as what it
// answers.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/rpc/framed_bytes.h>
#include <weir/rpc/peers/forward_wire.h>
#include <weir/rpc/random_messages.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using Bytes = std::span<const std::byte>;

void expect(bool holds) {
  if (!holds) std::abort();
}

// What is accepted can be sent on, and means the same there.

void fuzz_message(Bytes bytes) {
  crdt::Message message;
  std::string error;
  if (!decode_bytes(bytes, message, error)) return;
  std::vector<std::byte> again;
  crdt::Message twice;
  expect(encode_bytes(message, again, error));
  expect(decode_bytes(again, twice, error));
  expect(twice == message);
}

bool read(Bytes bytes, CheckItem& out) {
  return test::with_framed<schema::ForwardedCheck>(bytes, [&](auto root) {
    if (!problem(root).empty()) return false;
    served_bytes(root);
    out = decode(root);
    return true;
  });
}

void fuzz_request(Bytes bytes) {
  CheckItem item;
  if (!read(bytes, item)) return;
  expect(problem(item).empty());
  CheckItem twice;
  expect(read(test::framed<schema::ForwardedCheck>([&](auto root) { encode(item, root); }), twice));
  expect(twice == item);
}

void fuzz_answers(Bytes bytes) {
  ReserveReply reserved;
  if (test::with_framed<schema::Link::ReserveResults>(
          bytes, [&](auto root) { return decode_answer(root, kMaxRuleFilter, reserved); })) {
    expect(reserved.decision.statuses.size() <= kMaxRuleFilter);
    Reply twice;
    auto again =
        test::framed<schema::CheckResult>([&](auto root) { encode(reserved.decision, root); });
    expect(test::with_framed<schema::CheckResult>(
        again, [&](auto root) { return decode_answer(root, kMaxRuleFilter, twice); }));
  }
  SettleReply settled;
  test::with_framed<schema::SettleResult>(bytes,
                                          [&](auto root) { return decode_answer(root, settled); });
}

}  // namespace
}  // namespace weir::rpc

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  weir::crdt::test::FuzzSeeds seeds;
  weir::rpc::test::RandomMessages messages(1);
  for (int i = 0; seeds.wanted() && i < 40; ++i) {
    std::vector<std::byte> bytes;
    std::string error;
    if (weir::rpc::encode_bytes(messages.next(), bytes, error)) seeds.add(bytes);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const weir::rpc::Bytes bytes{reinterpret_cast<const std::byte*>(data), size};
  weir::rpc::fuzz_message(bytes);
  weir::rpc::fuzz_request(bytes);
  weir::rpc::fuzz_answers(bytes);
  return 0;
}
