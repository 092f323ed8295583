#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <weir/crdt/cell.h>
#include <weir/crdt/replica.h>
#include <weir/limits/algorithms/bucket.h>
#include <weir/limits/algorithms/log_window.h>
#include <weir/limits/algorithms/window.h>
#include <weir/limits/rules/rule.h>

/// Inputs of the laws. Pools are small on purpose, so that writers, checkpoints and instants meet;
/// and every range has its ends in it.
namespace weir::laws {

inline constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
/// A whole number of minutes and hours, far from 0 and from kMaxTime.
inline constexpr Nanos kStart = 400'000 * kHour;

template <typename T>
rc::Gen<T> one_of(std::vector<T> values) {
  return rc::gen::elementOf(std::move(values));
}

/// [low, high], both included; shrinks to low.
template <typename T>
rc::Gen<T> between(T low, T high) {
  return rc::gen::map(
      rc::gen::inRange<std::uint64_t>(0, static_cast<std::uint64_t>(high - low) + 1),
      [low](std::uint64_t offset) { return static_cast<T>(low + static_cast<T>(offset)); });
}

/// One of 0 … n-1, each as likely in every case: ranges favour small numbers in the first ones.
inline rc::Gen<int> choice(int n) {
  std::vector<int> all;
  for (int i = 0; i < n; ++i) all.push_back(i);
  return one_of(std::move(all));
}

/// True in about `percent` of cases; shrinks to false.
inline rc::Gen<bool> chance(int percent) {
  // Not scaled with the size of the case, as ranges are.
  return rc::gen::map(rc::gen::resize(rc::kNominalSize, rc::gen::inRange(0, 100)),
                      [percent](int roll) { return roll >= 100 - percent; });
}

/// Units: none, few, many, and up to where sums saturate.
inline rc::Gen<std::uint64_t> counts() {
  return rc::gen::weightedOneOf<std::uint64_t>(
      {{8, between<std::uint64_t>(0, 10)},
       {4, between<std::uint64_t>(0, 1'000'000)},
       {1,
        one_of<std::uint64_t>({kMax, kMax - 1, kMax / 2, kMax / 2 + 1, std::uint64_t{1} << 32})}});
}

inline rc::Gen<std::uint64_t> positive_counts() {
  return rc::gen::map(counts(), [](std::uint64_t n) { return std::max<std::uint64_t>(n, 1); });
}

// Cells.

inline rc::Gen<crdt::Incarnation> writers() {
  return rc::gen::map(between<std::uint64_t>(1, 6), [](std::uint64_t n) {
    return crdt::Incarnation{n % 2, n};
  });
}

inline rc::Gen<crdt::SeriesId> series_ids() {
  return rc::gen::map(between<std::uint64_t>(0, 9), [](std::uint64_t n) {
    return crdt::SeriesId{n << 61, n};  // several shards
  });
}

/// Long-lived windows around kStart.
inline rc::Gen<crdt::Epoch> epochs() {
  return rc::gen::map(between<Nanos>(0, 3), [](Nanos n) {
    return crdt::Epoch{kStart + (n - 3) * kHour, kStart + (n + 2) * kHour};
  });
}

inline rc::Gen<crdt::CellId> window_ids() {
  return rc::gen::construct<crdt::CellId>(series_ids(), epochs());
}
inline rc::Gen<crdt::CellId> bucket_ids() {
  return rc::gen::map(series_ids(), [](crdt::SeriesId id) {
    return crdt::CellId{id, crdt::kBucketEpoch};
  });
}
inline rc::Gen<crdt::CellId> cell_ids() {
  return rc::gen::weightedOneOf<crdt::CellId>({{2, window_ids()}, {1, bucket_ids()}});
}

inline rc::Gen<crdt::SlotId> slot_ids(bool bucket) {
  return rc::gen::construct<crdt::SlotId>(
      writers(), bucket ? between<std::uint64_t>(1, 3) : rc::gen::just<std::uint64_t>(0));
}

inline rc::Gen<crdt::Slots> slots_of(bool bucket) {
  auto few = rc::gen::exec([bucket] {
    crdt::Cell cell;
    int n = *rc::gen::inRange(0, 6);
    for (int i = 0; i < n; ++i) cell.raise(*slot_ids(bucket), *counts());
    return cell.slots;
  });
  auto thousand = rc::gen::map(between<std::uint64_t>(1, 1'000'000), [bucket](std::uint64_t seed) {
    crdt::Cell cell;
    for (std::uint64_t i = 1; i <= 1000; ++i) {
      crdt::SlotId id{{i % 2, i}, bucket ? i : 0};
      cell.raise(id, 1 + (seed * i) % 1013);
    }
    return cell.slots;
  });
  return rc::gen::weightedOneOf<crdt::Slots>({{15, few}, {1, thousand}});
}

/// A checkpoint that counts at most `total`. The pools are small: ties are common.
inline rc::Gen<crdt::BucketState> bucket_states(std::uint64_t total) {
  return rc::gen::exec([total] {
    crdt::BucketState state;
    state.checkpoint.counted = *rc::gen::weightedOneOf<std::uint64_t>(
        {{3, rc::gen::just(total)},
         {2, between<std::uint64_t>(0, std::min<std::uint64_t>(total, 5))},
         {1, rc::gen::just(total / 2)}});
    if (state.checkpoint.counted > 0 || *chance(10)) {
      state.checkpoint.at = kStart - *between<Nanos>(0, 3) * kSecond;
      state.checkpoint.debt =
          static_cast<crdt::DebtTicks>(*between<std::uint64_t>(0, 3)) *
          *one_of<std::uint64_t>({1, static_cast<std::uint64_t>(kSecond), kMax});
    }
    state.touched = std::max(state.checkpoint.at, kStart - *between<Nanos>(0, 3) * kSecond);
    state.expiry = state.touched + *one_of<Nanos>({kSecond, kMinute, 0, crdt::kMaxLifetime});
    return state;
  });
}

/// valid() cells of one id.
inline rc::Gen<crdt::Cell> cells_of(crdt::CellId id) {
  return rc::gen::exec([id] {
    crdt::Cell cell;
    cell.id = id;
    cell.slots = *slots_of(id.is_bucket());
    if (id.is_bucket()) cell.bucket = *bucket_states(cell.total());
    if (!crdt::valid(cell)) cell.bucket.checkpoint = {};  // it claimed a debt of nothing
    return cell;
  });
}

/// A cell of the same id, for a bucket often with a checkpoint that ties with the other's.
inline rc::Gen<crdt::Cell> rivals_of(crdt::Cell cell) {
  return rc::gen::exec([cell] {
    crdt::Cell rival = *cells_of(cell.id);
    const crdt::Checkpoint& theirs = cell.bucket.checkpoint;
    if (!cell.id.is_bucket() || theirs.counted == 0 || *chance(50)) return rival;
    for (const crdt::Slot& slot : cell.slots) rival.raise(slot.id, slot.value);
    rival.bucket.checkpoint = theirs;
    rival.bucket.checkpoint.at -= *choice(2) * kSecond;
    rival.bucket.checkpoint.debt += *one_of<std::uint64_t>({0, 1, 2});
    return rival;
  });
}

inline rc::Gen<crdt::Cell> cells() {
  return rc::gen::mapcat(cell_ids(), cells_of);
}

/// Cells with distinct ids that are alive at kStart, and the names of some of their writers.
inline rc::Gen<crdt::Delta> deltas() {
  return rc::gen::exec([] {
    crdt::Delta delta;
    for (crdt::Cell& cell : *rc::gen::container<std::vector<crdt::Cell>>(cells())) {
      bool known = std::any_of(delta.cells.begin(), delta.cells.end(),
                               [&](const crdt::Cell& other) { return other.id == cell.id; });
      if (known || cell.slots.empty()) continue;
      if (cell.id.is_bucket()) cell.bucket.expiry = std::max(cell.bucket.expiry, kStart + kMinute);
      for (const crdt::Slot& slot : cell.slots) {
        if (slot.id.writer.lo % 3 != 0) {
          delta.members[slot.id.writer] = {"r" + std::to_string(slot.id.writer.hi),
                                           "n" + std::to_string(slot.id.writer.lo)};
        }
      }
      delta.cells.push_back(std::move(cell));
    }
    return delta;
  });
}

// Rules and shapes.

/// From one a month to ten million a second, and beyond.
inline rc::Gen<BucketShape> bucket_shapes() {
  return rc::gen::exec([] {
    BucketShape shape;
    struct Rate {
      std::uint64_t limit;
      Nanos window;
    };
    static const std::vector<Rate> rates{
        {1, 30 * kDay},  {10'000'000, kSecond}, {3, kSecond},
        {100, kMinute},  {7, kMillisecond},     {1, kSecond},
        {1000, kSecond}, {999'983, kHour},      {kMax / 4, kMillisecond}};
    const Rate& rate = rates[static_cast<std::size_t>(*choice(static_cast<int>(rates.size())))];
    shape.rate = rate.limit;
    shape.unit = rate.window;
    shape.burst = *one_of<std::uint64_t>({5, 1, 2, 13, rate.limit});
    // A few of its bursts and the sum of the units saturates.
    if (rate.limit == kMax / 4 && *chance(60)) shape.burst = rate.limit;
    shape.max_debt = *one_of<std::uint32_t>({1, 0, 2});
    // The longest a bucket is kept is kMaxLifetime.
    std::uint64_t longest =
        static_cast<std::uint64_t>(crdt::kMaxLifetime / shape.unit) / (1 + shape.max_debt);
    if (shape.rate < 1000) shape.burst = std::min(shape.burst, longest * shape.rate);
    return shape;
  });
}

/// The time in which a shape's whole burst comes back, at least 1 ns.
inline Nanos refill_time(const BucketShape& shape) {
  auto time = static_cast<Nanos>(shape.ticks(shape.burst) / shape.rate);
  return std::max<Nanos>(time, 1);
}

/// A length of time of a bucket's order: none, one tick of its clock, one unit, the whole burst.
inline rc::Gen<Nanos> bucket_pauses(const BucketShape& shape) {
  Nanos unit = std::max<Nanos>(
      shape.unit / static_cast<Nanos>(std::min<std::uint64_t>(shape.rate, kMax / 2)), 1);
  Nanos full = refill_time(shape);
  return rc::gen::weightedOneOf<Nanos>({{3, between<Nanos>(0, 2 * unit)},
                                        {1, one_of<Nanos>({0, 1, unit, unit - 1})},
                                        {2, between<Nanos>(0, full)},
                                        {1, between<Nanos>(full, 3 * full)}});
}

inline rc::Gen<std::uint64_t> costs(std::uint64_t limit) {
  return rc::gen::weightedOneOf<std::uint64_t>(
      {{6, between<std::uint64_t>(1, 3)},
       {2, between<std::uint64_t>(0, std::min<std::uint64_t>(limit, kMax - 1))},
       {1, one_of<std::uint64_t>({0, limit, add_saturated(limit, 1), kMax})}});
}

inline rc::Gen<WindowShape> window_shapes() {
  return rc::gen::exec([] {
    WindowShape shape;
    shape.sub = *one_of<Nanos>({kSecond, kMinute, 7, 3 * kMillisecond, kHour, 30 * kDay});
    shape.previous = *one_of<std::uint32_t>({0, 1, 2, 6});
    shape.strict = shape.previous > 0 && *chance(40);
    shape.phase = *one_of<Nanos>({0, shape.sub - 1, shape.sub / 3});
    return shape;
  });
}

/// Instants at, just before, just behind and between the edges of the sub-windows around kStart.
inline rc::Gen<Nanos> instants(const WindowShape& shape, std::int64_t windows = 4) {
  return rc::gen::exec([shape, windows] {
    Nanos edge = shape.start(shape.index(kStart) + *between<std::int64_t>(0, windows));
    return edge + *rc::gen::weightedOneOf<Nanos>(
                      {{2, one_of<Nanos>({0, -1, 1})}, {3, between<Nanos>(0, shape.sub - 1)}});
  });
}

/// A rule that RuleSet::make accepts, over the key entry "key".
inline rc::Gen<Rule> rules_named(std::string name) {
  return rc::gen::exec([name] {
    Rule rule;
    rule.domain = "api";
    rule.name = name;
    rule.key = {"key"};
    rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                                         Algorithm::token_bucket, Algorithm::leaky_bucket,
                                         Algorithm::sliding_log});
    rule.window = *one_of<Nanos>({kSecond, kMinute, 6 * kMillisecond, 30 * kDay});
    rule.limit = *one_of<std::uint64_t>({10, 1, 2, 100, 0, 1'000'000, kMax / 8});
    if (rule.algorithm == Algorithm::sliding_window) {
      rule.slots = *one_of<std::uint32_t>({1, 2, 5});
      rule.strict = *chance(40);
    }
    if (rule.algorithm == Algorithm::sliding_log) {
      rule.limit = std::min<std::uint64_t>(rule.limit, rule.window < kSecond ? 20 : kMaxLogLimit);
    }
    if (is_bucket(rule.algorithm)) {
      rule.burst = *one_of<std::uint64_t>({0, 1, 5, 20});
      rule.max_debt = *one_of<std::uint32_t>({1, 0, 3});
      // A bucket must fill within the longest lifetime of a cell.
      std::uint64_t longest =
          static_cast<std::uint64_t>(crdt::kMaxLifetime / rule.window) / (1 + rule.max_debt);
      if (rule.limit < 1000) rule.burst = std::min(rule.burst, longest * rule.limit);
    } else if (*chance(30)) {
      rule.phase = Phase::spread;
    } else if (rule.algorithm == Algorithm::fixed_window && *chance(30)) {
      CalendarUnit unit = *one_of<CalendarUnit>(
          {CalendarUnit::day, CalendarUnit::month, CalendarUnit::week, CalendarUnit::year});
      rule.calendar = CalendarWindow{unit, "Europe/Berlin"};
      rule.window = unit == CalendarUnit::year ? 366 * kDay : 31 * kDay;  // about as long
    }
    rule.default_cost =
        *rc::gen::weightedElement<std::uint64_t>({{8, 1}, {2, 3}, {1, 0}, {1, kMax}});
    if (*chance(20)) rule.cost_by_method["POST"] = 5;
    rule.shadow = *chance(20);
    if (!is_bucket(rule.algorithm)) rule.late = *one_of<Late>({Late::charge, Late::drop});
    return rule;
  });
}

inline std::shared_ptr<const RuleSet> rule_set(std::vector<Rule> rules) {
  std::vector<RuleError> errors;
  auto set = RuleSet::make(std::move(rules), errors);
  if (set == nullptr) RC_FAIL("the generator made a bad rule: " + errors.at(0).to_string());
  return set;
}

}  // namespace weir::laws

// How a counterexample shows.

namespace weir::crdt {

inline void showValue(const Incarnation& id, std::ostream& os) {
  os << '#' << id.hi << '.' << id.lo;
}
inline void showValue(const CellId& id, std::ostream& os) {
  os << "series " << id.series.hi << '.' << id.series.lo;
  if (!id.is_bucket()) os << " [" << id.epoch.start << ", " << id.epoch.expiry << ')';
}
inline void showValue(const Cell& cell, std::ostream& os) {
  os << '{';
  showValue(cell.id, os);
  for (std::size_t i = 0; i < cell.slots.size() && i < 8; ++i) {
    os << ", ";
    showValue(cell.slots[i].id.writer, os);
    os << '/' << cell.slots[i].id.birth << '=' << cell.slots[i].value;
  }
  if (cell.slots.size() > 8) os << ", … " << cell.slots.size() << " slots";
  if (cell.id.is_bucket()) {
    const BucketState& bucket = cell.bucket;
    os << ", counted " << bucket.checkpoint.counted << " at " << bucket.checkpoint.at << " owed "
       << static_cast<std::uint64_t>(bucket.checkpoint.debt >> 64) << ':'
       << static_cast<std::uint64_t>(bucket.checkpoint.debt) << ", touched " << bucket.touched
       << ", expiry " << bucket.expiry;
  }
  os << '}';
}
inline void showValue(const Delta& delta, std::ostream& os) {
  for (const Cell& cell : delta.cells) {
    showValue(cell, os);
    os << '\n';
  }
}

}  // namespace weir::crdt

namespace weir {

inline void showValue(const BucketShape& shape, std::ostream& os) {
  os << shape.rate << " per " << shape.unit << " ns, burst " << shape.burst << ", max_debt "
     << shape.max_debt;
}
inline void showValue(const WindowShape& shape, std::ostream& os) {
  os << "sub " << shape.sub << ", previous " << shape.previous << (shape.strict ? ", strict" : "")
     << ", phase " << shape.phase;
}
inline void showValue(const Rule& rule, std::ostream& os) {
  os << rule.name << ": " << rule.limit << " per " << rule.window << " ns, "
     << to_string(rule.algorithm) << ", burst " << rule.burst << ", slots " << rule.slots
     << (rule.calendar ? ", calendar of " : "")
     << (rule.calendar ? to_string(rule.calendar->unit) : "") << (rule.strict ? ", strict" : "")
     << (rule.phase == Phase::spread ? ", spread" : "") << ", max_debt " << rule.max_debt
     << ", cost " << rule.default_cost << (rule.cost_by_method.empty() ? "" : ", POST 5")
     << (rule.shadow ? ", shadow" : "");
}

}  // namespace weir
