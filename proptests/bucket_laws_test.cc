#include <weir/limits/replica_side.h>

#include <sstream>

#include "law.h"
#include "models.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

Rule bucket_rule(const BucketShape& shape) {
  Rule rule;
  rule.domain = "api";
  rule.name = "bucket";
  rule.key = {"key"};
  rule.algorithm = Algorithm::token_bucket;
  rule.limit = shape.rate;
  rule.window = shape.unit;
  rule.burst = shape.burst;
  rule.max_debt = shape.max_debt;
  return rule;
}

LAW(17, "with one writer a bucket equals an exact token bucket", "one a month",
    "ten million a second", "a denial", "a cost above one", "a cost that takes the last of it",
    "a cost of nothing", "a cost above the burst", "a full bucket again", "forgotten and made anew",
    "one nanosecond too early", "more units than 64 bits hold") {
  BucketShape shape = *bucket_shapes().as("shape");
  Limiter limiter(rule_set({bucket_rule(shape)}), {});
  ExactBucket exact(shape.rate, shape.unit, shape.burst);
  std::vector<Entry> key{{"key", "k"}};
  Nanos now = kStart;
  Uint128 units = 0;
  bool denied_before = false;
  int steps = shape.burst > kMax / 8 ? 60 : *between(1, 60).as("steps");
  for (int i = 0; i < steps; ++i) {
    Nanos pause = *bucket_pauses(shape);
    if (pause > kMaxTime - now) break;
    now += pause;
    std::uint64_t cost = *chance(25) ? shape.burst : *costs(shape.burst);
    bool was_full = exact.tokens(now) == shape.burst && i > 0;
    std::uint64_t before = exact.tokens(now);
    bool allowed = exact.take(now, cost);
    Decision decision = limiter.check({"api", key, cost}, now);
    RC_ASSERT(decision.allowed == allowed);
    RC_ASSERT(decision.statuses.at(0).remaining == exact.tokens(now));
    if (allowed) units += cost;
    reached("more units than 64 bits hold", units > kMax);
    reached("a denial", !allowed);
    reached("a cost above one", allowed && cost > 1);
    reached("one nanosecond too early", denied_before && allowed && pause == 1);
    reached("a cost that takes the last of it", allowed && cost > 0 && exact.tokens(now) == 0);
    reached("a cost of nothing", cost == 0);
    reached("a cost above the burst", cost > shape.burst);
    reached("a full bucket again", was_full && before == shape.burst);
    if (!allowed && cost <= shape.burst && *chance(50)) {
      // Not a nanosecond before it has come back, and then at once.
      Uint128 missing = exact.scaled(cost) - exact.held(now);
      auto wait = static_cast<Nanos>((missing + shape.rate - 1) / shape.rate);
      now += wait - 1;
      RC_ASSERT(!limiter.check({"api", key, cost}, now).allowed);
      RC_ASSERT(!exact.take(now, cost));
      now += 1;
      RC_ASSERT(limiter.check({"api", key, cost}, now).allowed);
      RC_ASSERT(exact.take(now, cost));
      units += cost;
      reached("one nanosecond too early");
    }
    denied_before = !allowed;
    if (*chance(20))
      reached("forgotten and made anew", limiter.sweep(now - *one_of<Nanos>({0, kSecond})) > 0);
  }
  reached("one a month", shape.unit == 30 * kDay);
  reached("ten million a second", shape.rate == 10'000'000);
}

/// Several writers of one bucket that send each other whole states, by hand.
struct Writers {
  struct Node {
    Cell cell;
    std::set<std::size_t> known;  // indices of the log
  };
  struct Sent {
    std::size_t to;
    Nanos at;
    Node copy;
  };
  BucketShape shape;
  std::vector<Node> nodes;
  std::vector<Consumption> log;
  std::vector<Sent> wire;
  Nanos now = kStart;

  Writers(BucketShape given, std::size_t n) : shape(given), nodes(n) {
    for (Node& node : nodes) node.cell.id = {{1, 1}, crdt::kBucketEpoch};
  }
  /// Somebody has consumed `units`, which have drained.
  void begin_with(std::uint64_t units) {
    for (Node& node : nodes) {
      node.cell.raise({{2, 1}, 1}, units);
      node.cell.bucket = {{units, now, 0}, now, now + shape.fill_time()};
    }
  }
  bool saturated(std::size_t i) const { return nodes[i].cell.total() == kMax; }
  crdt::DebtTicks estimate(std::size_t i, Nanos then) const {
    const Cell& cell = nodes[i].cell;
    return crdt::debt_at(cell.bucket, cell.total(), then, shape.rate, shape.unit, shape.cap());
  }
  Uint128 truth(const std::set<std::size_t>& known, Nanos then, Uint128 cap) const {
    std::vector<Consumption> part;
    for (std::size_t i : known) part.push_back(log[i]);
    return true_debt(part, then, shape.rate, shape.unit, cap);
  }
  bool consume(std::size_t i, std::uint64_t units) {
    Node& node = nodes[i];
    Cell& cell = node.cell;
    if (units == 0 || !evaluate_bucket(shape, cell.bucket, cell.total(), now, units).allowed)
      return false;
    cell.bucket = consume_bucket(shape, cell.bucket, cell.total(), now, units);
    crdt::SlotId own{{1, i + 1}, 1};
    cell.raise(own, add_saturated(cell.value_of(own), units));
    node.known.insert(log.size());
    log.push_back({now, units});
    return true;
  }
  void take(std::size_t to, const Node& state) {
    crdt::join(nodes[to].cell, state.cell);
    nodes[to].known.insert(state.known.begin(), state.known.end());
  }
  void deliver() {
    std::stable_sort(wire.begin(), wire.end(),
                     [](const Sent& a, const Sent& b) { return a.at < b.at; });
    while (!wire.empty() && wire.front().at <= now) {
      take(wire.front().to, wire.front().copy);
      wire.erase(wire.begin());
    }
  }
  void exchange() {
    for (int turn = 0; turn < 2; ++turn) {
      for (std::size_t a = 0; a < nodes.size(); ++a) {
        for (std::size_t b = 0; b < nodes.size(); ++b) {
          if (a != b) take(b, Node(nodes[a]));
        }
      }
    }
  }
  bool anyone_tied() const {
    for (const Node& a : nodes) {
      for (const Node& b : nodes) {
        const crdt::Checkpoint& x = a.cell.bucket.checkpoint;
        const crdt::Checkpoint& y = b.cell.bucket.checkpoint;
        if (x.counted > 0 && x.counted == y.counted && !(x == y)) return true;
      }
    }
    return false;
  }
};

LAW(18, "a bucket never under-estimates the debt of the consumption it knows",
    "checkpoints that tie", "units no checkpoint has counted", "debt cut to its cap",
    "late and repeated states", "debt that is exact", "a sum that saturates",
    "checkpoints that tie in a sum that saturates") {
  BucketShape shape = *bucket_shapes().as("shape");
  Writers writers(shape, *between<std::size_t>(2, 4).as("writers"));
  if (*chance(20)) writers.begin_with(kMax - *between<std::uint64_t>(1, 9).as("left below 2^64"));
  std::size_t n = writers.nodes.size();
  int steps = *between(1, 40).as("steps");
  std::vector<Writers::Sent> kept;
  for (int step = 0; step < steps; ++step) {
    Nanos pause = *bucket_pauses(shape) / 2;
    if (pause > kMaxTime - writers.now - kMaxTime / 4) break;
    writers.now += pause;
    std::size_t i = *between<std::size_t>(0, n - 1);
    std::size_t to = (i + *between<std::size_t>(1, n - 1)) % n;
    writers.consume(i, *costs(shape.burst));
    reached("checkpoints that tie", writers.anyone_tied());
    if (*chance(40)) writers.take(to, Writers::Node(writers.nodes[i]));
    if (*chance(30)) kept.push_back({to, 0, writers.nodes[i]});
    if (!kept.empty() && *chance(30)) {
      const Writers::Sent& old = kept[*between<std::size_t>(0, kept.size() - 1)];
      writers.take(old.to, old.copy);
      reached("late and repeated states");
    }
    for (std::size_t each = 0; each < n; ++each) {
      const Writers::Node& node = writers.nodes[each];
      reached("units no checkpoint has counted",
              node.cell.bucket.checkpoint.counted < node.cell.total());
      reached("a sum that saturates", writers.saturated(each));
      reached("checkpoints that tie in a sum that saturates",
              writers.saturated(each) && writers.anyone_tied());
      for (Nanos ahead : {Nanos{0}, pause / 3, refill_time(shape)}) {
        Nanos then = writers.now + std::min(ahead, kMaxTime - writers.now);
        Uint128 least = writers.truth(node.known, then, shape.cap());
        crdt::DebtTicks estimate = writers.estimate(each, then);
        RC_ASSERT(estimate >= least);
        reached("debt cut to its cap", writers.truth(node.known, then, ~Uint128{0} >> 2) > least);
        reached("debt that is exact", estimate == least && least > 0);
      }
    }
  }
}

rc::Gen<Rule> mesh_bucket_rules() {
  return rc::gen::exec([] {
    BucketShape shape;
    shape.unit = kSecond;
    shape.rate = *one_of<std::uint64_t>({20, 2, 1, 200});
    shape.burst = *one_of<std::uint64_t>({10, 3, 60});
    shape.max_debt = *one_of<std::uint32_t>({1, 0, 4});
    return bucket_rule(shape);
  });
}

LAW(18, "nor through limiters, replicas, restarts and buckets that drained",
    "news of another's consumption", "a bucket that was reset", "a restart", "a denial") {
  MeshOptions options = *mesh_options(2, 3).as("mesh");
  options.loss_percent = std::min(options.loss_percent, 10);
  Rule rule = *mesh_bucket_rules().as("rule");
  options.rules = rule_set({rule});
  options.sweep_interval = *one_of<Nanos>({kSecond, 100 * kMillisecond, 5 * kSecond});
  BucketShape shape = bucket_shape(options.rules->rules()[0]);
  Mesh mesh(options);
  std::vector<Entry> key{{"key", "k"}};
  int steps = *between(1, 40).as("steps");
  for (int step = 0; step < steps; ++step) {
    Nanos pause = *rc::gen::weightedOneOf<Nanos>(
        {{4, between<Nanos>(0, 300)}, {2, between<Nanos>(0, 2000)}, {1, between<Nanos>(0, 9000)}});
    pause *= kMillisecond;
    if (*chance(30)) {
      // Just behind the end of the bucket: some have forgotten it, some not yet.
      for (const auto& [id, cell] : mesh.state(0)) {
        pause = std::max<Nanos>(cell.bucket.expiry - mesh.now(), 0) +
                *between<Nanos>(0, 1500) * kMillisecond;
      }
    }
    mesh.advance(pause);
    std::size_t node = *between<std::size_t>(0, mesh.size() - 1);
    if (*chance(4)) {
      mesh.crash(node);
      mesh.boot(node);
      reached("a restart");
    }
    if (*chance(15)) mesh.stall(node, true);
    if (*chance(30)) {
      for (std::size_t i = 0; i < mesh.size(); ++i) mesh.stall(i, false);
    }
    std::uint64_t units = *rc::gen::weightedOneOf<std::uint64_t>(
        {{3, between<std::uint64_t>(1, 3)}, {1, rc::gen::just(shape.burst)}});
    bool everywhere = *chance(30);
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      if (everywhere || i == node) reached("a denial", !mesh.check(i, "k", units).allowed);
    }
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      std::vector<Consumption> known;
      for (const Admission& admission : mesh.admissions()) {
        if (!mesh.knows(i, admission)) continue;
        known.push_back({admission.at, admission.units});
        reached("news of another's consumption", admission.node != i);
      }
      Uint128 least = true_debt(known, mesh.now(), shape.rate, shape.unit, shape.cap());
      Uint128 estimate = shape.ticks(mesh.limiter(i).used(0, {"api", key, 1}, mesh.now()));
      if (estimate < least) {
        std::ostringstream why;
        why << "node " << i << " knows";
        for (const Consumption& one : known) why << ' ' << one.units << '@' << one.at - kStart;
        why << ", now " << mesh.now() - kStart << ", holds ";
        for (const auto& [id, cell] : mesh.state(i)) crdt::showValue(cell, why);
        RC_FAIL(why.str());
      }
    }
  }
  reached("a bucket that was reset", mesh.resets() > 0);
  for (const std::string& promise : mesh.broken()) RC_FAIL(promise);
}

LAW(18, "nor while own counts wait for the disk as a bucket is reset", "news before the disk",
    "news in between", "news after the disk", "own units of before") {
  crdt::Incarnation self{100, 1};
  crdt::Incarnation peer{200, 1};
  crdt::ReplicaOptions options;
  options.incarnation = self;
  options.peers = {{"other", "n"}};
  crdt::Replica replica(options, false);
  replica.peer_up(0, peer, kStart);
  BucketShape shape{1, kSecond, 10, 1};
  crdt::CellId id{{1, 1}, crdt::kBucketEpoch};
  // What was there has drained.
  std::uint64_t before = *between<std::uint64_t>(1, 9).as("drained");
  Cell old;
  old.id = id;
  old.raise({peer, 1}, before);
  old.bucket = consume_bucket(shape, {}, 0, kStart, before);
  replica.receive(0, peer, crdt::Repair{{{old}, {}}, {}}, kStart);
  Nanos now = old.bucket.expiry + *between<Nanos>(0, 900) * kMillisecond;
  replica.tick(now);
  // The limiter has forgotten it, counts anew, then hears of the old units and counts on top.
  std::uint64_t first = *between<std::uint64_t>(1, 4).as("first");
  std::uint64_t second = *between<std::uint64_t>(1, 4).as("second");
  auto birth = static_cast<std::uint64_t>(now);
  crdt::BucketState one = consume_bucket(shape, {}, 0, now, first);
  crdt::BucketState both = one;
  crdt::join(both, old.bucket);
  both = consume_bucket(shape, both, first + before, now, second);
  crdt::OwnCount counts[] = {{id, birth, first, one, false},
                             {id, birth, first + second, both, false}};
  crdt::WriteId writes[2];
  for (std::size_t i = 0; i < 2; ++i) writes[i] = replica.count({&counts[i], 1}, now);
  // A peer consumed as well, in a slot of its own.
  Cell news;
  news.id = id;
  std::uint64_t others = *between<std::uint64_t>(1, 9).as("others");
  news.raise({peer, birth}, others);
  news.bucket = consume_bucket(shape, {}, 0, now, others);
  int when = *choice(3).as("when the news come");
  for (int step = 0; step < 3; ++step) {
    if (step == when) replica.receive(0, peer, crdt::Repair{{{news}, {}}, {}}, now);
    if (step < 2) replica.persisted(writes[step], now);
  }
  const Cell cell = *replica.find(id);
  Uint128 estimate =
      crdt::debt_at(cell.bucket, cell.total(), now, shape.rate, shape.unit, shape.cap());
  RC_ASSERT(cell.value_of({self, birth}) == first + second);
  RC_ASSERT(cell.value_of({peer, birth}) == others);
  RC_ASSERT(estimate >= std::min<Uint128>(shape.cap(), shape.ticks(first + second + others)));
  reached("news before the disk", when == 0);
  reached("news in between", when == 1);
  reached("news after the disk", when == 2);
  reached("own units of before", before > others);
}

LAW(19, "after a full exchange all replicas agree", "buckets alive", "buckets that drained",
    "several writers", "a slot born later") {
  MeshOptions options = *mesh_options(2, 4).as("mesh");
  Rule rule = *mesh_bucket_rules().as("rule");
  bool slow = *chance(60);
  if (slow) rule.window = kHour;
  options.rules = rule_set({rule});
  Mesh mesh(options);
  std::vector<Entry> key{{"key", "k"}};
  int steps = *between(1, 30).as("steps");
  for (int step = 0; step < steps; ++step) {
    mesh.advance(*rc::gen::weightedOneOf<Nanos>(
                     {{3, between<Nanos>(0, 300)}, {1, between<Nanos>(0, 6000)}}) *
                 kMillisecond);
    mesh.check(*between<std::size_t>(0, mesh.size() - 1), "k", *between<std::uint64_t>(1, 4));
    if (*chance(10)) mesh.cut(0, 1);
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  auto state = mesh.state(0);
  reached("buckets alive", !state.empty());
  reached("buckets that drained", state.empty());
  if (!state.empty()) {
    const Cell& cell = state.begin()->second;
    reached("several writers", cell.slots.size() > 1);
    for (const crdt::Slot& slot : cell.slots) {
      reached("a slot born later", slot.id.birth != cell.slots[0].id.birth);
    }
  }
  for (std::size_t i = 1; i < mesh.size(); ++i) {
    for (Nanos ahead : {Nanos{0}, kSecond, kMinute}) {
      Request request{"api", key, 1};
      RC_ASSERT(mesh.limiter(i).used(0, request, mesh.now() + ahead) ==
                mesh.limiter(0).used(0, request, mesh.now() + ahead));
    }
  }
}

LAW(20, "with bounded delay a bucket's excess is at most what was unseen", "several writers busy",
    "an excess", "a bucket that drained in between", "a sum that saturates") {
  BucketShape shape = *bucket_shapes().as("shape");
  shape.max_debt = 2;
  std::size_t n = *between<std::size_t>(1, 4).as("writers");
  Writers writers(shape, n);
  if (*chance(10)) writers.begin_with(kMax - *between<std::uint64_t>(1, 99).as("left below 2^64"));
  Nanos delay = std::max<Nanos>(refill_time(shape) / *one_of<Nanos>({50, 10, 4}), 1);
  Uint128 most_unseen = 0;
  std::set<std::size_t> everything;
  std::set<std::size_t> busy;
  int steps = *between(1, 60).as("steps");
  for (int step = 0; step < steps; ++step) {
    Nanos pause = *bucket_pauses(shape) / static_cast<Nanos>(n);
    if (pause > kMaxTime - writers.now - kMaxTime / 4) break;
    writers.now += pause;
    writers.deliver();
    std::size_t i = *between<std::size_t>(0, n - 1);
    reached("a bucket that drained in between",
            step > 0 && !everything.empty() &&
                writers.truth(everything, writers.now, ~Uint128{0} >> 2) == 0);
    if (writers.consume(i, *costs(shape.burst))) busy.insert(i);
    for (std::size_t index = 0; index < writers.log.size(); ++index) everything.insert(index);
    for (std::size_t to = 0; to < n; ++to) {
      if (to != i)
        writers.wire.push_back({to, writers.now + *between<Nanos>(1, delay), writers.nodes[i]});
    }
    Uint128 owed = writers.truth(everything, writers.now, ~Uint128{0} >> 2);
    for (std::size_t each = 0; each < n; ++each) {
      Uint128 unseen = 0;
      for (std::size_t index = 0; index < writers.log.size(); ++index) {
        if (!writers.nodes[each].known.contains(index))
          unseen += shape.ticks(writers.log[index].units);
      }
      most_unseen = std::max(most_unseen, unseen);
    }
    for (std::size_t each = 0; each < n; ++each) {
      // Then it errs towards admitting less.
      reached("a sum that saturates", writers.saturated(each));
      if (writers.saturated(each)) continue;
      Uint128 estimate = writers.estimate(each, writers.now);
      RC_ASSERT(estimate <= owed + most_unseen);
      reached("an excess", estimate > owed);
    }
  }
  reached("several writers busy", busy.size() > 1);
}

LAW(20, "nor through limiters, replicas and buckets that drained", "a bucket that was reset",
    "a debt that others know of", "two consumers", "one consumer alone") {
  MeshOptions options;
  options.nodes = *between<std::size_t>(2, 3).as("nodes");
  options.memory_only = *chance(30).as("memory only");
  options.sync_interval = 50 * kMillisecond;
  options.anti_entropy_interval = 200 * kMillisecond;
  options.seed = *between<std::uint64_t>(1, 1'000'000).as("seed");
  BucketShape shape{10, kSecond, *between<std::uint64_t>(12, 30).as("burst"), 0};
  options.rules = rule_set({bucket_rule(shape)});
  Mesh mesh(options);
  // Hand-over, commit, tick and network.
  constexpr Nanos kExchange = 300 * kMillisecond;
  std::vector<Entry> key{{"key", "k"}};
  std::uint64_t most_unseen = 0;
  std::set<std::size_t> consumers;
  std::size_t node = 0;
  for (int step = *one_of<int>({60, 5, 20}).as("steps"); step > 0; --step) {
    Nanos pause = *between<Nanos>(0, 300) * kMillisecond;
    if (*chance(10)) pause = *between<Nanos>(1500, 6000) * kMillisecond;
    mesh.advance(pause);
    if (*chance(5)) node = *between<std::size_t>(0, mesh.size() - 1);
    if (mesh.check(node, "k", *between<std::uint64_t>(1, 2)).allowed) consumers.insert(node);
    std::vector<Consumption> all;
    std::uint64_t recent = 0;
    for (const Admission& admission : mesh.admissions()) {
      all.push_back({admission.at, admission.units});
      if (admission.at > mesh.now() - kExchange) recent += admission.units;
    }
    most_unseen = std::max(most_unseen, recent);
    Uint128 owed = true_debt(all, mesh.now(), shape.rate, shape.unit, ~Uint128{0} >> 2);
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      std::uint64_t used = mesh.limiter(i).used(0, {"api", key, 1}, mesh.now());
      // used() is rounded up.
      RC_ASSERT(shape.ticks(used) < owed + shape.ticks(most_unseen + 1));
      reached("a debt that others know of", used > 0 && i != node);
    }
  }
  reached("a bucket that was reset", mesh.resets() > 0);
  reached("two consumers", consumers.size() > 1);
  reached("one consumer alone", consumers.size() == 1);
}

LAW(21, "after a heal the lock-out is bounded by max_debt", "debt beyond the cap",
    "no debt allowed beyond the burst", "denied after the heal") {
  BucketShape shape = *bucket_shapes().as("shape");
  std::size_t n = *between<std::size_t>(2, 6).as("regions");
  auto rules = rule_set({bucket_rule(shape)});
  std::vector<Entry> key{{"key", "k"}};
  LimiterOptions options;
  options.replicated = true;
  // Each region consumes on its own while the partition lasts.
  Cell all;
  Nanos now = kStart;
  std::vector<std::unique_ptr<Limiter>> limiters;
  std::uint64_t consumed = 0;
  for (std::size_t i = 0; i < n; ++i) {
    options.incarnation = {1, i + 1};
    limiters.push_back(std::make_unique<Limiter>(rules, options));
    for (int turn = *between(1, 4); turn > 0; --turn) {
      std::uint64_t units =
          *one_of<std::uint64_t>({shape.burst, 1, std::max<std::uint64_t>(shape.burst / 2, 1)});
      if (limiters[i]->check({"api", key, units}, now).allowed)
        consumed = add_saturated(consumed, units);
    }
    std::vector<crdt::OwnCount> counts;
    limiters[i]->replica_side().drain(counts, 10);
    for (const crdt::OwnCount& count : counts) {
      Cell cell;
      cell.id = count.cell;
      cell.raise({options.incarnation, count.birth}, count.value);
      cell.bucket = count.bucket;
      all.id = cell.id;
      crdt::join(all, cell);
    }
  }
  Uint128 cap = static_cast<Uint128>(shape.burst) * (1 + static_cast<Uint128>(shape.max_debt));
  reached("debt beyond the cap", consumed > cap);
  reached("no debt allowed beyond the burst", shape.max_debt == 0);
  std::uint64_t cost =
      *between<std::uint64_t>(1, std::min<std::uint64_t>(shape.burst, 1000)).as("cost");
  for (std::size_t i = 0; i < n; ++i) {
    Limiter& limiter = *limiters[i];
    limiter.replica_side().absorb(all);
    std::uint64_t used = limiter.used(0, {"api", key, 1}, now);
    RC_ASSERT(used <= cap);
    RC_ASSERT(used >= std::min<Uint128>(consumed, cap));
    Decision decision = limiter.check({"api", key, cost}, now);
    reached("denied after the heal", !decision.allowed);
    if (decision.allowed) continue;
    // At the latest when max_debt bursts and the cost itself have come back.
    Uint128 owed = (cap - shape.burst + cost) * static_cast<std::uint64_t>(shape.unit);
    RC_ASSERT(static_cast<Uint128>(static_cast<std::uint64_t>(
                  decision.statuses.at(0).retry_after)) <= (owed + shape.rate - 1) / shape.rate);
  }
}

}  // namespace
}  // namespace weir::laws
