#include <weir/rpc/wire.h>

#include <capnp/message.h>
#include <gtest/gtest.h>

#include <limits>

#include <weir/crdt/codec.h>
#include <weir/rpc/random_messages.h>

namespace weir::rpc {
namespace {

constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();

crdt::Cell windowed_cell() {
  crdt::Cell cell;
  cell.id = {{1, kMax}, {kMinute, 3 * kMinute}};
  cell.slots = {{{{1, 2}, 0}, 5}, {{{3, 4}, 0}, kMax}};
  return cell;
}

crdt::Cell bucket_cell() {
  crdt::Cell cell;
  cell.id.series = {7, 8};
  cell.slots = {{{{1, 2}, 10}, 5}, {{{1, 2}, 20}, 6}};
  cell.bucket.checkpoint = {11, 5 * kSecond, ~crdt::DebtTicks{0}};
  cell.bucket.touched = 6 * kSecond;
  cell.bucket.expiry = 7 * kSecond;
  return cell;
}

crdt::Delta delta() {
  crdt::Delta out;
  out.cells = {windowed_cell(), bucket_cell(), windowed_cell()};
  out.cells[2].id.series = {9, 9};
  out.cells[2].slots.clear();
  out.members = {{{1, 2}, {"eu", "a"}}, {{5, 6}, {"", ""}}, {{7, 7}, {"eu", "a"}}};
  return out;
}

std::vector<crdt::Message> samples() {
  crdt::Group windowed{crdt::generation_of({kMinute, 3 * kMinute}), 63};
  crdt::Group buckets{crdt::kBucketGeneration, 0};
  return {crdt::Push{{1, 2}, 3, 4, true, delta()},
          crdt::Push{},
          crdt::Ack{{1, 2}, {3, 4}, kMax},
          crdt::Ack{},
          crdt::DigestOffer{kMaxTime, kMax, {{windowed, 1}, {buckets, kMax}}},
          crdt::DigestOffer{},
          crdt::Inventory{9, true, {{windowed, 1, kMax, {{1, 2}, {3, 4}}}, {buckets, 0, 0, {}}}},
          crdt::Inventory{},
          crdt::Repair{delta(), {{windowed, {1, kMax}}, {buckets, {}}}},
          crdt::Repair{}};
}

crdt::Message round_trip(const crdt::Message& in) {
  std::vector<std::byte> bytes;
  std::string error;
  EXPECT_TRUE(encode_bytes(in, bytes, error)) << error;
  EXPECT_LE(bytes.size(), encoded_size(in) + 64) << "the estimate must not fall short";
  crdt::Message out;
  EXPECT_TRUE(decode_bytes(bytes, out, error)) << error;
  return out;
}

TEST(Wire, DecodeOfEncodeIsIdentity) {
  for (const auto& message : samples()) EXPECT_TRUE(round_trip(message) == message);
}

TEST(Wire, DecodeOfEncodeIsIdentityForRandomMessages) {
  test::RandomMessages random(20240611);
  for (int i = 0; i < 2000; ++i) {
    crdt::Message message = random.next();
    ASSERT_TRUE(round_trip(message) == message) << "message " << i;
  }
}

TEST(Wire, WindowedCellsAreCompact) {
  crdt::Push push;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    crdt::Cell cell = windowed_cell();
    cell.id.series.lo = i;
    cell.slots.resize(1);
    push.delta.cells.push_back(cell);
  }
  std::vector<std::byte> bytes;
  std::string error;
  ASSERT_TRUE(encode_bytes(push, bytes, error)) << error;
  EXPECT_LT(bytes.size(), 1000u * 18u);
}

// ---- What must be refused ----

/// The error of decoding what `make` builds; empty if it is accepted.
template <typename Make>
std::string refusal(Make&& make) {
  capnp::MallocMessageBuilder builder;
  auto root = builder.initRoot<schema::Message>();
  make(root);
  crdt::Message out;
  std::string error;
  return decode(root.asReader(), out, error) ? "" : error;
}

/// What a push with these bytes for a delta is refused for.
std::string delta_refusal(std::span<const std::byte> bytes) {
  return refusal([&](schema::Message::Builder root) {
    root.initPush().setDelta(
        kj::arrayPtr(reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()));
  });
}

std::string delta_refusal(const crdt::Delta& delta) {
  std::vector<std::byte> bytes;
  crdt::encode(delta, bytes);
  return delta_refusal(bytes);
}

TEST(Wire, DeltasAreBounded) {
  EXPECT_EQ(delta_refusal(delta()), "");
  crdt::Delta many;
  many.cells.assign(crdt::kMaxDeltaCells + 1, windowed_cell());
  EXPECT_EQ(delta_refusal(many), "too many cells in a delta");

  many.cells.assign(crdt::kMaxDeltaCells, windowed_cell());
  for (std::uint64_t i = many.cells[0].slots.size();
       i <= crdt::kMaxDeltaSlots / crdt::kMaxDeltaCells; ++i) {
    for (crdt::Cell& cell : many.cells) cell.slots.push_back({{{4, i}, 0}, 1});
  }
  EXPECT_EQ(delta_refusal(many), "too many slots in a delta");

  many = {};
  for (std::uint64_t i = 0; i <= kMaxDeltaMembers; ++i) {
    many.members[{1, i}] = {"eu", std::to_string(i)};
  }
  EXPECT_EQ(delta_refusal(many), "too many members in a delta");

  many = {};
  for (std::uint64_t i = 0; i <= kMaxDeltaWriters; ++i) many.members[{1, i}] = {"eu", "a"};
  EXPECT_EQ(delta_refusal(many), "too many writers in a delta");
}

/// A store may hold the version before; no peer may send it, which would know no bounds.
TEST(Wire, DeltasOfAnotherVersionAreRefused) {
  std::vector<std::byte> bytes;
  crdt::encode(delta(), bytes);
  bytes[0] = std::byte{1};
  EXPECT_EQ(delta_refusal(bytes), "delta of version 1, expected 2");
  EXPECT_EQ(delta_refusal(std::span<const std::byte>()), "empty delta");
}

TEST(Wire, CountsAreBounded) {
  EXPECT_EQ(refusal([](auto m) {
              m.initDigestOffer().initGroups().initNumber(crdt::kMaxOfferGroups + 1);
            }),
            "too many groups");
  EXPECT_EQ(refusal([](auto m) { m.initInventory().initCellKey(crdt::kMaxInventoryCells + 1); }),
            "too many cells in an inventory");
  EXPECT_EQ(refusal([](auto m) { m.initRepair().initKey(crdt::kMaxInventoryCells + 1); }),
            "too many wanted cells");
}

TEST(Wire, ColumnsMustAgree) {
  auto differ = [](const std::string& error) {
    return error.find("differ in length") != std::string::npos;
  };
  EXPECT_TRUE(differ(refusal([](auto m) { m.initDigestOffer().initDigest(1); })));
  EXPECT_TRUE(differ(refusal([](auto m) { m.initDigestOffer().initGroups().initShard(1); })));
  EXPECT_TRUE(differ(refusal([](auto m) { m.initInventory().initLow(1); })));
  EXPECT_TRUE(differ(refusal([](auto m) { m.initInventory().initCellDigest(1); })));
  EXPECT_TRUE(differ(refusal([](auto m) { m.initRepair().initKeyCount(1); })));
}

TEST(Wire, ReferencesMustPointSomewhere) {
  EXPECT_NE(refusal([](auto m) {
              auto inventory = m.initInventory();
              auto groups = inventory.initGroups();
              groups.initGrainLog2(1);
              groups.initNumber(1);
              groups.initShard(1);
              inventory.initLow(1);
              inventory.initHigh(1);
              inventory.initCellCount(1).set(0, 5);
            }).find("more cells"),
            std::string::npos);
  EXPECT_EQ(refusal([](auto m) {
              m.initInventory().initCellKey(1);
              m.getInventory().initCellDigest(1);
            }),
            "inventory cells that belong to no group");
  EXPECT_EQ(refusal([](auto m) { m.initRepair().initKey(1); }),
            "wanted cells that belong to no group");
}

TEST(Wire, InvalidCellsAreNamed) {
  crdt::Delta spoilt = delta();
  spoilt.cells[0].id.epoch.expiry = 1;  // before it starts
  EXPECT_NE(delta_refusal(spoilt), "");
  spoilt = delta();
  spoilt.cells[0].slots[0].value = 0;
  EXPECT_EQ(delta_refusal(spoilt), "cell 0 is not valid");
  spoilt = delta();
  std::swap(spoilt.cells[0].slots[0], spoilt.cells[0].slots[1]);
  EXPECT_EQ(delta_refusal(spoilt), "cell 0 is not valid");
  spoilt = delta();
  spoilt.cells[0].slots[0].id.birth = 5;  // no row of a window
  EXPECT_EQ(delta_refusal(spoilt), "cell 0 is not valid");
  spoilt = delta();
  spoilt.cells[1].bucket.checkpoint.counted = 12;  // more than the slots
  EXPECT_EQ(delta_refusal(spoilt), "cell 1 is not valid");
  spoilt = delta();
  spoilt.cells[1].bucket.expiry = -1;
  EXPECT_EQ(delta_refusal(spoilt), "cell 1 is not valid");
}

TEST(Wire, GenerationsWhoseEndCannotBeComputedAreRefused) {
  auto group = [](int grain, std::int64_t number, unsigned shard) {
    return refusal([&](schema::Message::Builder m) {
      auto offer = m.initDigestOffer();
      offer.initDigest(1);
      auto groups = offer.initGroups();
      groups.initGrainLog2(1).set(0, static_cast<std::int8_t>(grain));
      groups.initNumber(1).set(0, number);
      groups.initShard(1).set(0, static_cast<std::uint16_t>(shard));
    });
  };
  EXPECT_EQ(group(0, 1000, 63), "");
  EXPECT_EQ(group(-1, 0, 0), "");
  EXPECT_EQ(group(0, 1000, 64), "group 0 is not valid");
  EXPECT_EQ(group(-1, 1, 0), "group 0 is not valid");
  EXPECT_EQ(group(-2, 0, 0), "group 0 is not valid");
  EXPECT_EQ(group(0, -1, 0), "group 0 is not valid");
  EXPECT_EQ(group(17, std::numeric_limits<std::int64_t>::max(), 0), "group 0 is not valid");
  EXPECT_EQ(group(127, 1, 0), "group 0 is not valid");
  EXPECT_EQ(refusal([](auto m) { m.initDigestOffer().setFloor(-1); }), "floor is out of range");
}

TEST(Wire, NamesAreBounded) {
  crdt::Delta named = delta();
  named.members[{1, 2}].node.assign(kMaxName + 1, 'n');
  EXPECT_EQ(delta_refusal(named), "member 2 has a bad name");
}

TEST(Wire, UnknownKindsAreRefused) {
  capnp::MallocMessageBuilder builder;
  auto root = builder.initRoot<schema::Message>();
  root.initAck();
  // The union's tag is the first word's first two bytes.
  auto segment = builder.getSegmentsForOutput()[0];
  std::vector<capnp::word> words(segment.begin(), segment.end());
  reinterpret_cast<std::uint16_t*>(&words[1])[0] = 77;
  kj::ArrayPtr<const capnp::word> segments[] = {kj::arrayPtr(words.data(), words.size())};
  capnp::SegmentArrayMessageReader reader(kj::arrayPtr(segments, 1));
  crdt::Message out;
  std::string error;
  EXPECT_FALSE(decode(reader.getRoot<schema::Message>(), out, error));
  EXPECT_NE(error.find("does not know"), std::string::npos) << error;
}

TEST(Wire, SendersKeepTheBounds) {
  std::vector<std::byte> bytes;
  std::string error;
  crdt::Push push;
  push.delta.cells.assign(crdt::kMaxDeltaCells + 1, windowed_cell());
  EXPECT_FALSE(encode_bytes(push, bytes, error));
  EXPECT_EQ(error, "too many cells in a delta");

  push.delta.cells = {windowed_cell()};
  push.delta.cells[0].slots[0].value = 0;
  EXPECT_FALSE(encode_bytes(push, bytes, error));
  EXPECT_EQ(error, "cell 0 is not valid");

  crdt::DigestOffer offer;
  offer.groups.resize(crdt::kMaxOfferGroups + 1);
  EXPECT_FALSE(encode_bytes(offer, bytes, error));
  EXPECT_EQ(error, "too many groups");

  crdt::Repair repair;
  repair.wants.resize(1);
  repair.wants[0].keys.resize(crdt::kMaxInventoryCells + 1);
  EXPECT_FALSE(encode_bytes(repair, bytes, error));
  EXPECT_EQ(error, "too many wanted cells");
}

TEST(Wire, TheLargestMessagesFit) {
  crdt::DigestOffer offer;
  offer.groups.resize(crdt::kMaxOfferGroups);
  EXPECT_TRUE(round_trip(offer) == crdt::Message(offer));

  crdt::Push push;
  for (std::uint64_t i = 0; i < crdt::kMaxDeltaCells; ++i) {
    crdt::Cell cell;
    cell.id.series = {i, i};
    for (std::uint64_t s = 0; s < crdt::kMaxDeltaSlots / crdt::kMaxDeltaCells; ++s) {
      cell.slots.push_back({{{i + 1, s}, s}, 1});
    }
    push.delta.cells.push_back(std::move(cell));
  }
  EXPECT_TRUE(round_trip(push) == crdt::Message(push));
}

/// What a fuzzer would do, in every build: no mutation of a valid message may crash the decoder,
/// and what it accepts must survive another round trip.
TEST(Wire, MutatedMessagesNeverCrash) {
  test::RandomMessages random(7);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    std::vector<std::byte> valid;
    std::string error;
    ASSERT_TRUE(encode_bytes(random.next(), valid, error)) << error;
    for (int k = 0; k < 10; ++k) {
      auto bytes = valid;
      for (auto n = 1 + random.below(4); n > 0; --n) {
        auto at = random.below(bytes.size());
        switch (random.below(4)) {
          case 0:
            bytes[at] ^= static_cast<std::byte>(1u << random.below(8));
            break;
          case 1:
            bytes[at] = static_cast<std::byte>(random.below(256));
            break;
          case 2:
            for (auto j = at & ~7u; j < bytes.size() && j < (at & ~7u) + 8; ++j) {
              bytes[j] = static_cast<std::byte>(0xff);
            }
            break;
          default:
            bytes.resize(at + 1);
            break;
        }
      }
      crdt::Message out;
      if (!decode_bytes(bytes, out, error)) {
        ASSERT_FALSE(error.empty());
        ++refused;
        continue;
      }
      ++accepted;
      std::vector<std::byte> again;
      ASSERT_TRUE(encode_bytes(out, again, error)) << error;
      crdt::Message twice;
      ASSERT_TRUE(decode_bytes(again, twice, error)) << error;
      ASSERT_TRUE(twice == out);
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 1000);
}

TEST(Wire, GarbageIsRefused) {
  test::RandomMessages random(99);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> bytes(random.below(200));
    for (auto& b : bytes) b = static_cast<std::byte>(random.below(256));
    crdt::Message out;
    std::string error;
    bool accepted = decode_bytes(bytes, out, error);
    ASSERT_EQ(accepted, error.empty());
  }
}

TEST(Wire, RepliesRoundTrip) {
  Reply reply;
  reply.allowed = false;
  reply.deciding = 1;
  reply.statuses = {{"per-ip", 10, 3, kSecond, 0, true, true, false},
                    {"per-key", kMax, 0, kMinute, kNever, false, false, true}};
  reply.statuses[0].delay = 250 * kMillisecond;
  reply.statuses[0].over_admission = 17;
  Reply failed;
  failed.error = {ErrorKind::deadline, "no answer in time"};
  for (const auto& in : {reply, failed, Reply{}}) {
    capnp::MallocMessageBuilder builder;
    auto root = builder.initRoot<schema::CheckResult>();
    encode(in, root);
    Reply out;
    ASSERT_TRUE(decode(root.asReader(), out));
    EXPECT_EQ(out, in);
  }
  {
    // A node that knows no delays leaves it 0; a negative one is none.
    capnp::MallocMessageBuilder builder;
    auto root = builder.initRoot<schema::CheckResult>();
    root.initStatuses(1);
    Reply out;
    ASSERT_TRUE(decode(root.asReader(), out));
    EXPECT_EQ(out.statuses[0].delay, 0);
    root.getStatuses()[0].setDelayNs(-5);
    ASSERT_TRUE(decode(root.asReader(), out));
    EXPECT_EQ(out.statuses[0].delay, 0);
  }
  capnp::MallocMessageBuilder builder;
  auto root = builder.initRoot<schema::CheckResult>();
  root.setDeciding(3);
  Reply out;
  EXPECT_FALSE(decode(root.asReader(), out)) << "decided by a status that is not there";
}

}  // namespace
}  // namespace weir::rpc
