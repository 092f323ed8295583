#include <weir/limits/replica_side.h>

#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

constexpr crdt::Incarnation kSelf{100, 1};
constexpr crdt::Incarnation kOther{100, 2};

crdt::ReplicaOptions replica_options() {
  crdt::ReplicaOptions options;
  options.incarnation = kSelf;
  options.peers = {{"other", "n"}};
  return options;
}

Rule window_rule(const WindowShape& shape, std::uint64_t limit) {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = limit;
  rule.algorithm = shape.previous == 0 ? Algorithm::fixed_window : Algorithm::sliding_window;
  rule.slots = std::max<std::uint32_t>(shape.previous, 1);
  rule.window = shape.sub * rule.slots;
  rule.strict = shape.strict;
  return rule;
}

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1) : entries{{"key", key}} {
    request = {"api", entries, hits};
  }
};

LAW(10, "epochs never interact", "several windows", "a window that was full",
    "a full table of epochs") {
  // What a fixed window has used is the sum of what was admitted in that window, and no other.
  Rule rule = window_rule({kMinute, 0, false, 0}, *between<std::uint64_t>(1, 20).as("limit"));
  if (*chance(50)) rule.phase = Phase::spread;
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = kSelf;
  Limiter limiter(rule_set({rule}), options);
  crdt::Replica replica(replica_options(), true);
  Ask ask("k");
  WindowShape shape = window_shape(rule, limiter.series_of(0, ask.request));
  std::map<std::pair<std::string, std::int64_t>, std::uint64_t> used;
  auto times = *rc::gen::container<std::vector<Nanos>>(instants(shape)).as("times");
  std::sort(times.begin(), times.end());
  for (Nanos now : times) {
    // Independent of WindowShape: the number of the minute.
    for (std::string key : {"k", "l", "m"}) {
      Nanos phase = window_shape(rule, limiter.series_of(0, Ask(key).request)).phase;
      std::uint64_t& units = used[{key, (now + phase) / kMinute}];
      std::uint64_t hits = *between<std::uint64_t>(1, 8);
      Decision decision = limiter.check(Ask(key, hits).request, now);
      RC_ASSERT(decision.allowed == (units + hits <= rule.limit));
      reached("a window that was full", !decision.allowed);
      if (decision.allowed) units += hits;
      RC_ASSERT(limiter.used(0, Ask(key).request, now) == units);
    }
    for (bool more = true; more;) {
      std::vector<crdt::OwnCount> counts;
      more = limiter.replica_side().drain(counts, 1);
      replica.count(counts, now);
    }
  }
  std::erase_if(used, [](const auto& each) { return each.second == 0; });
  RC_ASSERT(replica.cell_count() == used.size());
  for (const auto& [at, units] : used) {
    crdt::SeriesId series = limiter.series_of(0, Ask(at.first).request);
    const std::optional<Cell> cell =
        replica.find({series, window_shape(rule, series).epoch(at.second)});
    RC_ASSERT(cell.has_value());
    RC_ASSERT(cell->total() == units);
  }
  reached("several windows", used.size() > 3);
  reached("a full table of epochs", used.size() > 9);
}

LAW(11, "a node's time never decreases, nor its floor, across a restart", "a clock that went back",
    "a restart", "a decision that a running clock would deny") {
  Rule rule = window_rule({kMinute, 0, false, 0}, 3);
  LimiterOptions options;
  Limiter limiter(rule_set({rule}), options);
  Limiter steady(rule_set({rule}), options);
  auto replica = std::make_unique<crdt::Replica>(replica_options(), true);
  Nanos newest = 0;
  Nanos floor = 0;
  for (Nanos step :
       *rc::gen::container<std::vector<Nanos>>(between<Nanos>(-90, 90)).as("seconds")) {
    Nanos now = kStart + step * kSecond;
    reached("a clock that went back", now < newest);
    newest = std::max(newest, now);
    Decision decision = limiter.check(Ask("k").request, now);
    // As if the clock had stood still.
    Decision expected = steady.check(Ask("k").request, newest);
    RC_ASSERT(decision.allowed == expected.allowed);
    RC_ASSERT(decision.statuses.at(0).remaining == expected.statuses.at(0).remaining);
    reached("a decision that a running clock would deny",
            !decision.allowed && now / kMinute < newest / kMinute);
    replica->tick(now);
    RC_ASSERT(replica->floor() >= floor);
    RC_ASSERT(replica->floor() == newest - replica->options().max_skew);
    floor = replica->floor();
    if (*chance(10)) {
      // The driver's time resumes at the highest that was used.
      replica = std::make_unique<crdt::Replica>(replica_options(), true);
      replica->restore({}, newest);
      RC_ASSERT(replica->floor() >= floor);
      reached("a restart");
    }
  }
}

/// One cell that a peer may send, relative to `now`.
Cell cell_at(Nanos start, Nanos expiry, std::uint64_t units) {
  Cell cell;
  cell.id = {{7, 7}, {start, expiry}};
  cell.raise({kOther, 0}, units);
  return cell;
}

rc::Gen<Nanos> lifetimes() {
  return one_of<Nanos>({kMinute, kSecond, 3 * kMillisecond, kHour, 32 * kDay, crdt::kMaxLifetime});
}

LAW(12, "an expired epoch never returns", "by a push", "by a repair", "by an own count",
    "from disk", "at the very end") {
  Nanos lifetime = *lifetimes().as("lifetime");
  Nanos start = kStart + *between<Nanos>(0, kMinute).as("start");
  Cell cell = cell_at(start, start + lifetime, *positive_counts().as("units"));
  crdt::Replica replica(replica_options(), true);
  replica.peer_up(0, kOther, start);
  replica.tick(start);
  replica.receive(0, kOther, crdt::Repair{{{cell}, {}}, {}}, start);
  RC_ASSERT(replica.find(cell.id).has_value());
  Nanos end = crdt::generation_of(cell.id.epoch).end() + replica.options().max_skew;
  RC_ASSERT(end >= cell.id.epoch.expiry + replica.options().max_skew);
  // Alive until the last nanosecond.
  replica.tick(end - 1);
  RC_ASSERT(replica.find(cell.id).has_value());
  Nanos later = end + *one_of<Nanos>({0, 1, kHour}).as("after its end");
  reached("at the very end", later == end);
  replica.tick(later);
  RC_ASSERT(replica.find(cell.id) == std::nullopt);
  RC_ASSERT(replica.cell_count() == 0u);
  RC_ASSERT(replica.digest() == 0u);
  int way = *choice(4).as("way back");
  cell.raise({kOther, 0}, kMax);
  replica.take();
  if (way == 0) {
    replica.receive(0, kOther, crdt::Push{kOther, 0, 1, true, {{cell}, {}}}, later);
    reached("by a push");
  } else if (way == 1) {
    replica.receive(0, kOther, crdt::Repair{{{cell}, {}}, {}}, later);
    reached("by a repair");
  } else if (way == 2) {
    crdt::OwnCount own{cell.id, 0, 5, {}, false};
    replica.count({&own, 1}, later);
    reached("by an own count");
  } else {
    replica.restore({{cell}, {}}, later);
    reached("from disk");
  }
  RC_ASSERT(replica.find(cell.id) == std::nullopt);
  RC_ASSERT(replica.cell_count() == 0u);
  RC_ASSERT(replica.take().changed.empty());
}

LAW(13, "a late delta changes nothing and is acknowledged", "late and timely news together",
    "late alone", "a bucket that has drained") {
  Nanos now = kStart;
  crdt::Replica replica(replica_options(), false);
  replica.peer_up(0, kOther, now);
  replica.tick(now);
  replica.take();
  std::uint64_t digest = replica.digest();
  Nanos floor = replica.floor();
  Nanos lifetime = *one_of<Nanos>({kMinute, kSecond, kHour, 32 * kDay}).as("lifetime");
  // Twice the lifetime ago, so that the generation, of at most a quarter of it, is over too.
  Nanos expiry = now - 2 * lifetime - 3 * kSecond + *between<Nanos>(0, lifetime / 4).as("older");
  Cell late = cell_at(expiry - lifetime, expiry, *positive_counts().as("units"));
  if (*chance(30).as("bucket")) {
    late = Cell{};
    late.id = {{8, 8}, crdt::kBucketEpoch};
    late.raise({kOther, 5}, 3);
    late.bucket = {{3, expiry - kSecond, 9}, expiry - kSecond, expiry};
    reached("a bucket that has drained");
  }
  crdt::Delta news{{late}, {}};
  bool timely = *chance(50).as("timely news too");
  Cell alive = cell_at(now - kSecond, now + kMinute, 4);
  if (timely) news.cells.push_back(alive);
  std::uint64_t upto = *between<std::uint64_t>(1, 9).as("upto");
  replica.receive(0, kOther, crdt::Push{kOther, 0, upto, true, news}, now);
  RC_ASSERT(replica.find(late.id) == std::nullopt);
  RC_ASSERT(replica.counters().late_cells == 1u);
  RC_ASSERT(replica.floor() == floor);
  RC_ASSERT((replica.digest() == digest) == !timely);
  crdt::Outbox out = replica.take();
  RC_ASSERT(out.writes.size() == (timely ? 1u : 0u));
  if (timely) {
    RC_ASSERT(out.messages.empty());
    RC_ASSERT(replica.find(alive.id).has_value());
    replica.persisted(out.writes.back().id, now);
    out = replica.take();
  }
  RC_ASSERT(out.messages.size() == 1u);
  RC_ASSERT((std::get<crdt::Ack>(out.messages[0].message) == crdt::Ack{kOther, kSelf, upto}));
  reached("late and timely news together", timely);
  reached("late alone", !timely);
}

LAW(14, "a far-future delta moves neither floor nor clock", "just within the skew",
    "just beyond it", "far beyond it", "a bucket", "beside timely news") {
  Nanos now = kStart;
  crdt::Replica replica(replica_options(), true);
  replica.tick(now);
  Nanos skew = replica.options().max_skew;
  Nanos ahead = *rc::gen::weightedOneOf<Nanos>({{2, one_of<Nanos>({skew, skew + 1, 0, 2 * kDay})},
                                                {1, between<Nanos>(0, 3 * skew)},
                                                {1, rc::gen::just(kMaxTime - now)}})
                     .as("ahead by");
  Cell early = cell_at(now + ahead, now + ahead + kMinute, *positive_counts().as("units"));
  if (*chance(30).as("bucket")) {
    early = Cell{};
    early.id = {{8, 8}, crdt::kBucketEpoch};
    early.raise({kOther, 5}, 3);
    early.bucket = {{3, now, 9}, now + ahead, now + ahead};
    reached("a bucket");
  }
  Cell timely = cell_at(now - kMinute, now + kHour, 4);
  crdt::Delta news{{early}, {}};
  if (*chance(50)) {
    news.cells.push_back(timely);
    reached("beside timely news");
  }
  Nanos floor = replica.floor();
  replica.receive(0, kOther, crdt::Repair{news, {}}, now);
  bool taken = ahead <= skew;
  RC_ASSERT(replica.find(early.id).has_value() == taken);
  RC_ASSERT(replica.counters().future_cells == (taken ? 0u : 1u));
  RC_ASSERT(replica.find(timely.id).has_value() == (news.cells.size() == 2));
  RC_ASSERT(replica.floor() == floor);
  replica.tick(now + 1);
  RC_ASSERT(replica.floor() == floor + 1);
  RC_ASSERT(replica.find(timely.id).has_value() == (news.cells.size() == 2));
  reached("just within the skew", ahead == skew);
  reached("just beyond it", ahead == skew + 1);
  reached("far beyond it", ahead > kHour);
}

LAW(15, "an increment at a boundary lands in exactly one epoch", "at a boundary", "just before one",
    "a spread phase", "a ring") {
  WindowShape shape = *window_shapes().as("shape");
  Nanos now = *instants(shape).as("now");
  std::int64_t index = shape.index(now);
  Nanos into = now - shape.start(index);
  RC_ASSERT(into >= 0);
  RC_ASSERT(into < shape.sub);
  RC_ASSERT(shape.start(index + 1) == shape.start(index) + shape.sub);
  int holding = 0;
  for (std::int64_t i = index - 2; i <= index + 2; ++i) {
    holding += shape.start(i) <= now && now < shape.start(i + 1);
    RC_ASSERT(shape.epoch(i).start == shape.start(i));
    // It lives until the last decision that reads it: `previous` sub-windows after its own.
    RC_ASSERT(shape.epoch(i).expiry == shape.start(i + 1 + shape.previous));
  }
  RC_ASSERT(holding == 1);
  reached("at a boundary", into == 0);
  reached("just before one", into == shape.sub - 1);
  reached("a ring", shape.previous > 1);

  // The same through a limiter: one cell, and it is the one that holds `now`.
  if (shape.sub * std::max<Nanos>(shape.previous, 1) < kMillisecond) return;
  Rule rule = window_rule(shape, 10);
  rule.phase = *chance(50) ? Phase::spread : Phase::aligned;
  LimiterOptions options;
  options.replicated = true;
  Limiter limiter(rule_set({rule}), options);
  Ask ask("k", 3);
  WindowShape series = window_shape(rule, limiter.series_of(0, ask.request));
  RC_ASSERT(series.phase >= 0);
  RC_ASSERT(series.phase < series.sub);
  reached("a spread phase", series.phase > 0);
  now = *instants(series).as("now in the limiter");
  RC_ASSERT(limiter.check(ask.request, now).allowed);
  std::vector<crdt::OwnCount> counts;
  limiter.replica_side().drain(counts, 10);
  RC_ASSERT(counts.size() == 1u);
  RC_ASSERT(counts[0].value == 3u);
  Nanos start = now - (now + series.phase) % series.sub;
  RC_ASSERT(counts[0].cell.epoch.start == start);
}

LAW(16, "equal state and equal time give equal decisions everywhere", "a denial", "a bucket",
    "a ring", "a log", "a leaky bucket", "a calendar", "an own share and a learned share") {
  // The same counts, once consumed here and once learned; and in any split.
  Rule rule = *rules_named("r").as("rule");
  rule.shadow = false;
  auto rules = rule_set({rule});
  crdt::Incarnation ids[] = {{100, 1}, {100, 2}};
  std::vector<std::unique_ptr<Limiter>> limiters;
  std::vector<std::unique_ptr<crdt::Replica>> replicas;
  for (int i = 0; i < 2; ++i) {
    LimiterOptions options;
    options.replicated = true;
    options.incarnation = ids[i];
    limiters.push_back(std::make_unique<Limiter>(rules, options));
    crdt::ReplicaOptions replica = replica_options();
    replica.incarnation = ids[i];
    replicas.push_back(std::make_unique<crdt::Replica>(replica, true));
    replicas.back()->peer_up(0, ids[1 - i], kStart);
  }
  replicas[0]->take();
  replicas[1]->peer_up(0, ids[0], kStart);
  Nanos now = kStart;
  auto exchange = [&] {
    for (int turn = 0; turn < 3; ++turn) {
      for (std::size_t i = 0; i < 2; ++i) {
        std::vector<crdt::OwnCount> counts;
        limiters[i]->replica_side().drain(counts, 1000);
        replicas[i]->count(counts, now);
        replicas[i]->flush(now);
        crdt::Outbox out = replicas[i]->take();
        for (const crdt::ResetBucket& was : out.reset_buckets)
          limiters[i]->replica_side().reset(*replicas[i]->find(was.id), was.own);
        for (const crdt::CellId& id : out.changed)
          limiters[i]->replica_side().absorb(*replicas[i]->find(id));
        for (const crdt::Envelope& envelope : out.messages) {
          replicas[1 - i]->receive(0, ids[i], envelope.message, now);
        }
      }
    }
  };
  std::size_t consumers = 0;
  for (std::size_t node :
       *rc::gen::container<std::vector<std::size_t>>(between<std::size_t>(0, 1)).as("who asks")) {
    now += *between<Nanos>(0, rule.window / 3);
    std::uint64_t hits = *between<std::uint64_t>(0, 4);
    if (limiters[node]->check(Ask("k", hits).request, now).allowed && hits > 0)
      consumers |= 1u << node;
    exchange();
    Nanos then = now + *between<Nanos>(0, rule.window);
    Decision decisions[2];
    // Peeks and a cost; the cost that passes would change the state, so it is asked with 0 first.
    for (std::size_t i = 0; i < 2; ++i) decisions[i] = limiters[i]->check(Ask("k", 0).request, now);
    RC_ASSERT(decisions[0].statuses.at(0).remaining == decisions[1].statuses.at(0).remaining);
    RC_ASSERT(decisions[0].statuses.at(0).reset == decisions[1].statuses.at(0).reset);
    RC_ASSERT(decisions[0].statuses.at(0).delay == decisions[1].statuses.at(0).delay);
    RC_ASSERT(limiters[0]->used(0, Ask("k").request, then) ==
              limiters[1]->used(0, Ask("k").request, then));
    std::uint64_t big = add_saturated(decisions[0].statuses[0].remaining, 1);
    if (rule.default_cost != 1 || !rule.cost_by_method.empty()) continue;
    for (std::size_t i = 0; i < 2; ++i)
      decisions[i] = limiters[i]->check(Ask("k", big).request, now);
    RC_ASSERT(!decisions[0].allowed);
    RC_ASSERT(!decisions[1].allowed);
    RC_ASSERT(decisions[0].statuses[0].retry_after == decisions[1].statuses[0].retry_after);
    reached("a denial");
  }
  reached("a bucket", rule.algorithm == Algorithm::token_bucket);
  reached("a ring", rule.algorithm == Algorithm::sliding_window && rule.slots > 1);
  reached("a log", rule.algorithm == Algorithm::sliding_log && consumers == 3);
  reached("a leaky bucket", rule.algorithm == Algorithm::leaky_bucket);
  reached("a calendar", rule.calendar.has_value());
  reached("an own share and a learned share", consumers == 3);
}

}  // namespace
}  // namespace weir::laws
