#include <weir/limits/escrow/escrow_bucket.h>

#include <algorithm>

#include "law.h"
#include "troubles.h"

namespace weir::laws {
namespace {

Rule bucket_rule(std::uint64_t limit, Nanos window, std::uint64_t burst) {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = limit;
  rule.window = window;
  rule.burst = burst;
  rule.algorithm = Algorithm::token_bucket;
  rule.enforcement = Enforcement::escrow;
  return rule;
}

/// One bucket for all nodes: what would have had to be in it, so that everything could pass.
class OneBucket {
 public:
  OneBucket(const Rule& rule, Nanos now)
      : rule_(rule), level_(Int128{rule.burst} * rule.window), at_(now) {}

  /// False if it holds less.
  bool take(std::uint64_t units, Nanos now) {
    Int128 most = Int128{rule_.burst} * rule_.window;
    level_ = std::min(most, level_ + Int128{rule_.limit} * (now - at_));
    at_ = now;
    level_ -= Int128{units} * rule_.window;
    taken_ += units;
    return level_ >= 0;
  }
  std::uint64_t taken() const { return taken_; }
  std::uint64_t left(Nanos now) {
    take(0, now);
    return static_cast<std::uint64_t>(std::max<Int128>(level_, 0) / rule_.window);
  }

 private:
  using Int128 = crdt::Int128;
  Rule rule_;
  Int128 level_;
  Nanos at_;
  std::uint64_t taken_ = 0;
};

struct World {
  MeshOptions options;
  Rule rule;
};

World world() {
  World made;
  made.options = *mesh_options(2, 4).as("mesh");
  auto burst = *between<std::uint64_t>(1, 40).as("burst");
  auto limit = *rc::gen::weightedOneOf<std::uint64_t>(
                    {{3, between<std::uint64_t>(1, 10)}, {1, between<std::uint64_t>(50, 400)}})
                    .as("limit");
  auto window = *one_of<Nanos>({1, 7, 60}).as("window");
  made.rule = bucket_rule(limit, window * kSecond, burst);
  if (*chance(30)) made.rule.algorithm = Algorithm::leaky_bucket;
  made.options.rules = rule_set({made.rule});
  draw_weights(made.options);
  return made;
}

LAW(23, "over any interval all nodes together take no more from a bucket than burst and rate allow",
    WEIR_LIVE_CLASSES, "the whole burst", "lent", "some nodes share with weights") {
  World made = world();
  Mesh mesh(made.options);
  std::map<std::string, OneBucket> one;
  for (const char* key : {"k", "l"}) one.emplace(key, OneBucket(made.rule, mesh.now()));
  mesh.advance(*one_of<Nanos>({0, 3, 20}) * kSecond);
  auto steps = *between<int>(0, 150).as("steps");
  for (int step = 0; step < steps; ++step) {
    live(mesh, made.rule, made.options.memory_only,
         [&](const std::string& key, std::uint64_t hits, const Decision& decision) {
           if (decision.allowed) RC_ASSERT(one.at(key).take(hits, mesh.now()));
         });
  }
  reached("the whole burst", one.at("k").taken() >= made.rule.burst);
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    reached("lent", mesh.up(i) && mesh.agent(i).counters().requests_served > 0);
  }
  reached("some nodes share with weights", !made.options.weights.empty());
}

/// Limiters alone, each with a clock of its own, that lend to each other. What one wrote reaches
/// another at some time, in any order, and more than once.
class Clocks {
 public:
  explicit Clocks(const Rule& rule) : rule_(rule) {
    std::vector<crdt::Shareholder> holders;
    auto n = *between<std::size_t>(2, 4).as("nodes");
    changes_ = *chance(40);
    for (std::size_t i = 0; i < n; ++i) {
      holders.push_back({{"r" + std::to_string(i), "n"}, {{}}});
      if (!changes_) continue;
      auto from = kStart + *between<Nanos>(0, 8000) * kMillisecond;
      holders.back().weights.push_back({from, *between<std::uint32_t>(0, 4)});
    }
    auto shares = std::make_shared<const crdt::ShareTable>(holders);
    for (std::size_t i = 0; i < n; ++i) {
      LimiterOptions options;
      options.replicated = true;
      options.incarnation = {i + 1, 1};
      options.self = holders[i].member;
      options.shares = shares;
      options.max_series = 100;
      nodes_.push_back({std::make_unique<Limiter>(rule_set({rule}), options), *clock_error(), {}});
    }
  }

  std::size_t size() const { return nodes_.size(); }
  bool changes() const { return changes_; }
  void advance(Nanos time) { real_ += time; }
  bool differ() const {
    return std::any_of(nodes_.begin(), nodes_.end(),
                       [&](const Node& node) { return node.error != nodes_[0].error; });
  }

  bool spend(std::size_t i, std::uint64_t units) {
    std::vector<Entry> entries{{"key", "k"}};
    if (!nodes_[i].limiter->check({"api", entries, units}, time(i)).allowed) return false;
    taken_[time(i)] += units;
    return true;
  }
  /// Node i asks for what it lacks.
  void ask(std::size_t i) {
    std::vector<RightsNeed> needs;
    nodes_[i].limiter->replica_side().rights_needed(time(i), kSecond / 2, needs);
    for (const RightsNeed& need : needs) {
      for (std::size_t j = 0; j < size(); ++j) {
        if (j != i) requests_.push_back({i, j, need});
      }
    }
  }
  /// Somebody serves some request; it may come again. True if it lent something.
  bool serve() {
    if (requests_.empty()) return false;
    const auto [to, from, need] = requests_[*between<std::size_t>(0, requests_.size() - 1)];
    Limiter& lender = *nodes_[from].limiter;
    if (!lender.replica_side().give_rights(need.rule, need.cell, {to + 1, 1}, need.units,
                                           time(from)))
      return false;
    std::vector<crdt::OwnCount> rows;
    lender.replica_side().drain(rows, 100);
    for (const crdt::OwnCount& row : rows) written_.push_back({from, row});
    return true;
  }
  /// Node i hears of one row, and of all that it heard of before.
  void hear(std::size_t i) {
    if (written_.empty()) return;
    const auto& [writer, row] = written_[*between<std::size_t>(0, written_.size() - 1)];
    if (writer == i) return;
    crdt::Cell& cell = nodes_[i].known[row.cell];
    cell.id = row.cell;
    cell.raise({{writer + 1, 1}, row.birth}, row.value);
    crdt::Succession succession{{{i + 1, 1}}, -1};
    EscrowOthers others;
    others.holding = crdt::holding_of(cell, succession, [](const auto&) { return false; });
    nodes_[i].limiter->replica_side().absorb_rows(row.cell, others);
  }
  void sweep(std::size_t i) { nodes_[i].limiter->sweep(time(i)); }

  /// What was taken, in the order of the clocks that it was taken by.
  void check() const {
    OneBucket one(rule_, 0);
    for (const auto& [at, units] : taken_) RC_ASSERT(one.take(units, at));
  }

 private:
  struct Node {
    std::unique_ptr<Limiter> limiter;
    Nanos error = 0;
    std::map<crdt::CellId, crdt::Cell> known;
  };
  struct Asked {
    std::size_t to = 0;
    std::size_t from = 0;
    RightsNeed need;
  };
  static rc::Gen<Nanos> clock_error() {
    return rc::gen::map(one_of<Nanos>({0, 0, 300, 700, 1500, 5000}),
                        [](Nanos milliseconds) { return milliseconds * kMillisecond; });
  }
  Nanos time(std::size_t i) const { return kStart + real_ + nodes_[i].error; }

  Rule rule_;
  bool changes_ = false;
  Nanos real_ = 0;
  std::vector<Node> nodes_;
  std::vector<Asked> requests_;
  std::vector<std::pair<std::size_t, crdt::OwnCount>> written_;
  std::map<Nanos, std::uint64_t> taken_;
};

LAW(23, "a bucket is not overdrawn where clocks differ, and rows and requests come late and again",
    "clocks that differ", "lent", "admitted", "more than its share at once",
    "weights that change") {
  Rule rule = bucket_rule(*between<std::uint64_t>(1, 40).as("limit"), kSecond,
                          *between<std::uint64_t>(1, 20).as("burst"));
  Clocks clocks(rule);
  reached("clocks that differ", clocks.differ());
  reached("weights that change", clocks.changes());
  std::size_t hungry = 0;
  std::uint64_t at_once = 0;
  for (int step = *between<int>(0, 250).as("steps"); step > 0; --step) {
    if (*chance(5)) hungry = *between<std::size_t>(0, clocks.size() - 1);
    std::size_t node = *chance(80) ? hungry : *between<std::size_t>(0, clocks.size() - 1);
    int what = *choice(10);
    if (what < 3) {
      std::uint64_t units = 0;
      while (clocks.spend(node, 1)) ++units;
      at_once = std::max(at_once, units);
    } else if (what < 5) {
      clocks.ask(node);
    } else if (what < 7) {
      reached("lent", clocks.serve());
    } else if (what < 8) {
      clocks.hear(node);
    } else if (what < 9 || !*chance(20)) {
      clocks.advance(*one_of<Nanos>({1, 20, 100, 400}) * kMillisecond);
    } else {
      clocks.sweep(node);
    }
  }
  reached("admitted", at_once > 0);
  reached("more than its share at once",
          at_once > (rule.burst + clocks.size() - 1) / clocks.size());
  clocks.check();
}

/// One of two members, that has lent nothing yet; and what names its bucket.
struct Lender {
  std::unique_ptr<Limiter> limiter;
  RightsNeed names;
  std::uint64_t share = 0;
};

Lender lender(const Rule& rule) {
  LimiterOptions options;
  options.replicated = true;
  options.incarnation = {1, 1};
  options.self = {"r0", "n"};
  options.shares = std::make_shared<const crdt::ShareTable>(
      std::vector<crdt::Shareholder>{{options.self, {{}}}, {{"r1", "n"}, {{}}}});
  options.max_series = 100;
  Lender made;
  made.limiter = std::make_unique<Limiter>(rule_set({rule}), options);
  // What it asks for itself names the rule and its periods.
  std::vector<Entry> entries{{"key", "k"}};
  RC_ASSERT(!made.limiter->check({"api", entries, rule.burst}, kStart).allowed);
  std::vector<RightsNeed> needs;
  made.limiter->replica_side().rights_needed(kStart, kSecond, needs);
  RC_ASSERT(needs.size() == 1u);
  made.names = needs[0];
  made.share = options.shares->share(options.self, needs[0].cell.series, rule.burst, kStart);
  return made;
}

LAW(25, "a lender has, lent for this period and sent ahead its share at most",
    "full ones are on their way", "two periods are lent", "lent in part", "spent") {
  Rule rule = bucket_rule(*between<std::uint64_t>(1, 40).as("limit"), kSecond,
                          *between<std::uint64_t>(2, 20).as("burst"));
  Lender made = lender(rule);
  Limiter& limiter = *made.limiter;
  const crdt::SeriesId& series = made.names.cell.series;
  WindowShape periods = lending_periods(series);
  std::vector<Entry> entries{{"key", "k"}};
  std::map<std::pair<Nanos, std::uint64_t>, std::uint64_t> rows;  // by period and row
  Nanos now = kStart + kMinute;
  for (int step = *between<int>(0, 40).as("steps"); step > 0; --step) {
    std::int64_t index = periods.index(now);
    int what = *choice(10);
    if (what < 5) {
      crdt::Epoch period = periods.epoch(index + *between<std::int64_t>(1, 2));
      crdt::Incarnation to{*between<std::uint64_t>(2, 3), 1};
      auto wanted = *between<std::uint64_t>(1, rule.burst);
      limiter.replica_side().give_rights(made.names.rule, {series, period}, to, wanted, now);
      std::vector<crdt::OwnCount> written;
      limiter.replica_side().drain(written, 100);
      for (const crdt::OwnCount& row : written) rows[{row.cell.epoch.start, row.birth}] = row.value;
    } else if (what < 6) {
      reached("spent", limiter.check({"api", entries, 1}, now).allowed);
    } else {
      now += *one_of<Nanos>({1, 10, 200, 700, 3000}) * kMillisecond;
      index = periods.index(now);
    }
    Nanos start = periods.start(index);
    std::uint64_t all = limiter.check({"api", entries, 0}, now).statuses[0].remaining;
    std::set<Nanos> lent;
    for (const auto& [row, units] : rows) {
      bool fill = crdt::is_fill(row.second);
      if (!fill && row.first >= start) lent.insert(row.first);
      if (fill ? row.first > start : row.first == start) all += units;
      reached("full ones are on their way", fill && row.first > start);
      reached("lent in part", !fill && row.first == start && units < made.share);
    }
    reached("two periods are lent", lent.size() > 1);
    RC_ASSERT(all <= made.share);
  }
}

LAW(27, "of a bucket only periods that have not begun are lent, by the lender's clock",
    "one that runs", "the next", "the one after", "one that is over", "far ahead", "no period") {
  Rule rule = bucket_rule(*between<std::uint64_t>(1, 40).as("limit"), kSecond,
                          *between<std::uint64_t>(2, 20).as("burst"));
  Lender made = lender(rule);
  Limiter& limiter = *made.limiter;
  std::vector<Entry> entries{{"key", "k"}};
  crdt::CellId id = made.names.cell;
  Nanos now =
      id.epoch.start + 9 * kSecond + *between<Nanos>(0, kLendingPeriod - 1).as("into a period");
  bool used = *chance(50).as("used here before");
  if (used) limiter.check({"api", entries, 1}, now - 4 * kSecond);
  auto ahead = *between<Nanos>(-2, 4).as("periods ahead");
  id.epoch.start += (9 + ahead) * kLendingPeriod;
  id.epoch.expiry += (9 + ahead) * kLendingPeriod;
  bool odd = *chance(20).as("no period");
  if (odd) ++(*chance(50) ? id.epoch.start : id.epoch.expiry);
  bool gave = limiter.replica_side().give_rights(made.names.rule, id, {2, 1}, 1, now);
  RC_ASSERT(gave == (!odd && ahead >= 1 && id.epoch.start <= now + 2 * kLendingPeriod));
  reached("no period", odd);
  reached("one that is over", ahead < 0);
  reached("one that runs", ahead == 0);
  reached("the next", ahead == 1);
  reached("the one after", ahead == 2);
  reached("far ahead", ahead > 2);
}

/// Peeks: what the nodes that run say is left there, in sum.
std::uint64_t left_in_all(Mesh& mesh) {
  std::uint64_t sum = 0;
  std::vector<Entry> entries{{"key", "k"}};
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    if (!mesh.up(i)) continue;
    Decision decision = mesh.limiter(i).check({"api", entries, 0}, mesh.now());
    sum = add_saturated(sum, decision.statuses[0].remaining);
  }
  return sum;
}

LAW(24, "what nodes say is left in a bucket there, is left in it; demand moves between them",
    "lent by two", "all that there is", "a restart", "a cut", "idle in between", "a reservation") {
  World made = world();
  Mesh mesh(made.options);
  OneBucket one(made.rule, mesh.now());
  mesh.advance(*one_of<Nanos>({1, 5, 30}) * kSecond);
  std::vector<Entry> entries{{"key", "k"}};
  for (int phase = *between<int>(0, 12).as("phases"); phase > 0; --phase) {
    std::size_t hungry = *between<std::size_t>(0, mesh.size() - 1);
    std::size_t other = *between<std::size_t>(0, mesh.size() - 1);
    int what = *choice(12);
    if (what == 0) {
      mesh.cut(hungry, other);
      reached("a cut", hungry != other);
    } else if (what == 1) {
      mesh.mend(hungry, other);
    } else if (what == 2) {
      mesh.crash(other);
      mesh.advance(*between<Nanos>(0, 3000) * kMillisecond);
      mesh.boot(other);
      reached("a restart");
    } else if (what == 3) {
      mesh.advance(*one_of<Nanos>({5, 60, 600}) * kSecond);
      reached("idle in between");
    }
    auto hits = *between<std::uint64_t>(1, 3);
    auto step = *one_of<Nanos>({5, 40, 150}) * kMillisecond;
    for (int i = *between<int>(1, 60); i > 0; --i) {
      for (std::size_t node : {hungry, other}) {
        if (!mesh.up(node)) continue;
        if (mesh.spend(node, "k", hits).allowed) RC_ASSERT(one.take(hits, mesh.now()));
        if (i % 16 == 0) {
          Decision decision;
          Request request{"api", entries, hits};
          Ticket ticket = mesh.limiter(node).reserve(request, mesh.now(), kHour, decision);
          if (!ticket) continue;
          mesh.limiter(node).settle(ticket, hits, mesh.now());
          RC_ASSERT(one.take(hits, mesh.now()));
          reached("a reservation");
        }
      }
      std::uint64_t left = left_in_all(mesh);
      RC_ASSERT(left <= one.left(mesh.now()));
      reached("all that there is", left == made.rule.burst);
      mesh.advance(step);
    }
  }
  int lent = 0;
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    lent += mesh.up(i) && mesh.agent(i).counters().requests_served > 0;
  }
  reached("lent by two", lent > 1);
}

LAW(17, "a member that is alone has the exact bucket, reservations included", "a denied cost",
    "a leaky bucket", "held", "settled for more than was reserved", "owes a burst",
    "numbers as large as they may be") {
  Rule split = bucket_rule(*between<std::uint64_t>(1, 50).as("limit"),
                           *between<Nanos>(1, 2000).as("window") * kMillisecond,
                           *between<std::uint64_t>(1, 20).as("burst"));
  if (*chance(30)) {
    // As many units a nanosecond as there may be, or a burst that takes a year.
    bool fast = *chance(50);
    split.burst = std::uint64_t{1} << (fast ? 52 : 34);
    split.limit = fast ? ~std::uint64_t{0} : split.burst;
    split.window = fast ? kMillisecond : 360 * kDay;
    RC_ASSERT(escrow_bucket_shape(split).fits());
    reached("numbers as large as they may be");
  }
  std::uint64_t grain = split.burst > 1000 ? split.burst / 8 : 1;
  if (*chance(30)) split.algorithm = Algorithm::leaky_bucket;
  Rule exact = split;
  exact.enforcement = Enforcement::merged;
  exact.on_failure = OnFailure::closed;
  Limiter one(rule_set({split}), {});
  Limiter other(rule_set({exact}), {});
  Nanos now = kStart;
  std::vector<std::pair<Ticket, Ticket>> tickets;
  std::vector<Entry> entries{{"key", "k"}};
  auto same = [](const Decision& a, const Decision& b) {
    const RuleStatus& x = a.statuses[0];
    const RuleStatus& y = b.statuses[0];
    RC_ASSERT(x.allowed == y.allowed);
    RC_ASSERT(x.remaining == y.remaining);
    RC_ASSERT(x.reset == y.reset);
    RC_ASSERT(x.retry_after == y.retry_after);
    RC_ASSERT(x.delay == y.delay);
    RC_ASSERT(!x.exhausted_locally);
    reached("a denied cost", !x.allowed);
  };
  reached("a leaky bucket", split.algorithm == Algorithm::leaky_bucket);
  for (int step = *between<int>(0, 60).as("steps"); step > 0; --step) {
    now += *one_of<Nanos>({0, 1, kMillisecond, 30 * kMillisecond, 400 * kMillisecond});
    Request request{"api", entries, *between<std::uint64_t>(0, 6) * grain};
    int what = *choice(10);
    if (what < 6) {
      same(one.check(request, now), other.check(request, now));
    } else if (what < 8) {
      Decision a;
      Decision b;
      Ticket x = one.reserve(request, now, kHour, a);
      Ticket y = other.reserve(request, now, kHour, b);
      same(a, b);
      RC_ASSERT(static_cast<bool>(x) == static_cast<bool>(y));
      if (x) tickets.emplace_back(x, y);
      reached("held", static_cast<bool>(x));
    } else if (what < 9 && !tickets.empty()) {
      auto actual = *between<std::uint64_t>(0, 60) * grain;
      Settled a = one.settle(tickets.back().first, actual, now);
      Settled b = other.settle(tickets.back().second, actual, now);
      RC_ASSERT(a.known && b.known && !a.lapsed && !b.lapsed);
      reached("settled for more than was reserved", actual > a.hits);
      reached("owes a burst", actual >= 2 * split.burst);
      tickets.pop_back();
    }
  }
}

LAW(46, "a bucket's whole rate and burst reach demand that is all in one region",
    "a burst smaller than the members", "a second's burst or more", "less than a second's burst",
    "it was full") {
  MeshOptions options;
  options.nodes = *between<std::size_t>(2, 5).as("nodes");
  options.seed = *between<std::uint64_t>(0, 1000).as("seed");
  options.min_delay = 20 * kMillisecond;
  options.max_delay = *between<Nanos>(20, 100).as("delay") * kMillisecond;
  std::uint64_t rate = *one_of<std::uint64_t>({1, 5, 20, 100}).as("a second");
  std::uint64_t burst = *one_of<std::uint64_t>({1, 3, 20, 100, 400}).as("burst");
  Rule rule = bucket_rule(rate, kSecond, burst);
  options.rules = rule_set({rule});
  Mesh mesh(options);
  auto fill = static_cast<Nanos>(burst / rate + 1) * kSecond;
  bool full = fill < 30 * kSecond;
  mesh.advance(10 * kSecond + (full ? fill : 0));
  std::size_t hungry = *between<std::size_t>(0, mesh.size() - 1).as("who asks");
  reached("a burst smaller than the members", burst < mesh.size());
  reached("it was full", full && burst > rate);
  reached(burst >= rate ? "a second's burst or more" : "less than a second's burst");
  // More than there is, and always at once when some is there.
  Nanos step = kSecond / static_cast<Nanos>(4 * rate);
  Nanos begin = mesh.now();
  OneBucket one(rule, begin);
  auto ask_until = [&](Nanos end) {
    std::uint64_t before = one.taken();
    while (mesh.now() < end) {
      while (mesh.spend(hungry, "k", 1).allowed) RC_ASSERT(one.take(1, mesh.now()));
      mesh.advance(step);
    }
    return one.taken() - before;
  };
  std::uint64_t first = ask_until(begin + 5 * kSecond);
  // The others' buckets are full until theirs is asked for: that long nothing fills there.
  RC_ASSERT(!full || first + 1 >= burst + 3 * rate);
  std::uint64_t admitted = ask_until(begin + 45 * kSecond);
  RC_ASSERT(admitted >= rate * 36);
}

}  // namespace
}  // namespace weir::laws
