// Fuzz target (scripts/fuzz): a member's messages, each within its bounds and whatever it says,
// given to a replica with counts of its own and another peer. Its digests must stay what its cells
// add up to, its own counts right, and its memory in proportion to what it was sent.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/crdt/replica.h>
#include <weir/rpc/framed_bytes.h>
#include <weir/rpc/random_messages.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

constexpr Nanos kStart = 1'700'000'000 * kSecond;
const crdt::Incarnation kSelf{7, 7};
const crdt::Incarnation kPeers[] = {{1, 1}, {2, 2}};
const crdt::CellId kOwn{{11, 12}, {kStart - kSecond, kStart + kHour}};

void expect(bool holds) {
  if (!holds) std::abort();
}

/// One life of a replica, as its input says.
class Life {
 public:
  explicit Life(std::span<const std::byte> script) : script_(script) {
    for (crdt::PeerIndex peer = 0; peer < 2; ++peer) replica_.peer_up(peer, kPeers[peer], now_);
  }

  void run() {
    while (!script_.empty()) step(take(1));
    // It goes on: what it counts now, it counts.
    count();
    settle();
    expect(own_value() >= counted_);
    expect(replica_.digest() == summed());
  }

 private:
  static crdt::ReplicaOptions options() {
    crdt::ReplicaOptions out;
    out.incarnation = kSelf;
    out.self = {"here", "self"};
    out.peers = {{"there", "first"}, {"there", "second"}};
    return out;
  }

  std::size_t take(std::size_t bytes) {
    std::size_t value = 0;
    for (; bytes > 0 && !script_.empty(); --bytes, script_ = script_.subspan(1)) {
      value = value << 8 | std::to_integer<std::size_t>(script_.front());
    }
    return value;
  }

  void step(std::size_t what) {
    const auto peer = static_cast<crdt::PeerIndex>(what >> 7);
    switch (what & 7) {
      case 0:
        count();
        break;
      case 1:
        replica_.peer_down(peer);
        break;
      case 2:
        replica_.peer_up(peer, kPeers[peer], now_);
        break;
      case 3:
        settle();
        break;
      default:
        receive(peer);
    }
  }

  void count() {
    const crdt::OwnCount own{.cell = kOwn, .value = ++counted_};
    replica_.count({&own, 1}, now_);
  }

  void receive(crdt::PeerIndex peer) {
    const std::size_t size = std::min(take(2), script_.size());
    crdt::Message message;
    std::string error;
    const bool good = decode_bytes(script_.first(size), message, error);
    script_ = script_.subspan(size);
    if (good) replica_.receive(peer, kPeers[peer], message, now_);
  }

  /// Some time passes; what is to be written is.
  void settle() {
    now_ += kSecond;
    replica_.tick(now_);
    crdt::Outbox out = replica_.take();
    replica_.persisted(replica_.written(), now_);
    if (!replica_.take_alarms().empty()) renew();
    expect(replica_.cell_count() <= kMostCells);
  }

  /// Where its own slot was forged, a node takes a fresh incarnation and hands its counts in again.
  void renew() {
    replica_.reincarnate({7, ++incarnations_}, false);
    const std::uint64_t again = counted_;
    counted_ = 0;
    if (again == 0) return;
    count();
    replica_.persisted(replica_.written(), now_);
  }

  std::uint64_t own_value() const {
    const auto cell = replica_.find(kOwn);
    if (!cell) return now_ > kOwn.epoch.expiry ? counted_ : 0;
    for (const crdt::Slot& slot : cell->slots) {
      if (slot.id.writer == replica_.incarnation()) return slot.value;
    }
    return 0;
  }

  /// The digest of a replica that is given what this one holds.
  std::uint64_t summed() const {
    crdt::Replica other(options(), true);
    crdt::Delta all;
    replica_.for_each([&](const crdt::Cell& cell) { all.cells.push_back(cell); });
    other.restore(all, now_);
    return other.digest();
  }

  /// What an input of libFuzzer's size can bring at most.
  static constexpr std::size_t kMostCells = 20'000;

  std::span<const std::byte> script_;
  Nanos now_ = kStart;
  crdt::Replica replica_{options(), false};
  std::uint64_t counted_ = 0;
  std::uint64_t incarnations_ = 7;
};

}  // namespace
}  // namespace weir::rpc

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  weir::crdt::test::FuzzSeeds seeds;
  weir::rpc::test::RandomMessages messages(1);
  for (int i = 0; seeds.wanted() && i < 40; ++i) {
    std::vector<std::byte> script;
    for (int n = 0; n < 3; ++n) {
      std::vector<std::byte> bytes;
      std::string error;
      if (!weir::rpc::encode_bytes(messages.next(), bytes, error) || bytes.size() > 4000) continue;
      const auto head = {4 | n << 7, static_cast<int>(bytes.size() >> 8),
                         static_cast<int>(bytes.size() & 255)};
      for (int byte : head) script.push_back(static_cast<std::byte>(byte));
      script.insert(script.end(), bytes.begin(), bytes.end());
      script.push_back(std::byte{static_cast<unsigned char>(n)});
    }
    seeds.add(script);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  weir::rpc::Life({reinterpret_cast<const std::byte*>(data), size}).run();
  return 0;
}
