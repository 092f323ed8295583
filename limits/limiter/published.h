#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace weir {

/// A value that is read all the time and replaced now and then, without a lock for readers. Not
/// installed; the limiter's rules are one.
///
/// Readers come through slots. A slot is one thread's at a time, but for the last, which any number
/// share. A thread's slot names what it read last and keeps that alive until it reads again
/// (hazard pointers, Michael 2004, that are never let go), so reading costs one load of a shared
/// line that hardly ever changes. The last slot counts its readers, in two phases of which only one
/// fills (as sleepable RCU does), so that the other one empties however busy they are.
///
/// use() from any thread; one thread at a time calls the rest.
template <typename T, std::size_t Slots>
class Published {
 public:
  explicit Published(std::unique_ptr<T> first) : current_(first.get()) {
    values_.push_back({std::move(first), 0});
  }
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  /// Keeps a value from going away. A thread holds one at a time of one Published.
  class Use {
   public:
    Use(T* value, std::atomic<std::uint64_t>* readers) : value_(value), readers_(readers) {}
    ~Use() {
      if (readers_ != nullptr) readers_->fetch_sub(1, std::memory_order_release);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    T& operator*() const { return *value_; }
    T* operator->() const { return value_; }

   private:
    T* value_;
    std::atomic<std::uint64_t>* readers_;  // of the last slot
  };

  /// use(), if the slot is a thread's own and keeps the newest value already; else null.
  [[gnu::always_inline]] T* kept(std::size_t slot) const {
    if (slot == Slots - 1) return nullptr;
    T* value = current_.load(std::memory_order_acquire);
    return slots_[slot].reads.load(std::memory_order_relaxed) == value ? value : nullptr;
  }
  Use use(std::size_t slot) {
    if (slot == Slots - 1) return use_shared();
    T* value = current_.load(std::memory_order_acquire);
    if (slots_[slot].reads.load(std::memory_order_relaxed) != value) value = keep(slots_[slot]);
    return {value, nullptr};
  }

  /// The newest value. It may go away with the next replace().
  T& current() const { return *values_.back().value; }

  /// From now on use() gives `fresh`.
  void replace(std::unique_ptr<T> fresh) {
    current_.store(fresh.get(), std::memory_order_seq_cst);
    values_.push_back({std::move(fresh), 0});
  }

  /// Frees the values that were replaced and that nobody reads any more, each after
  /// `let_go(value)`. A thread that reads no more keeps one of them: there are never more than
  /// Slots + 1 once the readers of the last slot have moved on.
  template <typename LetGo>
  void reclaim(LetGo let_go) {
    for (std::size_t phase = 0; phase < 2; ++phase) {
      if (readers_[phase].load(std::memory_order_seq_cst) != 0) continue;
      for (std::size_t i = 0; i + 1 < values_.size(); ++i) values_[i].left |= 1u << phase;
    }
    phase_.store(phase_.load(std::memory_order_relaxed) ^ 1, std::memory_order_relaxed);
    auto end = std::prev(values_.end());
    auto gone = std::stable_partition(values_.begin(), end, [&](const Value& one) {
      return one.left != kBothPhases || is_read(one.value.get());
    });
    for (auto one = gone; one != end; ++one) let_go(*one->value);
    values_.erase(gone, end);
  }

  /// Visits every value that is not freed, the newest last.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Value& one : values_) visit(*one.value);
  }

 private:
  struct Value {
    std::unique_ptr<T> value;
    unsigned left = 0;  // phases of the last slot that were seen empty since it was replaced
  };
  struct alignas(64) Slot {
    std::atomic<T*> reads{nullptr};
  };
  static constexpr unsigned kBothPhases = 3;

  /// Either reclaim() sees the slot, or this sees that the value was replaced.
  T* keep(Slot& slot) {
    for (T* value = current_.load(std::memory_order_seq_cst);;) {
      slot.reads.store(value, std::memory_order_seq_cst);
      T* newest = current_.load(std::memory_order_seq_cst);
      if (newest == value) return value;
      value = newest;
    }
  }
  Use use_shared() {
    std::atomic<std::uint64_t>& readers = readers_[phase_.load(std::memory_order_relaxed)];
    readers.fetch_add(1, std::memory_order_seq_cst);
    return {current_.load(std::memory_order_seq_cst), &readers};
  }
  bool is_read(const T* value) const {
    return std::any_of(slots_.begin(), slots_.end(), [value](const Slot& slot) {
      return slot.reads.load(std::memory_order_seq_cst) == value;
    });
  }

  std::atomic<T*> current_;
  std::vector<Value> values_;  // the newest is the last
  std::array<Slot, Slots - 1> slots_;
  alignas(64) std::atomic<std::size_t> phase_{0};
  std::array<std::atomic<std::uint64_t>, 2> readers_{};
};

}  // namespace weir
