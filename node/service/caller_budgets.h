#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <weir/crdt/time.h>

namespace weir::node {

/// What one caller may take of what all share: of the requests that wait for the disk or for other
/// members a part, and so many answers a second that take long to make. Shared by all workers;
/// thread-safe. Most requests are answered where they stand and never come here.
///
/// A caller is a number, Engine::caller_of(); 0 is nobody, who has no bound.
class CallerBudgets {
 public:
  /// `most_waiting` requests of one caller wait at once, about: those of one call come whole.
  CallerBudgets(std::size_t most_waiting, std::size_t reports_per_second);
  CallerBudgets(const CallerBudgets&) = delete;
  CallerBudgets& operator=(const CallerBudgets&) = delete;

  /// Requests that wait, until it is destroyed. It may outlive the budgets.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept
        : all_(std::move(other.all_)),
          caller_(other.caller_),
          requests_(std::exchange(other.requests_, 0)) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(all_, other.all_);
      std::swap(caller_, other.caller_);
      std::swap(requests_, other.requests_);
      return *this;
    }
    ~Hold();
    /// One more request of the same caller.
    void add();

   private:
    friend class CallerBudgets;
    struct All;
    Hold(std::shared_ptr<All> all, std::uint64_t caller) : all_(std::move(all)), caller_(caller) {}
    std::shared_ptr<All> all_;  // null: nothing is counted
    std::uint64_t caller_ = 0;
    std::size_t requests_ = 0;
  };
  /// Counts nothing yet.
  Hold hold(std::uint64_t caller);

  /// Some caller has as many waiting as one may. Cheap.
  bool any_full() const;
  /// This one has.
  bool full(std::uint64_t caller) const;

  /// Counts one call for a report (status) of that caller; false if it had as many as there are in
  /// a second, at `wall`.
  bool take_report(std::uint64_t caller, Nanos wall);

  std::size_t most_waiting() const;
  std::size_t reports_per_second() const { return reports_per_second_; }
  /// One request was refused as its caller is full().
  void refused() { refused_.fetch_add(1, std::memory_order_relaxed); }
  std::uint64_t requests_refused() const { return refused_.load(std::memory_order_relaxed); }
  std::uint64_t reports_refused() const { return reports_refused_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<Hold::All> all_;
  const std::size_t reports_per_second_;
  std::atomic<std::uint64_t> refused_{0}, reports_refused_{0};
  std::mutex mutex_;
  // Of one second.
  std::unordered_map<std::uint64_t, std::size_t> reports_;
  Nanos second_ = 0;
};

}  // namespace weir::node
