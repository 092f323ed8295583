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
  benchmark::RunSpecifiedBenchmarks();
}
