#include <weir/bench/working_node.h>
#include <weir/limits/algorithms/window.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace weir::bench {

Nanos wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

WorkingNode::WorkingNode(std::shared_ptr<const RuleSet> rules, std::uint64_t keys,
                         std::size_t peer_cells)
    : keys_(keys), peer_cells_(peer_cells) {
  std::string name = (std::filesystem::temp_directory_path() / "weir-bench-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
  directory_ = name;
  storage::LmdbOptions disk;
  disk.path = (directory_ / "store").string();
  disk.cluster = "bench";
  disk.self = {"here", "one"};
  store_ = storage::make_lmdb_store(disk);
  node::EngineOptions options;
  options.rules = std::move(rules);
  options.max_series = keys * 2;
  options.replica.self = disk.self;
  options.replica.peers = {{"there", "two"}};
  options.fresh_incarnation = [next = std::uint64_t{1}]() mutable {
    return crdt::Incarnation{next++, 1};
  };
  node::EngineEvents events;
  events.send = [this](crdt::PeerIndex, const crdt::Message& message) {
    if (const auto* push = std::get_if<crdt::Push>(&message)) {
      acks_.push_back({push->pusher, peer_, push->upto});
    }
  };
  events.reincarnated = [](const crdt::Incarnation&) {};
  events.log = [](const std::string&, const std::string&) {};
  engine_ = std::make_unique<node::Engine>(options, store_.get(), events);
  storage::StoreEvents store_events;
  store_events.committed = [this](crdt::WriteId upto) {
    std::lock_guard lock(mutex_);
    committed_ = upto;
  };
  store_events.failed = [this](const std::string& reason) {
    std::lock_guard lock(mutex_);
    failure_ = reason;
  };
  std::string error;
  if (!engine_->start(wall_clock(), store_events, error)) {
    std::filesystem::remove_all(directory_);
    throw std::runtime_error(error);
  }
  engine_->peer_up(0, peer_, wall_clock());
  driver_ = std::thread([this] { drive(); });
}

WorkingNode::~WorkingNode() {
  stopping_ = true;
  if (driver_.joinable()) driver_.join();
  engine_.reset();
  store_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

void WorkingNode::drive() {
  auto next_push = std::chrono::steady_clock::now();
  while (!stopping_) {
    auto turn = std::chrono::steady_clock::now();
    crdt::WriteId committed = 0;
    {
      std::lock_guard lock(mutex_);
      if (!failure_.empty()) return;
      committed = std::exchange(committed_, 0);
    }
    if (committed > 0) engine_->committed(committed, wall_clock());
    for (const crdt::Ack& ack : std::exchange(acks_, {})) {
      engine_->receive(0, peer_, ack, wall_clock());
    }
    if (turn >= next_push) {
      next_push = turn + std::chrono::milliseconds(50);
      hear_peer(wall_clock());
    }
    engine_->pump(wall_clock());
    ++pumps_;
    if (!engine_->ready_for_more()) ++behind_;
    if (engine_->ready_for_more() && store_->backlog() == 0) ++settled_;
    std::this_thread::sleep_until(turn + std::chrono::milliseconds(5));
  }
}

void WorkingNode::hear_peer(Nanos wall) {
  Nanos now = engine_->clock(wall);
  crdt::Push push;
  push.pusher = peer_;
  push.after = peer_stamp_;
  push.base = peer_stamp_ == 0;
  Limiter& limiter = engine_->limiter();
  std::map<crdt::CellId, std::uint64_t> counts;
  for (std::size_t i = 0; i < peer_cells_; ++i) {
    Key16 key = key_of(next_random(seed_) % keys_);
    Entry entry{"api_key", key.view()};
    Request request{"api", {&entry, 1}, 1};
    crdt::SeriesId series = limiter.series_of(0, request);
    WindowShape shape = window_shape(limiter.rules()->rules()[0], series);
    crdt::CellId id{series, shape.epoch(shape.index(now))};
    counts[id] = ++peer_counts_[id];
  }
  for (const auto& [id, count] : counts) {
    push.delta.cells.push_back({id, {{{peer_, 0}, count}}, {}});
  }
  push.delta.members[peer_] = {"there", "two"};
  peer_stamp_ += counts.size();
  push.upto = peer_stamp_;
  engine_->receive(0, peer_, push, wall);
  std::erase_if(peer_counts_, [now](const auto& one) { return one.first.epoch.expiry < now; });
}

bool WorkingNode::settle(double seconds) {
  auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  // Two more: the pump that is under way may have drained before the last decision.
  std::uint64_t wanted = settled_ + 3;
  while (settled_ < wanted && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return settled_ >= wanted;
}

WorkingNode::Background WorkingNode::stop() {
  stopping_ = true;
  if (driver_.joinable()) driver_.join();
  engine_->stop(wall_clock());
  if (!failure_.empty()) throw std::runtime_error(failure_);
  Background out;
  storage::StoreCounters disk = store_->counters();
  out.commits = disk.commits;
  out.committed_bytes = disk.bytes;
  out.cells_pushed = engine_->replica().counters().cells_sent;
  out.cells_absorbed = engine_->replica().counters().cells_received;
  out.pumps = pumps_;
  out.behind = behind_;
  return out;
}

}  // namespace weir::bench
