#include "load.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>

#include <weir/crdt/ids.h>
#include <weir/node/cli/access_log.h>

namespace weir::examples {

Nanos wall_clock() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec;
}

std::vector<std::string> keys_of_log(const std::string& path) {
  std::vector<std::string> keys;
  std::ifstream in(path);
  std::string line;
  std::string error;
  LogRecord record;
  while (std::getline(in, line)) {
    if (parse_log_line(line, record, error)) keys.emplace_back(record.ip);
  }
  return keys;
}

ZipfKeys::ZipfKeys(std::size_t keys, double skew, std::uint64_t seed) : state_(seed) {
  double sum = 0;
  for (std::size_t k = 0; k < keys; ++k) {
    sum += 1 / std::pow(static_cast<double>(k + 1), skew);
    cumulative_.push_back(sum);
  }
}

std::size_t ZipfKeys::next() {
  state_ = crdt::mix64(state_ + 1, 0x5EED);
  double point = static_cast<double>(state_ >> 11) / 9007199254740992.0 * cumulative_.back();
  auto at = std::lower_bound(cumulative_.begin(), cumulative_.end(), point);
  return std::min<std::size_t>(static_cast<std::size_t>(at - cumulative_.begin()),
                               cumulative_.size() - 1);
}

Load::Load(LoadOptions options) : options_(std::move(options)) {
  thread_ = std::thread([this] { run(); });
}

Load::~Load() {
  stop();
}

void Load::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

Load::Tallies Load::tallies() const {
  std::lock_guard lock(mutex_);
  return tallies_;
}

void Load::run() {
  rpc::NodeClientOptions client_options;
  client_options.address = options_.address;
  client_options.deadline = options_.deadline;
  client_options.breaker_misses = 0;  // a node that was killed comes back, and is wanted at once
  client_options.backoff_max = 200 * kMillisecond;
  rpc::NodeClient client(client_options);
  using Clock = std::chrono::steady_clock;
  auto step = std::chrono::nanoseconds(kSecond * static_cast<Nanos>(options_.batch) /
                                       static_cast<Nanos>(options_.per_second));
  auto next = Clock::now();
  std::size_t at = 0;
  while (!stopping_) {
    std::this_thread::sleep_until(next);
    // What could not be sent in time is not made up for: an overload stays bounded.
    next = std::max(next + step, Clock::now() - std::chrono::seconds(1));
    if (options_.quiet_every > 0) {
      Nanos into = wall_clock() % options_.quiet_every;
      if (into < options_.quiet_margin || into > options_.quiet_every - options_.quiet_margin) {
        continue;
      }
    }
    send_batch(client, at);
  }
}

void Load::send_batch(rpc::NodeClient& client, std::size_t& at) {
  std::vector<rpc::CheckItem> items;
  for (std::size_t i = 0; i < options_.batch; ++i) {
    items.push_back({options_.domain, {{options_.key, options_.keys[at]}}, 1});
    at = (at + 1) % options_.keys.size();
  }
  std::int64_t window = options_.quiet_every > 0 ? wall_clock() / options_.quiet_every : 0;
  std::vector<Reply> replies = client.check(items);
  bool unreachable = false;
  std::unique_lock lock(mutex_);
  for (std::size_t i = 0; i < items.size(); ++i) {
    KeyTally& tally = tallies_[items[i].entries[0].second][window];
    if (!replies[i].error.empty()) {
      ++tally.unknown;
      ++unknown_;
      unreachable |= replies[i].error.kind != ErrorKind::deadline;
    } else if (replies[i].allowed) {
      ++tally.admitted;
      ++admitted_;
    } else {
      ++tally.denied;
      ++denied_;
    }
  }
  lock.unlock();
  if (unreachable) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

}  // namespace weir::examples
