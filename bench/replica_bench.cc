// What stands behind a counted request in the replica: count, the write's completion and its share
// of the ticks, at 51,000 counts a second in pumps of 5 ms. Of peers that are up each acknowledges
// what it is sent; `away` has peers that went and did not come back.
#include <benchmark/benchmark.h>
#include <weir/crdt/replica.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weir::bench {
namespace {

using crdt::Incarnation;
using crdt::Replica;

constexpr Nanos kPump = 5 * kMillisecond;
constexpr std::size_t kBatch = 256;

class Node {
 public:
  Node(std::uint64_t keys, bool buckets, std::size_t peers, bool away)
      : buckets_(buckets), totals_(keys) {
    crdt::ReplicaOptions options;
    options.self = {"r", "n"};
    options.incarnation = {1, 1};
    for (std::size_t i = 0; i < peers; ++i) options.peers.push_back({"r", std::to_string(i)});
    replica_.emplace(std::move(options), false);
    for (crdt::PeerIndex i = 0; i < peers; ++i) replica_->peer_up(i, {2, i + 1}, now_);
    for (crdt::PeerIndex i = 0; away && i < peers; ++i) replica_->peer_down(i);
    for (std::uint64_t key = 0; key < keys; key += kBatch) {
      for (std::size_t i = 0; i < kBatch; ++i) add((key + i) % keys);
      pump();
    }
  }

  void pump_of_random() {
    for (std::size_t i = 0; i < kBatch; ++i) {
      random_ = crdt::mix64(random_ + 0x9E3779B97F4A7C15ull, 1);
      add(random_ % totals_.size());
    }
    pump();
  }

 private:
  void add(std::uint64_t key) {
    crdt::OwnCount count;
    count.cell.series = {crdt::mix64(key, 2), crdt::mix64(key, 3)};
    count.value = ++totals_[key];
    if (buckets_) {
      count.birth = 1'000'000;
      count.bucket = {{count.value, now_, 1000}, now_, now_ + kMinute};
    } else {
      count.cell.epoch = {kStart, kStart + kDay};
    }
    counts_.push_back(count);
  }

  void pump() {
    crdt::WriteId write = replica_->count(counts_, now_);
    counts_.clear();
    drain();
    if (now_ >= next_sweep_) {
      replica_->retire_buckets(now_ - kSecond);
      next_sweep_ = now_ + kSecond;
    }
    replica_->tick(now_);
    drain();
    replica_->persisted(write, now_);
    drain();
    now_ += kPump;
  }

  void drain() {
    crdt::Outbox out = replica_->take();
    for (const crdt::Envelope& envelope : out.messages) {
      const auto* push = std::get_if<crdt::Push>(&envelope.message);
      if (push == nullptr) continue;
      Incarnation peer{2, envelope.to + 1};
      replica_->receive(envelope.to, peer, crdt::Ack{push->pusher, peer, push->upto}, now_);
    }
    benchmark::DoNotOptimize(out);
  }

  static constexpr Nanos kStart = 1'000'000 * kSecond;
  bool buckets_;
  std::vector<std::uint64_t> totals_;
  std::vector<crdt::OwnCount> counts_;
  std::optional<Replica> replica_;
  Nanos now_ = kStart;
  Nanos next_sweep_ = kStart;
  std::uint64_t random_ = 1;
};

void measure(benchmark::State& state, bool buckets, std::size_t peers, bool away) {
  Node node(static_cast<std::uint64_t>(state.range(0)), buckets, peers, away);
  for (auto _ : state) node.pump_of_random();
  auto counts = static_cast<double>(state.iterations()) * kBatch;
  state.counters["per_count"] =
      benchmark::Counter(counts, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

/// What peers push, 1000 slots each time, merged into cells that each of four peers writes to: a
/// slot grows in every one.
void measure_merge(benchmark::State& state) {
  auto keys = static_cast<std::uint64_t>(state.range(0));
  constexpr std::uint64_t kWriters = 4;
  constexpr std::uint64_t kSlots = 1000;
  constexpr Nanos kNow = 1'000'000 * kSecond;
  crdt::ReplicaOptions options;
  options.incarnation = {1, 1};
  for (std::uint64_t i = 0; i < kWriters; ++i) options.peers.push_back({"r", std::to_string(i)});
  Replica replica(std::move(options), true);
  std::vector<std::uint64_t> stamps(kWriters, 0);
  for (std::uint64_t i = 0; i < kWriters; ++i) {
    replica.peer_up(static_cast<crdt::PeerIndex>(i), {2, i + 1}, kNow);
  }
  std::uint64_t random = 1;
  std::uint64_t value = 0;
  auto receive = [&](std::uint64_t writer, auto key) {
    crdt::Push push;
    push.pusher = {2, writer + 1};
    push.after = stamps[writer];
    push.upto = stamps[writer] += kSlots;
    push.base = push.after == 0;
    push.delta.cells.resize(kSlots);
    for (crdt::Cell& cell : push.delta.cells) {
      std::uint64_t number = key();
      cell.id = {{crdt::mix64(number, 2), crdt::mix64(number, 3)}, {kNow, kNow + kDay}};
      cell.slots.push_back({{push.pusher, 0}, ++value});
    }
    return push;
  };
  for (std::uint64_t key = 0; key < keys;) {
    crdt::Push push = receive(key / kSlots % kWriters, [&] { return key++; });
    replica.receive(static_cast<crdt::PeerIndex>(push.pusher.lo - 1), push.pusher, push, kNow);
    replica.take();
  }
  std::uint64_t writer = 0;
  for (auto _ : state) {
    state.PauseTiming();
    writer = (writer + 1) % kWriters;
    crdt::Push push = receive(writer, [&] {
      random = crdt::mix64(random + 0x9E3779B97F4A7C15ull, 1);
      return random % keys;
    });
    state.ResumeTiming();
    replica.receive(static_cast<crdt::PeerIndex>(writer), push.pusher, push, kNow);
    benchmark::DoNotOptimize(replica.take());
  }
  auto slots = static_cast<double>(state.iterations()) * kSlots;
  state.counters["per_slot"] =
      benchmark::Counter(slots, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["bytes_a_cell"] =
      static_cast<double>(replica.cell_bytes()) / static_cast<double>(replica.cell_count());
}

void add(const char* name, bool buckets, std::size_t peers, bool away) {
  benchmark::RegisterBenchmark(name, measure, buckets, peers, away)
      ->Arg(100'000)
      ->Arg(1'000'000)
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace
}  // namespace weir::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  weir::bench::add("buckets/alone", true, 0, false);
  weir::bench::add("buckets/four_peers", true, 4, false);
  weir::bench::add("buckets/four_peers_away", true, 4, true);
  weir::bench::add("windows/alone", false, 0, false);
  weir::bench::add("windows/four_peers", false, 4, false);
  benchmark::RegisterBenchmark("merge", weir::bench::measure_merge)
      ->Arg(100'000)
      ->Arg(1'000'000)
      ->Arg(10'000'000)
      ->Unit(benchmark::kMicrosecond);
  benchmark::RunSpecifiedBenchmarks();
}
