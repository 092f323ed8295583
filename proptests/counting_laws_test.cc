#include <weir/limits/limiter.h>
#include <weir/limits/replica_side.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "generators.h"
#include "law.h"

/// How rules count: what is denied, reported and given back, windows that begin with a hit, and
/// candidates.
namespace weir::laws {
namespace {

// The plainest limiter of one key that can be right. Nothing in it calls the code under test.

/// One rule's count of one key, by one writer.
class PlainCount {
 public:
  PlainCount(Rule rule, Nanos phase) : rule_(std::move(rule)), phase_(phase) {
    if (is_bucket(rule_.algorithm)) {
      burst_ = rule_.limit == 0 ? 0 : rule_.burst == 0 ? rule_.limit : rule_.burst;
    }
  }

  std::uint64_t cost(std::uint64_t hits) const {
    const Uint128 product = static_cast<Uint128>(rule_.default_cost) * hits;
    return static_cast<std::uint64_t>(std::min<Uint128>(product, kMax));
  }
  bool fits(Nanos now, std::uint64_t cost) const {
    const Uint128 scale = unit();
    const Uint128 used = used_at(now);
    return used <= most() * scale && cost * scale <= most() * scale - used;
  }
  std::uint64_t remaining(Nanos now) const {
    const Uint128 used = used_at(now);
    return used > most() * unit() ? 0
                                  : static_cast<std::uint64_t>((most() * unit() - used) / unit());
  }

  void consume(Nanos now, std::uint64_t units) {
    if (units == 0) return;
    if (is_bucket(rule_.algorithm)) {
      debt_ = std::min(owed(now), cap()) + units * unit();
      at_ = now;
      return;
    }
    Nanos at = now;
    if (rule_.phase == Phase::first_hit) {
      for (const Event& event : log_) {
        if (event.at <= now && now < event.at + rule_.window) at = std::min(at, event.at);
      }
    }
    log_.push_back({at, units, 0});
  }

  /// What a denied request counts; `fits`: it was another rule that denied.
  std::uint64_t denied(Nanos now, std::uint64_t cost) const {
    if (fits(now, cost)) return cost;
    if (is_bucket(rule_.algorithm)) {
      const std::uint64_t most = std::min(cost, burst_);
      return std::min<std::uint64_t>(
          most, up_to(now, std::min(cap(), (Uint128{burst_} - most + rule_.limit) * unit())));
    }
    if (rule_.algorithm == Algorithm::sliding_log || rule_.phase == Phase::first_hit) {
      return std::min(cost, remaining(now));
    }
    std::uint64_t here = 0;
    for (const Event& event : log_) {
      if (number(event.at) == number(now)) here += event.units - event.back;
    }
    return std::min(cost, rule_.limit - std::min(rule_.limit, here));
  }
  /// What a sliding window needs beyond its length until a full sub-window lets this cost pass.
  Nanos longer(std::uint64_t cost) const {
    if (!sliding()) return 1;
    return static_cast<Nanos>(unit() * cost / rule_.limit) + 1;
  }
  std::uint64_t report(Nanos now, std::uint64_t cost) const {
    if (rule_.algorithm == Algorithm::sliding_log) return std::min(cost, remaining(now));
    const std::uint64_t most_units = std::min(cost, static_cast<std::uint64_t>(most()));
    return is_bucket(rule_.algorithm) ? std::min(most_units, up_to(now, cap())) : most_units;
  }

  /// The newest first. Returns how many.
  std::uint64_t give_back(Nanos now, std::uint64_t units) {
    if (is_bucket(rule_.algorithm)) {
      const Uint128 debt = std::min(owed(now), cap());
      const Uint128 given = std::min<Uint128>(units, debt / unit());
      if (given == 0) return 0;
      debt_ = debt - given * unit();
      at_ = now;
      return static_cast<std::uint64_t>(given);
    }
    std::uint64_t given = 0;
    for (auto event = log_.rbegin(); event != log_.rend(); ++event) {
      if (!counts(*event, now)) continue;
      const std::uint64_t part = std::min(event->units - event->back, units - given);
      event->back += part;
      given += part;
    }
    return given;
  }

  /// With the same counts.
  bool fits_under(const Candidate& candidate, Nanos now, std::uint64_t cost) const {
    PlainCount other = *this;
    other.rule_.limit = candidate.limit;
    other.burst_ = candidate.limit == 0 || candidate.burst == 0 ? candidate.limit : candidate.burst;
    return other.fits(now, cost);
  }

  const Rule& rule() const { return rule_; }
  std::uint64_t burst() const { return burst_; }

 private:
  struct Event {
    Nanos at = 0;
    std::uint64_t units = 0;
    std::uint64_t back = 0;
  };

  bool sliding() const { return rule_.algorithm == Algorithm::sliding_window; }
  Nanos sub() const { return sliding() ? rule_.window / rule_.slots : rule_.window; }
  std::int64_t number(Nanos at) const { return (at + phase_) / sub(); }
  Uint128 most() const { return is_bucket(rule_.algorithm) ? burst_ : rule_.limit; }
  Uint128 unit() const {
    return static_cast<std::uint64_t>(is_bucket(rule_.algorithm) ? rule_.window : sub());
  }
  Uint128 cap() const { return Uint128{burst_} * (1 + rule_.max_debt) * unit(); }
  Uint128 owed(Nanos now) const {
    const Uint128 debt = std::min(debt_, cap());
    return debt - std::min(debt, Uint128{rule_.limit} * static_cast<std::uint64_t>(now - at_));
  }
  std::uint64_t up_to(Nanos now, Uint128 debt) const {
    const Uint128 room = (debt - std::min(debt, owed(now))) / unit();
    return static_cast<std::uint64_t>(std::min<Uint128>(room, kMax));
  }
  bool counts(const Event& event, Nanos now) const {
    const bool by_instant =
        rule_.algorithm == Algorithm::sliding_log || rule_.phase == Phase::first_hit;
    if (by_instant) return now < event.at + rule_.window;
    return number(now) - number(event.at) <= static_cast<std::int64_t>(sliding() ? rule_.slots : 0);
  }
  Uint128 used_at(Nanos now) const {
    if (is_bucket(rule_.algorithm)) return owed(now);
    Uint128 used = 0;
    const auto into = static_cast<std::uint64_t>((now + phase_) % sub());
    for (const Event& event : log_) {
      if (!counts(event, now)) continue;
      const bool oldest =
          sliding() && number(now) - number(event.at) == static_cast<std::int64_t>(rule_.slots);
      used += (event.units - event.back) * (oldest && !rule_.strict ? unit() - into : unit());
    }
    return used;
  }

  Rule rule_;
  Nanos phase_;
  std::uint64_t burst_ = 0;
  std::vector<Event> log_;
  Uint128 debt_ = 0;
  Nanos at_ = 0;
};

/// All rules of one key.
struct Plain {
  std::vector<PlainCount> counts;

  bool check(Nanos now, std::uint64_t hits) {
    bool allowed = true;
    for (const PlainCount& count : counts) {
      allowed &= count.rule().shadow || count.fits(now, count.cost(hits));
    }
    for (PlainCount& count : counts) {
      const std::uint64_t cost = count.cost(hits);
      const bool fits = count.fits(now, cost);
      if (allowed && fits) {
        count.consume(now, cost);
      } else if (count.rule().count_denied) {
        count.consume(now, count.denied(now, cost));
      }
    }
    return allowed;
  }
  void report(Nanos now, std::uint64_t hits) {
    for (PlainCount& count : counts) count.consume(now, count.report(now, count.cost(hits)));
  }
  std::uint64_t give_back(Nanos now, std::uint64_t hits) {
    std::uint64_t most = 0;
    for (PlainCount& count : counts) {
      most = std::max(most, count.give_back(now, count.cost(hits)));
    }
    return most;
  }
};

Rule counting_rule(const std::string& name) {
  Rule rule = *rules_named(name).as("rule");
  rule.calendar.reset();
  rule.cost_by_method.clear();
  if (rule.window > kDay) rule.window = 10 * kSecond;
  if (is_bucket(rule.algorithm)) rule.max_debt = *one_of<std::uint32_t>({1, 0, 3});
  if (rule.algorithm == Algorithm::fixed_window && *chance(50)) rule.phase = Phase::first_hit;
  rule.count_denied = *chance(50);
  return rule;
}

/// A limiter and its model, over one key.
struct Pair {
  std::vector<Rule> rules;
  std::unique_ptr<Limiter> limiter;
  Plain plain;
  std::array<Entry, 1> entries{{{"key", "k"}}};
  std::vector<crdt::OwnCount> drained;
  bool replicated = *chance(50);

  explicit Pair(std::vector<Rule> given) : rules(std::move(given)) {
    LimiterOptions options;
    options.replicated = replicated;
    options.incarnation = {1, 1};
    limiter = std::make_unique<Limiter>(rule_set(rules), options);
    for (std::uint32_t i = 0; i < rules.size(); ++i) {
      const Rule& rule = limiter->rules()->rules()[i];
      const WindowShape shape = window_shape(rule, limiter->series_of(i, request(1)));
      plain.counts.emplace_back(rules[i], rule.phase == Phase::spread ? shape.phase : 0);
    }
  }
  Request request(std::uint64_t hits, RequestKind kind = RequestKind::check) const {
    Request request{"api", entries, hits};
    request.kind = kind;
    return request;
  }
  /// Both say the same of what is left.
  void agree(const Decision& decision, Nanos now) {
    RC_ASSERT(decision.statuses.size() == rules.size());
    for (std::size_t i = 0; i < rules.size(); ++i) {
      RC_ASSERT(decision.statuses[i].remaining == plain.counts[i].remaining(now));
    }
    if (replicated && *chance(30)) limiter->replica_side().drain(drained, 100);
  }
};

std::vector<Rule> counting_rules() {
  std::vector<Rule> rules;
  for (int i = *between(1, 3).as("rules"); i > 0; --i) {
    rules.push_back(counting_rule("r" + std::to_string(i)));
  }
  return rules;
}

rc::Gen<Nanos> pauses() {
  return rc::gen::weightedOneOf<Nanos>({{4, between<Nanos>(0, 300 * kMillisecond)},
                                        {2, between<Nanos>(0, 3 * kSecond)},
                                        {1, between<Nanos>(0, 70 * kSecond)},
                                        {1, one_of<Nanos>({0, kSecond, kMinute})}});
}
rc::Gen<std::uint64_t> few_hits() {
  return rc::gen::weightedElement<std::uint64_t>({{6, 1}, {3, 2}, {1, 0}, {2, 7}, {1, kMax}});
}

/// When it passes if nothing else comes, as a denial says.
void is_tight(const PlainCount& count, const RuleStatus& status, std::uint64_t cost, Nanos now) {
  if (status.retry_after == kNever || now + status.retry_after > kMaxTime) return;
  RC_ASSERT(status.retry_after > 0);
  RC_ASSERT(!count.fits(now + status.retry_after - 1, cost));
  RC_ASSERT(count.fits(now + status.retry_after, cost));
}

LAW(65, "what is denied counts as far as count_denied says, and a report counts whatever is left",
    "denied and counted", "another rule denied", "a report beyond the limit",
    "a report that does not all count", "a bucket", "a window that begins with a hit",
    "a shadow rule") {
  Pair pair(counting_rules());
  Nanos now = kStart;
  for (int step = *between(1, 40).as("requests"); step > 0; --step) {
    now += *pauses();
    const std::uint64_t hits = *few_hits();
    const bool report = *chance(25);
    const Plain before = pair.plain;
    const Decision decision = pair.limiter->check(
        pair.request(hits, report ? RequestKind::report : RequestKind::check), now);
    if (report) {
      pair.plain.report(now, hits);
      RC_ASSERT(decision.allowed);
    } else {
      RC_ASSERT(decision.allowed == pair.plain.check(now, hits));
    }
    pair.agree(decision, now);
    for (std::size_t i = 0; i < pair.rules.size(); ++i) {
      const PlainCount& was = before.counts[i];
      const PlainCount& is = pair.plain.counts[i];
      const std::uint64_t cost = was.cost(hits);
      const RuleStatus& status = decision.statuses[i];
      const bool fitted = was.fits(now, cost);
      RC_ASSERT(status.allowed == (report || fitted));
      reached("a report beyond the limit", report && !fitted && was.report(now, cost) > 0);
      reached("a report that does not all count", report && was.report(now, cost) < cost);
      if (report || cost == 0) continue;
      const bool counted = was.rule().count_denied && !(decision.allowed && fitted);
      reached("denied and counted", counted && !fitted && was.denied(now, cost) > 0);
      reached("another rule denied", counted && fitted);
      reached("a bucket", counted && is_bucket(was.rule().algorithm));
      reached("a window that begins with a hit", counted && was.rule().phase == Phase::first_hit);
      reached("a shadow rule", counted && was.rule().shadow);
      if (!fitted) is_tight(is, status, cost, now);
      // Whoever is denied, and then quiet, is let in again about a window later.
      const bool even = !was.rule().strict && cost <= status.limit;
      if (counted && !fitted && even && was.denied(now, cost) > 0) {
        RC_ASSERT(status.retry_after <= was.rule().window + was.longer(cost));
      }
    }
  }
}

LAW(66, "what is given back counts no more, and nobody gives back what it did not consume",
    "all of it", "less than was asked for", "nothing", "of two windows", "a bucket",
    "a window that begins with a hit") {
  std::vector<Rule> rules = counting_rules();
  Pair pair(rules);
  Nanos now = kStart;
  for (int step = *between(1, 40).as("requests"); step > 0; --step) {
    now += *pauses();
    const std::uint64_t hits = *few_hits();
    if (*chance(60)) {
      const Decision decision = pair.limiter->check(pair.request(hits), now);
      RC_ASSERT(decision.allowed == pair.plain.check(now, hits));
      pair.agree(decision, now);
      continue;
    }
    const Plain before = pair.plain;
    const Decision decision = pair.limiter->check(pair.request(hits, RequestKind::refund), now);
    const std::uint64_t given = pair.plain.give_back(now, hits);
    RC_ASSERT(decision.allowed);
    RC_ASSERT(decision.given_back == given);
    pair.agree(decision, now);
    if (hits == 0) continue;
    for (std::size_t i = 0; i < rules.size(); ++i) {
      PlainCount was = before.counts[i];
      const std::uint64_t units = was.give_back(now, was.cost(hits));
      reached("all of it", units > 0 && units == was.cost(hits));
      reached("less than was asked for", units > 0 && units < was.cost(hits));
      reached("nothing", units == 0);
      reached("of two windows", units > 0 && rules[i].algorithm == Algorithm::sliding_window);
      reached("a bucket", units > 0 && is_bucket(rules[i].algorithm));
      reached("a window that begins with a hit", units > 0 && rules[i].phase == Phase::first_hit);
    }
  }
}

// Several limiters that exchange cells, as replicas do.

class Exchange {
 public:
  Exchange(const Rule& rule, std::size_t nodes) : rule_(rule), cells_(nodes) {
    for (std::size_t i = 0; i < nodes; ++i) {
      LimiterOptions options;
      options.replicated = true;
      options.incarnation = {1, i + 1};
      limiters_.push_back(std::make_unique<Limiter>(rule_set({rule}), options));
    }
  }

  Decision ask(std::size_t node, std::uint64_t hits, RequestKind kind, Nanos now) {
    Request request{"api", entries_, hits};
    request.kind = kind;
    Decision decision = limiters_[node]->check(request, now);
    drain(node);
    return decision;
  }
  std::uint64_t used(std::size_t node, Nanos now) {
    return limiters_[node]->used(0, {"api", entries_, 1}, now);
  }
  /// Some of what `from` has, in any order.
  void tell(std::size_t from, std::size_t to, int percent) {
    for (const auto& [id, cell] : std::map(cells_[from])) {
      if (!*chance(percent)) continue;
      crdt::Cell& held = cells_[to][id];
      held.id = id;
      crdt::join(held, cell);
      limiters_[to]->replica_side().absorb(held);
    }
  }
  void tell_all() {
    for (int round = 0; round < 2; ++round) {
      for (std::size_t from = 0; from < cells_.size(); ++from) {
        for (std::size_t to = 0; to < cells_.size(); ++to) {
          if (from != to) tell(from, to, 100);
        }
      }
    }
  }
  const std::map<crdt::CellId, crdt::Cell>& cells(std::size_t node) const { return cells_[node]; }
  std::size_t size() const { return cells_.size(); }
  /// What the disk has is another's from now on; `lost` of it nobody has.
  void restart(std::size_t node, std::uint64_t incarnation) {
    limiters_[node]->replica_side().rebase(
        {2, incarnation}, [&](const crdt::CellId& id, const crdt::SlotId& slot) {
          const auto cell = cells_[node].find(id);
          return cell == cells_[node].end() ? 0 : cell->second.value_of(slot);
        });
    incarnations_[node] = {2, incarnation};
    drain(node);
  }

 private:
  void drain(std::size_t node) {
    const auto known = incarnations_.find(node);
    const crdt::Incarnation writer =
        known == incarnations_.end() ? crdt::Incarnation{1, node + 1} : known->second;
    std::vector<crdt::OwnCount> counts;
    while (limiters_[node]->replica_side().drain(counts, 100)) {
    }
    for (const crdt::OwnCount& count : counts) {
      crdt::Cell& cell = cells_[node][count.cell];
      cell.id = count.cell;
      const crdt::Slot slot{{writer, count.birth}, count.value};
      crdt::join(cell, {&slot, 1}, count.bucket);
      RC_ASSERT(crdt::valid(cell));
    }
  }

  Rule rule_;
  std::array<Entry, 1> entries_{{{"key", "k"}}};
  std::vector<std::unique_ptr<Limiter>> limiters_;
  std::vector<std::map<crdt::CellId, crdt::Cell>> cells_;
  std::map<std::size_t, crdt::Incarnation> incarnations_;
};

LAW(66,
    "refunds of windows merge: after a full exchange all count what was consumed and not given "
    "back",
    "given back", "more asked for than was consumed here", "after a restart") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = *one_of<std::uint64_t>({10, 1000, kMax / 8});
  rule.window = kHour;
  rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window});
  if (rule.algorithm == Algorithm::fixed_window && *chance(30)) rule.phase = Phase::first_hit;
  Exchange nodes(rule, 3);
  std::vector<std::uint64_t> net(nodes.size(), 0);
  std::uint64_t gone = 0;  // of incarnations that are over
  const Nanos now = kStart;
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    const auto node = *between<std::size_t>(0, nodes.size() - 1);
    const auto hits = *one_of<std::uint64_t>({1, 2, 7});
    switch (*choice(4)) {
      case 0:
        net[node] += nodes.ask(node, hits, RequestKind::check, now).allowed ? hits : 0;
        break;
      case 1: {
        const std::uint64_t given = nodes.ask(node, hits, RequestKind::refund, now).given_back;
        RC_ASSERT(given == std::min(hits, net[node]));
        net[node] -= given;
        reached("given back", given > 0);
        reached("more asked for than was consumed here", given < hits);
        break;
      }
      case 2:
        nodes.tell(node, (node + 1) % nodes.size(), 70);
        break;
      default:
        if (!*chance(20)) break;
        nodes.restart(node, static_cast<std::uint64_t>(step));
        gone += std::exchange(net[node], 0);
        reached("after a restart");
    }
  }
  nodes.tell_all();
  std::uint64_t all = gone;
  for (std::uint64_t units : net) all += units;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    RC_ASSERT(nodes.used(node, now) == all);
    for (const auto& [id, cell] : nodes.cells(node)) {
      for (const crdt::Slot& slot : cell.slots) {
        if (slot.id.birth != crdt::kBackRow) continue;
        RC_ASSERT(slot.value <= cell.value_of({slot.id.writer, 0}));
      }
    }
  }
}

LAW(66,
    "a bucket from which others consume never owes less than what was consumed and not given back",
    "given back", "lost to a checkpoint that knew nothing of it") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = *one_of<std::uint64_t>({10, 1000});
  rule.window = kMinute;
  rule.algorithm = *one_of<Algorithm>({Algorithm::token_bucket, Algorithm::leaky_bucket});
  rule.burst = *one_of<std::uint64_t>({5, 20});
  rule.max_debt = 1000;  // nothing is cut
  Exchange nodes(rule, 2);
  // All that all nodes did, on one exact bucket.
  Uint128 debt = 0;
  const auto unit = static_cast<std::uint64_t>(rule.window);
  Nanos now = kStart;
  std::vector<std::uint64_t> own(nodes.size(), 0);
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    const Nanos pause = *between<Nanos>(0, 3 * kSecond);
    now += pause;
    debt -= std::min(debt, Uint128{rule.limit} * static_cast<std::uint64_t>(pause));
    const auto node = *between<std::size_t>(0, nodes.size() - 1);
    const auto hits = *one_of<std::uint64_t>({1, 2, 7});
    switch (*choice(3)) {
      case 0:
        if (nodes.ask(node, hits, RequestKind::check, now).allowed) {
          debt += Uint128{hits} * unit;
          own[node] += hits;
        }
        break;
      case 1: {
        const std::uint64_t given = nodes.ask(node, hits, RequestKind::refund, now).given_back;
        RC_ASSERT(given <= own[node]);
        own[node] -= given;
        debt -= std::min(debt, Uint128{given} * unit);
        reached("given back", given > 0);
        break;
      }
      default:
        nodes.tell(node, 1 - node, 100);
    }
  }
  nodes.tell_all();
  const auto true_units = static_cast<std::uint64_t>((debt + unit - 1) / unit);
  RC_ASSERT(nodes.used(0, now) >= true_units);
  RC_ASSERT(nodes.used(0, now) == nodes.used(1, now));
  reached("lost to a checkpoint that knew nothing of it", nodes.used(0, now) > true_units + 1);
}

LAW(67, "a window begins with the first hit that finds none open, and ends a window later",
    "a window ended", "denied", "a hit in the nanosecond in which it ends") {
  Rule rule = *rules_named("r").as("rule");
  rule.algorithm = Algorithm::fixed_window;
  rule.calendar.reset();
  rule.slots = 1;
  rule.strict = false;
  rule.burst = 0;
  rule.max_debt = 1;
  rule.cost_by_method.clear();
  rule.default_cost = 1;
  rule.shadow = false;
  rule.phase = Phase::first_hit;
  Pair pair({rule});
  // What Redis does: INCR, and EXPIRE if that made the key.
  std::uint64_t value = 0;
  Nanos expires = 0;
  Nanos now = kStart;
  for (int step = *between(1, 60).as("requests"); step > 0; --step) {
    const bool to_end = expires > now && *chance(20);
    now = to_end ? expires - *between<Nanos>(0, 1) : now + *pauses();
    if (now >= expires) {
      reached("a window ended", value > 0);
      reached("a hit in the nanosecond in which it ends", value > 0 && now == expires);
      value = 0;
    }
    const std::uint64_t hits = *few_hits();
    const Decision decision = pair.limiter->check(pair.request(hits), now);
    const bool allowed = hits <= rule.limit - std::min(rule.limit, value);
    RC_ASSERT(decision.allowed == allowed);
    if (allowed && hits > 0 && value == 0) expires = now + rule.window;
    if (allowed) value += hits;
    const RuleStatus& status = decision.statuses[0];
    RC_ASSERT(status.remaining == rule.limit - value);
    RC_ASSERT(status.reset == (value > 0 ? expires - now : 0));
    reached("denied", !allowed);
    if (!allowed) RC_ASSERT(status.retry_after == (hits > rule.limit ? kNever : expires - now));
    if (pair.replicated && *chance(30)) pair.limiter->replica_side().drain(pair.drained, 100);
    if (*chance(10)) pair.limiter->sweep(now);
  }
}

/// Units by when their window began, as far as any node knows.
std::map<Nanos, std::uint64_t> windows_of(const Exchange& nodes, Nanos length) {
  std::map<crdt::CellId, crdt::Cell> joined;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const auto& [id, cell] : nodes.cells(i)) {
      joined[id].id = id;
      crdt::join(joined[id], cell);
    }
  }
  std::map<Nanos, std::uint64_t> windows;
  for (const auto& [id, cell] : joined) {
    RC_ASSERT(id.epoch.expiry == id.epoch.start + length);
    windows[id.epoch.start] = cell.total();
  }
  return windows;
}

LAW(67,
    "regions that begin windows apart count all that are open, and go on in the one that began "
    "first",
    "two windows", "denied for what others counted") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = *one_of<std::uint64_t>({5, 20});
  rule.window = kMinute;
  rule.phase = Phase::first_hit;
  Exchange nodes(rule, 3);
  std::map<Nanos, std::uint64_t> windows;
  Nanos now = kStart;
  for (int step = *between(1, 40).as("requests"); step > 0; --step) {
    now += *between<Nanos>(0, 20 * kSecond);
    const auto open = windows.upper_bound(now - rule.window);
    std::uint64_t used = 0;
    for (auto window = open; window != windows.end(); ++window) used += window->second;
    reached("two windows", open != windows.end() && std::next(open) != windows.end());
    const auto node = *between<std::size_t>(0, nodes.size() - 1);
    // Alone each begins its own; then all know of all.
    const bool apart = *chance(30);
    if (!apart) {
      nodes.tell_all();
      for (std::size_t i = 0; i < nodes.size(); ++i) RC_ASSERT(nodes.used(i, now) == used);
    }
    const std::uint64_t known = nodes.used(node, now);
    const Decision decision = nodes.ask(node, 1, RequestKind::check, now);
    RC_ASSERT(decision.allowed == (known < rule.limit));
    reached("denied for what others counted", !apart && !decision.allowed);
    std::map<Nanos, std::uint64_t> after = windows_of(nodes, rule.window);
    if (decision.allowed && !apart) {
      ++windows[open == windows.end() ? now : open->first];
      RC_ASSERT(after == windows);
    }
    windows = std::move(after);
  }
}

LAW(68, "a candidate counts the requests that its limit would have denied, and denies none",
    "one that the limit allowed", "one that both deny", "one that the limit alone denies") {
  std::vector<Rule> rules = counting_rules();
  for (Rule& rule : rules) {
    rule.count_denied = false;
    rule.candidate.emplace();
    rule.candidate->limit = *one_of<std::uint64_t>({1, 5, 50, rule.limit / 2, rule.limit, 0});
    if (is_bucket(rule.algorithm)) {
      rule.candidate->burst = *one_of<std::uint64_t>({0, 1, 3, 20});
      // One that is full later than the rule's is forgotten with it.
      rule.candidate->limit = std::max(rule.candidate->limit, rule.limit);
    }
  }
  Pair pair(rules);
  std::vector<std::uint64_t> expected(rules.size(), 0);
  Nanos now = kStart;
  for (int step = *between(1, 60).as("requests"); step > 0; --step) {
    now += *pauses();
    const std::uint64_t hits = *few_hits();
    for (std::size_t i = 0; i < rules.size(); ++i) {
      PlainCount& count = pair.plain.counts[i];
      const std::uint64_t cost = count.cost(hits);
      if (cost == 0) continue;
      const bool fits = count.fits_under(*rules[i].candidate, now, cost);
      expected[i] += !fits;
      reached("one that the limit allowed", !fits && count.fits(now, cost));
      reached("one that both deny", !fits && !count.fits(now, cost));
      reached("one that the limit alone denies", fits && !count.fits(now, cost));
    }
    const Decision decision = pair.limiter->check(pair.request(hits), now);
    RC_ASSERT(decision.allowed == pair.plain.check(now, hits));
    pair.agree(decision, now);
  }
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    RC_ASSERT(pair.limiter->counters(i).candidate_denied == expected[i]);
  }
}

LAW(69, "a cost by entries is the exact sum of weights times values, rounded up once", "rounded up",
    "whole", "an entry that is missing", "no number", "beyond 64 bits") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.limit = kMax;
  const std::vector<std::string> names{"a", "b", "c"};
  std::vector<std::string> values;
  std::vector<Entry> entries;
  Uint128 millionths = 0;
  bool number = true;
  for (const std::string& name : names) {
    const std::uint64_t weight =
        *one_of<std::uint64_t>({0, 1, 250'000, 333'333, 1'000'000, 4'000'000, kMaxWeight});
    rule.cost_by_entry.push_back({name, weight});
    const std::uint64_t value = *counts();
    const bool bad = *chance(5);
    values.push_back(bad ? *one_of<std::string>({"", "-1", "1.5", "01", "x"})
                         : std::to_string(value));
    if (*chance(20)) {
      reached("an entry that is missing");
      continue;
    }
    number &= !bad;
    millionths += static_cast<Uint128>(weight) * value;
    entries.push_back({name, {}});
  }
  for (Entry& entry : entries) entry.value = values[static_cast<std::size_t>(entry.key[0] - 'a')];
  const Request request{"api", entries};
  const Uint128 whole = millionths / 1'000'000 + (millionths % 1'000'000 == 0 ? 0 : 1);
  const auto expected = number ? static_cast<std::uint64_t>(std::min<Uint128>(whole, kMax)) : kMax;
  Limiter limiter(rule_set({rule}), {});
  const Decision decision = limiter.check(request, kStart);
  RC_ASSERT(decision.allowed);
  RC_ASSERT(limiter.used(0, request, kStart) == expected);
  reached("rounded up", number && millionths % 1'000'000 != 0);
  reached("whole", number && millionths > 0 && millionths % 1'000'000 == 0);
  reached("no number", !number);
  reached("beyond 64 bits", number && whole > kMax);
}

}  // namespace
}  // namespace weir::laws
