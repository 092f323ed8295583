#include <weir/limits/replica_side.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "generators.h"
#include "law.h"

/// Which rules' keys have room in a limiter's table.
namespace weir::laws {
namespace {

Rule rule_of(std::size_t i, const std::string& key) {
  Rule rule;
  rule.domain = "api";
  rule.name = "r" + std::to_string(i);
  rule.key = {key};
  rule.limit = 1'000'000;
  rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                                       Algorithm::token_bucket, Algorithm::sliding_log});
  rule.limit = rule.algorithm == Algorithm::sliding_log ? 1000 : 1'000'000;
  rule.window = *one_of<Nanos>({kHour, kDay});
  rule.on_failure = OnFailure::closed;
  return rule;
}

/// A limiter whose rules have keys of their own, so that a request meets one.
struct Flood {
  std::vector<Rule> rules;
  LimiterOptions options;
  std::unique_ptr<Limiter> limiter;
  Nanos now = kStart;
  std::uint64_t fresh = 0;
  std::uint64_t others = 0;
  bool refused = false;  // some key was

  Flood() {
    const std::size_t count = *between<std::size_t>(2, 4).as("rules");
    options.max_series = *one_of<std::size_t>({8, 20, 100}).as("room");
    options.replicated = *chance(70).as("replicated");
    options.incarnation = {1, 1};
    for (std::size_t i = 0; i < count; ++i) {
      rules.push_back(rule_of(i, "k" + std::to_string(i)));
      if (*chance(30)) rules[i].series = *between<std::uint64_t>(1, options.max_series / count);
      reached("a part that is said", rules[i].series > 0);
    }
    limiter = std::make_unique<Limiter>(rule_set(rules), options);
  }
  SeriesUsage usage(std::size_t rule) const {
    return limiter->series_usage(static_cast<std::uint32_t>(rule));
  }
  /// With a new key; false: it found no room.
  bool ask(std::size_t rule) {
    const std::string value = "v" + std::to_string(fresh++);
    Entry entry{rules[rule].key[0], value};
    Request request{"api", {&entry, 1}, 1};
    const SeriesUsage before = usage(rule);
    Decision decision = limiter->check(request, now);
    if (decision.version == 0) {
      std::vector<crdt::CellId> cells;
      limiter->replica_side().warm(request, now, cells);
      request.warmed = true;
      decision = limiter->check(request, now);
      reached("asked again");
    }
    RC_ASSERT(decision.statuses.size() == 1u);
    const bool no_room = decision.statuses[0].degraded;
    if (no_room) RC_ASSERT(before.series >= before.guaranteed);
    reached("refused", no_room);
    reached("within its part", refused && !no_room && before.series < before.guaranteed);
    refused |= no_room;
    return !no_room;
  }
  /// Of keys that nobody asked for here: of any rule, and in no part.
  void absorb_others(std::uint64_t count) {
    if (!options.replicated) return;
    for (; count > 0; --count) {
      crdt::Cell cell;
      cell.id = {{*rc::gen::arbitrary<std::uint64_t>(), ++others}, {now, now + kDay}};
      cell.raise({{7, 7}, 0}, 5);
      limiter->replica_side().absorb(cell);
    }
    reached("others' keys");
  }
  void sweep() {
    std::vector<crdt::OwnCount> drained;
    limiter->replica_side().drain(drained, 1'000'000);
    limiter->sweep(now - kSecond);
  }
};

LAW(52,
    "a new key of a rule is refused only if the rule has all of its part, and there is room again "
    "once a flood is over",
    "refused", "within its part", "a part that is said", "others' keys", "replicated",
    "not replicated", "room again", "all full", "asked again") {
  Flood flood;
  const std::size_t room = flood.options.max_series;
  reached("replicated", flood.options.replicated);
  reached("not replicated", !flood.options.replicated);
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    const auto which = *between<std::size_t>(0, flood.rules.size() - 1);
    const std::uint64_t many = *between<std::uint64_t>(1, room * 2);
    switch (*choice(6)) {
      case 0:
      case 1:
        for (std::uint64_t i = 0; i < many; ++i) flood.ask(which);
        break;
      case 2:
        flood.ask(which);
        break;
      case 3:
        flood.absorb_others(many);
        break;
      case 4:
        flood.now += *one_of<Nanos>({kSecond, kHour, 3 * kHour});
        break;
      default:
        flood.sweep();
    }
    RC_ASSERT(flood.limiter->series_count() <= room);
    reached("all full", flood.limiter->series_count() == room);
  }
  // Everything is over.
  flood.now += 10 * kDay;
  flood.sweep();
  RC_ASSERT(flood.limiter->series_count() == 0u);
  reached("room again", flood.refused);
  for (std::size_t i = 0; i < flood.rules.size(); ++i) {
    const std::uint64_t part = flood.usage(i).guaranteed;
    for (std::uint64_t k = 0; k < part; ++k) RC_ASSERT(flood.ask(i));
  }
}

/// A limiter with less room than there are keys, and what its replica holds.
struct Kept {
  Rule rule;
  LimiterOptions options;
  std::unique_ptr<Limiter> limiter;
  const Nanos now = kStart + *between<Nanos>(0, kHour);
  std::map<crdt::CellId, crdt::Cell> replica;
  std::map<std::string, std::uint64_t> counted, own;

  Kept() {
    rule.domain = "api";
    rule.name = "r";
    rule.key = {"key"};
    rule.limit = 100;
    rule.algorithm = *one_of<Algorithm>(
        {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket});
    if (rule.algorithm == Algorithm::sliding_window) rule.slots = *one_of<std::uint32_t>({1, 3});
    rule.window = kHour;
    rule.on_failure = OnFailure::closed;
    Rule other = rule;
    other.name = "other";
    other.key = {"other"};
    options.max_series = *one_of<std::size_t>({4, 20}).as("room");
    options.replicated = true;
    options.incarnation = {1, 1};
    limiter = std::make_unique<Limiter>(rule_set({rule, other}), options);
    reached("a bucket", bucket());
    reached("a window", !bucket());
    reached("a ring", rule.slots > 1);
  }
  bool bucket() const { return is_bucket(rule.algorithm); }
  crdt::CellId cell_of(const std::string& text) const {
    Entry entry{"key", text};
    const crdt::SeriesId series = limiter->series_of(0, {"api", {&entry, 1}, 1});
    if (bucket()) return {series, crdt::kBucketEpoch};
    const WindowShape shape = window_shape(limiter->rules()->rules()[0], series);
    return {series, shape.epoch(shape.index(now))};
  }
  bool others_count(const std::string& text, std::uint64_t units) {
    crdt::Cell& cell = replica[cell_of(text)];
    cell.id = cell_of(text);
    counted[text] += units;
    const crdt::SlotId slot{{7, 7}, bucket() ? 1u : 0u};
    cell.raise(slot, cell.value_of(slot) + units);
    if (bucket()) cell.bucket.touched = now;
    if (bucket()) cell.bucket.expiry = now + kDay;
    return limiter->replica_side().absorb(cell);
  }
  void drain() {
    std::vector<crdt::OwnCount> out;
    limiter->replica_side().drain(out, 1'000'000);
    for (const crdt::OwnCount& count : out) {
      crdt::Cell& cell = replica[count.cell];
      cell.id = count.cell;
      const crdt::SlotId slot{options.incarnation, count.birth};
      // Else a join would drop what was counted since.
      RC_ASSERT(count.value > cell.value_of(slot));
      cell.raise(slot, count.value);
      if (bucket()) crdt::join(cell.bucket, count.bucket);
    }
  }
  ReplicaSide::DurableCount held() {
    return [this](const crdt::CellId& id, const crdt::SlotId& slot) -> std::uint64_t {
      auto at = replica.find(id);
      return at == replica.end() ? 0 : at->second.value_of(slot);
    };
  }
  void renew() {
    drain();
    ++options.incarnation.lo;
    limiter->replica_side().rebase(options.incarnation, held());
    reached("a fresh incarnation");
  }
  /// As a driver asks where nothing was decided. False: there was no room to look it up.
  bool look_up(Request& request, const std::string& text, Decision& decision) {
    RC_ASSERT(!decision.allowed && decision.statuses.empty());
    std::vector<crdt::CellId> cells;
    limiter->replica_side().warm(request, now, cells);
    // Until it is here nobody else decides, either.
    RC_ASSERT(limiter->check(request, now).version == 0);
    for (const crdt::CellId& id : cells) {
      Growth growth;
      if (replica.contains(id)) limiter->replica_side().restore(replica[id], growth);
    }
    request.warmed = true;
    decision = limiter->check(request, now);
    RC_ASSERT(decision.version > 0);
    reached("looked up", !cells.empty());
    reached("own counts come back", !cells.empty() && own[text] > 0);
    if (cells.empty()) RC_ASSERT(decision.statuses[0].degraded || request.hits == 0);
    reached("still no room", cells.empty());
    return !cells.empty();
  }
  void ask(const std::string& text) {
    Entry entry{"key", text};
    Request request{"api", {&entry, 1}, *one_of<std::uint64_t>({1, 0, 2, 30})};
    Decision decision = limiter->check(request, now);
    if (decision.version == 0 && !look_up(request, text, decision)) return;
    RC_ASSERT(decision.statuses.size() == 1u);
    if (decision.statuses[0].degraded) {
      RC_ASSERT(!decision.allowed);
      return;
    }
    reached("a peek", request.hits == 0);
    reached("denied", !decision.allowed);
    RC_ASSERT(decision.allowed == (counted[text] + request.hits <= rule.limit));
    if (decision.allowed) counted[text] += request.hits;
    if (decision.allowed) own[text] += request.hits;
    RC_ASSERT(decision.statuses[0].remaining == rule.limit - std::min(rule.limit, counted[text]));
  }
};

LAW(52,
    "what was counted of a key for which there was no room, or whose series was let go, counts "
    "when the key is used, and no own count falls",
    "no room", "looked up", "a bucket", "a window", "a ring", "still no room", "a peek", "let go",
    "own counts come back", "denied", "others count on", "a fresh incarnation") {
  Kept kept;
  const std::size_t keys = kept.options.max_series * 2;
  auto name = [](std::size_t i) { return "k" + std::to_string(i); };
  for (std::size_t i = 0; i < keys; ++i) {
    if (*chance(30)) continue;
    reached("no room", !kept.others_count(name(i), *between<std::uint64_t>(1, 95)));
  }
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    const std::string text = name(*between<std::size_t>(0, keys - 1));
    switch (*choice(8)) {
      case 0:
        kept.drain();
        break;
      case 1:
      case 2:
        if (*chance(50)) kept.drain();
        reached("let go", kept.limiter->replica_side().let_go(100'000, kept.held()) > 0);
        break;
      case 3:
        if (kept.counted[text] > 90) break;
        kept.others_count(text, *between<std::uint64_t>(1, 5));
        reached("others count on");
        break;
      case 4:
        if (*chance(20)) kept.renew();
        break;
      default:
        kept.ask(text);
    }
  }
  // All of it reaches the others.
  kept.drain();
  for (const auto& [text, units] : kept.counted) {
    const auto at = kept.replica.find(kept.cell_of(text));
    RC_ASSERT((at == kept.replica.end() ? 0 : at->second.total()) == units);
  }
}

}  // namespace
}  // namespace weir::laws
