#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <weir/limits/algorithms/window.h>
#include <weir/limits/decision.h>
#include <weir/limits/limiter/asked_rules.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/small_series.h>
#include <weir/limits/series/series_table.h>

namespace weir {

/// What becomes of a cost that is allowed. `no_ticket`: it should be held, and too many are.
enum class Mode : std::uint8_t { consume, hold, no_ticket };

/// One matching rule of a request under evaluation, and what comes of it. What has no initial value
/// is set by prepare(), the window only for rules that have one.
struct Item {
  const CompiledRule* compiled = nullptr;
  Mode mode = Mode::consume;
  bool made = false;            // the entry, by this request
  bool no_room = false;         // none could be made
  bool compact = false;         // evaluated by its small bucket: `owed` is what it owes
  bool waits = false;           // what it consumed is ahead of what is durable
  bool degraded = false;        // on_failure says the verdict
  bool demand_counted = false;  // Request::demand_counted
  std::uint16_t descriptor = 0;
  SeriesEntry* entry = nullptr;
  SeriesEntry* first = nullptr;  // where it is looked for first
  Credit* credit = nullptr;      // where this thread has one, if it has
  SeriesId id;
  std::uint64_t cost = 0;
  Owed owed;
  WindowAt window;
  Verdict verdict;
  std::uint64_t beyond = 0;  // units that count though they may not pass; of the general way alone

  void reset() {
    mode = Mode::consume;
    made = no_room = compact = waits = degraded = false;
    descriptor = 0;
    entry = nullptr;
  }
};

/// The items of one request. Grows and is used again: setting up an Item costs more than most of
/// what is done with it.
class Items {
 public:
  void clear() {
    size_ = 0;
    sources_.clear();
    if (special_) [[unlikely]] {
      special_ = false;
      exempt_.clear();
      asked_.clear();
    }
  }
  /// A rule that an item goes by, for as long as it is here.
  void keep(AskedRulePtr asked) {
    special_ = true;
    asked_.push_back(std::move(asked));
  }
  /// This rule exempts the request: where there are no items, it is not unmet.
  void note_exempt(std::uint32_t rule) {
    special_ = true;
    exempt_.push_back(rule);
  }
  bool exempt() const { return special_ && !exempt_.empty(); }
  std::span<const std::uint32_t> exempt_by() const { return exempt_; }
  bool warmed = false;  ///< Request::warmed
  RequestKind kind = RequestKind::check;
  std::size_t size() const { return size_; }
  Item& next() {
    if (size_ == made_) {
      items_.emplace_back();
      ++made_;
    }
    Item& item = items_[size_++];
    item.reset();
    return item;
  }
  std::span<Item> all() { return {items_.data(), size_}; }

  /// Of several descriptors: one item decides for all that have its series, on the sum of their
  /// costs, and the others go.
  void join_series();
  bool joined() const { return !sources_.empty(); }
  /// The item that a status of the whole answer is about.
  const Item& item_of(std::size_t status) const {
    return items_[joined() ? sources_[status].item : status];
  }
  /// From a status for each item to one for each rule of each descriptor.
  void split_joined(Decision& out) const;
  /// An earlier status of the whole answer is about the same item.
  bool repeats(std::size_t status) const { return sources_[status].again; }

 private:
  /// Where a status of the whole answer comes from.
  struct Source {
    std::uint32_t item = 0;
    std::uint16_t descriptor = 0;
    bool again = false;
  };
  bool special_ = false;  // something of what follows is not as it is at first
  std::vector<std::uint32_t> exempt_;
  std::vector<AskedRulePtr> asked_;
  std::vector<Source> sources_;  // by status; empty: each status is of the item in its place
  std::vector<std::uint32_t> order_;
  std::vector<Item> items_;
  std::size_t made_ = 0;  // items_.size(), which divides
  std::size_t size_ = 0;
};

}  // namespace weir
