#include <weir/limits/limiter.h>

#include <sodium/crypto_shorthash_siphash24.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include <weir/limits/bucket.h>
#include <weir/limits/window.h>

namespace weir {
namespace {

using crdt::CellId;
using crdt::SeriesId;

constexpr std::size_t kShards = 256;
/// A thread may still hold a `now` from before it was descheduled; cells are kept this much longer.
constexpr Nanos kGrace = 2 * kSecond;

struct WindowCell {
  crdt::Epoch epoch;
  std::uint64_t own = 0;
  std::uint64_t others = 0;
  bool dirty = false;
  std::uint64_t total() const { return add_saturated(own, others); }
};

struct BucketCell {
  std::uint64_t birth = 0;
  std::uint64_t last_birth = 0;  // time may stand still, but no two slots may share a birth
  std::uint64_t own = 0;
  std::uint64_t drained = 0;  // of own, handed to the replica
  std::uint64_t others = 0;
  crdt::BucketState state;
  crdt::Checkpoint made;  // by the last consumption here: it surely counts all of own
  bool dirty = false;
  std::uint64_t total() const { return add_saturated(own, others); }
};

struct Series {
  std::vector<WindowCell> windows;  // by start, oldest first
  std::unique_ptr<BucketCell> bucket;
  bool listed = false;  // in its shard's list of what to drain
  bool urgent = false;

  WindowCell* find(const crdt::Epoch& epoch) {
    for (auto cell = windows.rbegin(); cell != windows.rend(); ++cell) {
      if (cell->epoch == epoch) return &*cell;
    }
    return nullptr;
  }
  WindowCell& window(const crdt::Epoch& epoch) {
    if (WindowCell* cell = find(epoch)) return *cell;
    auto at = std::lower_bound(
        windows.begin(), windows.end(), epoch,
        [](const WindowCell& cell, const crdt::Epoch& wanted) { return cell.epoch < wanted; });
    return *windows.insert(at, WindowCell{epoch});
  }
  std::uint64_t count(const crdt::Epoch& epoch) {
    const WindowCell* cell = find(epoch);
    return cell == nullptr ? 0 : cell->total();
  }
  void forget_windows(Nanos before) {
    std::erase_if(windows, [before](const WindowCell& cell) {
      return cell.epoch.expiry <= before && !cell.dirty;
    });
  }
};

struct alignas(64) Shard {
  std::mutex mutex;
  std::unordered_map<SeriesId, Series> series;
  std::vector<SeriesId> dirty;
};

struct alignas(64) AtomicCounters {
  std::atomic<std::uint64_t> allowed{0};
  std::atomic<std::uint64_t> denied{0};
  std::atomic<std::uint64_t> degraded{0};
};

/// One matching rule of a request under evaluation.
struct Item {
  std::uint32_t rule = 0;
  SeriesId id;
  std::uint64_t cost = 0;
  Series* series = nullptr;
};

/// Reused between calls on a thread, so that a decision allocates nothing.
struct Scratch {
  std::vector<std::uint32_t> matched;
  std::vector<Item> items;
  std::vector<std::uint32_t> shards;
  std::string key;
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

void append_text(std::string& out, std::string_view text) {
  // Length first: ("a", "bc") and ("ab", "c") must differ.
  auto size = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(text);
}

SeriesId keyed_hash(const HashKey& key, std::string_view text) {
  std::array<std::uint64_t, 2> hash{};
  crypto_shorthash_siphashx24(reinterpret_cast<unsigned char*>(hash.data()),
                              reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                              key.data());
  return {hash[0], hash[1]};
}

/// What makes two rules count apart. Not the numbers: a changed limit keeps its counts.
std::string identity(const Rule& rule) {
  std::string text;
  append_text(text, rule.domain);
  append_text(text, rule.name);
  append_text(text, to_string(rule.algorithm));
  bool sliding = rule.algorithm == Algorithm::sliding_window;
  append_text(text, std::to_string(rule.window));
  append_text(text, std::to_string(sliding ? rule.slots : 0));
  append_text(text, sliding && rule.strict ? "strict" : "");
  append_text(text, rule.phase == Phase::spread ? "spread" : "");
  for (const std::string& key : rule.key) append_text(text, key);
  return text;
}

bool crosses(std::uint64_t before, std::uint64_t after, std::uint64_t limit) {
  for (unsigned percent : {50u, 80u, 100u}) {
    Uint128 mark = static_cast<Uint128>(limit) * percent;
    if (static_cast<Uint128>(before) * 100 < mark && static_cast<Uint128>(after) * 100 >= mark) {
      return true;
    }
  }
  return false;
}

}  // namespace

struct Limiter::Impl {
  std::shared_ptr<const RuleSet> rules;
  LimiterOptions options;
  std::vector<SeriesId> identities;  // of the rules
  std::unique_ptr<AtomicCounters[]> counters;
  std::array<Shard, kShards> shards;
  std::atomic<std::size_t> series_count{0};
  std::atomic<Nanos> newest{0};
  std::atomic<std::size_t> next_shard{0};

  Impl(std::shared_ptr<const RuleSet> rule_set, LimiterOptions given)
      : rules(std::move(rule_set)), options(given) {
    counters = std::make_unique<AtomicCounters[]>(rules->rules().size());
    for (const Rule& rule : rules->rules()) {
      identities.push_back(keyed_hash(options.hash_key, identity(rule)));
    }
  }

  static std::uint32_t shard_of(const SeriesId& id) {
    return static_cast<std::uint32_t>(id.hi % kShards);
  }

  Nanos clamp(Nanos now) {
    Nanos seen = newest.load(std::memory_order_relaxed);
    while (now > seen) {
      if (newest.compare_exchange_weak(seen, now, std::memory_order_relaxed)) return now;
    }
    return seen;
  }

  SeriesId series_of(std::uint32_t index, const Request& request, std::string& key) const {
    const SeriesId& rule = identities[index];
    key.assign(reinterpret_cast<const char*>(&rule), sizeof rule);
    for (const std::string& name : rules->rules()[index].key) {
      const std::string_view* value = request.find(name);
      append_text(key, value == nullptr ? std::string_view{} : *value);
    }
    return keyed_hash(options.hash_key, key);
  }

  Series* lookup(const SeriesId& id) {
    Shard& shard = shards[shard_of(id)];
    auto at = shard.series.find(id);
    return at == shard.series.end() ? nullptr : &at->second;
  }

  /// Null when the table is full. The shard is locked.
  Series* make(const SeriesId& id) {
    if (series_count.fetch_add(1, std::memory_order_relaxed) >= options.max_series) {
      series_count.fetch_sub(1, std::memory_order_relaxed);
      return nullptr;
    }
    return &shards[shard_of(id)].series[id];
  }

  Verdict evaluate(const Rule& rule, const Item& item, Nanos now) const {
    if (rule.algorithm == Algorithm::token_bucket) {
      BucketShape shape = bucket_shape(rule);
      if (item.series == nullptr || item.series->bucket == nullptr) {
        return evaluate_bucket(shape, {}, 0, now, item.cost);
      }
      const BucketCell& bucket = *item.series->bucket;
      return evaluate_bucket(shape, bucket.state, bucket.total(), now, item.cost);
    }
    WindowShape shape = window_shape(rule, item.id);
    std::int64_t newest_index = shape.index(now);
    if (item.series != nullptr && !item.series->windows.empty()) {
      newest_index = std::max(newest_index, shape.index(item.series->windows.back().epoch.start));
    }
    return evaluate_window(
        shape, rule.limit, now, item.cost, newest_index, [&](std::int64_t index) {
          return item.series == nullptr ? 0 : item.series->count(shape.epoch(index));
        });
  }

  /// The series exists and its shard is locked.
  void consume(const Rule& rule, const Item& item, Nanos now, const RuleStatus& status) {
    Series& series = *item.series;
    if (rule.algorithm == Algorithm::token_bucket) {
      if (series.bucket == nullptr) series.bucket = std::make_unique<BucketCell>();
      BucketCell& bucket = *series.bucket;
      if (bucket.birth == 0) {
        bucket.birth = std::max(static_cast<std::uint64_t>(now), bucket.last_birth + 1);
        bucket.last_birth = bucket.birth;
      }
      bucket.state =
          consume_bucket(bucket_shape(rule), bucket.state, bucket.total(), now, item.cost);
      bucket.made = bucket.state.checkpoint;
      bucket.own = add_saturated(bucket.own, item.cost);
      bucket.dirty = options.replicated;
    } else {
      WindowShape shape = window_shape(rule, item.id);
      series.forget_windows(now - kGrace);
      WindowCell& cell = series.window(shape.epoch(shape.index(now)));
      cell.own = add_saturated(cell.own, item.cost);
      cell.dirty = options.replicated;
    }
    if (!options.replicated) return;
    std::uint64_t used = status.limit - std::min(status.limit, status.remaining);
    if (crosses(used, add_saturated(used, item.cost), status.limit)) series.urgent = true;
    list(item.id, series);
  }

  void list(const SeriesId& id, Series& series) {
    if (series.listed) return;
    series.listed = true;
    shards[shard_of(id)].dirty.push_back(id);
  }

  void check(const Request& request, Nanos given, Decision& out) {
    Scratch& work = scratch();
    Nanos now = clamp(given);
    out.allowed = true;
    out.deciding = -1;
    out.wants_commit = false;
    out.statuses.clear();
    work.matched.clear();
    rules->match(request, work.matched);
    if (work.matched.empty()) return;
    work.items.clear();
    work.shards.clear();
    for (std::uint32_t index : work.matched) {
      Item item;
      item.rule = index;
      item.id = series_of(index, request, work.key);
      item.cost = mul_saturated(rules->rules()[index].cost_of(request), request.hits);
      work.items.push_back(item);
      work.shards.push_back(shard_of(item.id));
    }
    // Locks are always taken in the same order, so that two requests cannot wait for each other.
    std::sort(work.shards.begin(), work.shards.end());
    work.shards.erase(std::unique(work.shards.begin(), work.shards.end()), work.shards.end());
    for (std::uint32_t shard : work.shards) shards[shard].mutex.lock();
    decide(work, now, out);
    for (std::uint32_t shard : work.shards) shards[shard].mutex.unlock();
    for (const RuleStatus& status : out.statuses) {
      AtomicCounters& counter = counters[status.rule];
      (status.allowed ? counter.allowed : counter.denied).fetch_add(1, std::memory_order_relaxed);
      if (status.degraded) counter.degraded.fetch_add(1, std::memory_order_relaxed);
    }
  }

  void decide(Scratch& work, Nanos now, Decision& out) {
    for (Item& item : work.items) {
      const Rule& rule = rules->rules()[item.rule];
      item.series = lookup(item.id);
      Verdict verdict = evaluate(rule, item, now);
      RuleStatus status;
      status.rule = item.rule;
      status.shadow = rule.shadow;
      status.limit = rule.algorithm == Algorithm::token_bucket ? rule.burst : rule.limit;
      status.allowed = verdict.allowed;
      status.remaining = verdict.remaining;
      status.reset = verdict.reset;
      status.retry_after = verdict.retry_after;
      if (verdict.allowed && item.cost > 0 && item.series == nullptr) {
        item.series = make(item.id);
        if (item.series == nullptr) {
          status.degraded = true;
          status.allowed = rule.on_failure == OnFailure::open;
          if (!status.allowed) status.retry_after = kSecond;
        }
      }
      out.statuses.push_back(status);
      if (!rule.shadow && !status.allowed) out.allowed = false;
    }
    for (std::size_t i = 0; i < work.items.size(); ++i) {
      Item& item = work.items[i];
      RuleStatus& status = out.statuses[i];
      const Rule& rule = rules->rules()[item.rule];
      bool consumes = out.allowed && status.allowed && !status.degraded && item.cost > 0;
      if (consumes) {
        consume(rule, item, now, status);
        status.remaining -= std::min(status.remaining, item.cost);
        out.wants_commit |= options.replicated && rule.durability == Durability::commit;
        Item after = item;
        after.cost = 0;
        status.reset = evaluate(rule, after, now).reset;
      } else {
        discard_if_unused(item);
      }
      if (!status.shadow) pick_decider(out, static_cast<int>(i));
    }
  }

  /// A series made for a request that another rule denied.
  void discard_if_unused(Item& item) {
    Series* series = item.series;
    if (series == nullptr || !series->windows.empty() || series->bucket != nullptr) return;
    if (series->listed) return;
    shards[shard_of(item.id)].series.erase(item.id);
    series_count.fetch_sub(1, std::memory_order_relaxed);
    item.series = nullptr;
  }

  static void pick_decider(Decision& out, int index) {
    const RuleStatus& candidate = out.statuses[static_cast<std::size_t>(index)];
    if (candidate.allowed != out.allowed) return;
    const RuleStatus* current = out.decider();
    bool better =
        current == nullptr || (out.allowed ? candidate.remaining < current->remaining
                                           : candidate.retry_after > current->retry_after);
    if (better) out.deciding = index;
  }

  bool drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
    std::size_t first = next_shard.load(std::memory_order_relaxed);
    for (std::size_t i = 0; i < kShards; ++i) {
      std::size_t index = (first + i) % kShards;
      Shard& shard = shards[index];
      std::lock_guard lock(shard.mutex);
      while (!shard.dirty.empty()) {
        if (out.size() >= max) {
          next_shard.store(index, std::memory_order_relaxed);
          return true;
        }
        SeriesId id = shard.dirty.back();
        shard.dirty.pop_back();
        auto at = shard.series.find(id);
        if (at != shard.series.end()) drain_series(id, at->second, out);
      }
    }
    return false;
  }

  static void drain_series(const SeriesId& id, Series& series, std::vector<crdt::OwnCount>& out) {
    for (WindowCell& cell : series.windows) {
      if (!cell.dirty) continue;
      cell.dirty = false;
      out.push_back({{id, cell.epoch}, 0, cell.own, {}, series.urgent});
    }
    if (series.bucket != nullptr && series.bucket->dirty) {
      BucketCell& bucket = *series.bucket;
      bucket.dirty = false;
      bucket.drained = bucket.own;
      crdt::BucketState state = bucket.state;
      state.checkpoint = bucket.made;
      out.push_back({{id, crdt::kBucketEpoch}, bucket.birth, bucket.own, state, series.urgent});
    }
    series.listed = false;
    series.urgent = false;
  }

  bool absorb(const crdt::Cell& cell) {
    Shard& shard = shards[shard_of(cell.id.series)];
    std::lock_guard lock(shard.mutex);
    Series* series = lookup(cell.id.series);
    if (series == nullptr) series = make(cell.id.series);
    if (series == nullptr) return false;
    std::uint64_t total = cell.total();
    if (!cell.id.is_bucket()) {
      WindowCell& window = series->window(cell.id.epoch);
      std::uint64_t own = cell.value_of({options.incarnation, 0});
      window.others = std::max(window.others, total - own);
      return true;
    }
    if (series->bucket == nullptr) series->bucket = std::make_unique<BucketCell>();
    BucketCell& bucket = *series->bucket;
    std::uint64_t own = bucket.birth == 0 ? 0 : cell.value_of({options.incarnation, bucket.birth});
    bucket.others = std::max(bucket.others, total - own);
    crdt::join(bucket.state, cell.bucket);
    bucket.state.checkpoint.counted = std::min(bucket.state.checkpoint.counted, bucket.total());
    return true;
  }

  void begin_anew(const crdt::Cell& cell) {
    Shard& shard = shards[shard_of(cell.id.series)];
    std::lock_guard lock(shard.mutex);
    Series* series = lookup(cell.id.series);
    if (series == nullptr || series->bucket == nullptr) return;
    BucketCell& bucket = *series->bucket;
    std::uint64_t held = bucket.birth == 0 ? 0 : cell.value_of({options.incarnation, bucket.birth});
    // Of the own units the replica forgot those that it had; it has none that it forgot and holds.
    std::uint64_t forgotten = held == 0 ? bucket.drained : 0;
    crdt::BucketState state = cell.bucket;
    if (bucket.own == forgotten) {
      bucket.birth = bucket.own = bucket.drained = forgotten = 0;
      bucket.made = {};
    } else if (bucket.own > held) {
      state.touched = std::max(state.touched, bucket.state.touched);
      state.expiry = std::max(state.expiry, bucket.state.expiry);
    }
    bucket.made.counted = std::min(bucket.made.counted, bucket.own);
    state.checkpoint.counted = add_saturated(state.checkpoint.counted, forgotten);
    bucket.others = cell.total() - held;
    bucket.state = state;
  }

  void rebase(const crdt::Incarnation& fresh, const DurableCount& durable) {
    crdt::Incarnation old = options.incarnation;
    options.incarnation = fresh;
    for (Shard& shard : shards) {
      std::lock_guard lock(shard.mutex);
      for (auto& [id, series] : shard.series) {
        for (WindowCell& cell : series.windows) {
          std::uint64_t held = durable({id, cell.epoch}, {old, 0});
          cell.dirty = leave_behind(cell, held);
          if (cell.dirty) list(id, series);
        }
        if (series.bucket != nullptr && series.bucket->birth != 0) {
          BucketCell& bucket = *series.bucket;
          bucket.drained = 0;
          bucket.dirty =
              leave_behind(bucket, durable({id, crdt::kBucketEpoch}, {old, bucket.birth}));
          if (bucket.dirty) list(id, series);
        }
      }
    }
  }

  template <typename AnyCell>
  static bool leave_behind(AnyCell& cell, std::uint64_t held) {
    held = std::min(held, cell.own);
    cell.own -= held;
    cell.others = add_saturated(cell.others, held);
    return cell.own > 0;
  }

  std::size_t sweep(Nanos floor) {
    std::size_t gone = 0;
    for (Shard& shard : shards) {
      std::lock_guard lock(shard.mutex);
      for (auto at = shard.series.begin(); at != shard.series.end();) {
        Series& series = at->second;
        series.forget_windows(floor - kGrace);
        bool keep = series.listed || !series.windows.empty() ||
                    (series.bucket != nullptr && series.bucket->state.expiry > floor);
        if (keep) {
          ++at;
          continue;
        }
        at = shard.series.erase(at);
        ++gone;
      }
    }
    series_count.fetch_sub(gone, std::memory_order_relaxed);
    return gone;
  }
};

Limiter::Limiter(std::shared_ptr<const RuleSet> rules, LimiterOptions options)
    : impl_(std::make_unique<Impl>(std::move(rules), options)) {}

Limiter::~Limiter() = default;

void Limiter::check(const Request& request, Nanos now, Decision& out) {
  impl_->check(request, now, out);
}

Decision Limiter::check(const Request& request, Nanos now) {
  Decision decision;
  impl_->check(request, now, decision);
  return decision;
}

const RuleSet& Limiter::rules() const {
  return *impl_->rules;
}

crdt::SeriesId Limiter::series_of(std::uint32_t rule, const Request& request) const {
  std::string key;
  return impl_->series_of(rule, request, key);
}

RuleCounters Limiter::counters(std::uint32_t rule) const {
  const AtomicCounters& counter = impl_->counters[rule];
  return {counter.allowed.load(std::memory_order_relaxed),
          counter.denied.load(std::memory_order_relaxed),
          counter.degraded.load(std::memory_order_relaxed)};
}

std::size_t Limiter::series_count() const {
  return impl_->series_count.load(std::memory_order_relaxed);
}

std::uint64_t Limiter::used(std::uint32_t index, const Request& request, Nanos now) {
  const Rule& rule = impl_->rules->rules()[index];
  SeriesId id = series_of(index, request);
  std::lock_guard lock(impl_->shards[Impl::shard_of(id)].mutex);
  Series* series = impl_->lookup(id);
  if (series == nullptr) return 0;
  if (rule.algorithm == Algorithm::token_bucket) {
    if (series->bucket == nullptr) return 0;
    BucketShape shape = bucket_shape(rule);
    auto unit = static_cast<std::uint64_t>(shape.unit);
    crdt::DebtTicks debt = crdt::debt_at(series->bucket->state, series->bucket->total(), now,
                                         shape.rate, shape.unit, shape.cap());
    return static_cast<std::uint64_t>((debt + unit - 1) / unit);
  }
  WindowShape shape = window_shape(rule, id);
  return window_used(shape, now, [&](std::int64_t at) { return series->count(shape.epoch(at)); });
}

std::size_t Limiter::sweep(Nanos floor) {
  return impl_->sweep(floor);
}

bool Limiter::drain(std::vector<crdt::OwnCount>& out, std::size_t max) {
  return impl_->drain(out, max);
}

bool Limiter::absorb(const crdt::Cell& cell) {
  return impl_->absorb(cell);
}

void Limiter::begin_anew(const crdt::Cell& cell) {
  impl_->begin_anew(cell);
}

void Limiter::rebase(const crdt::Incarnation& fresh, const DurableCount& durable) {
  impl_->rebase(fresh, durable);
}

}  // namespace weir
