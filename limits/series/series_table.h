#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>
#include <weir/limits/series/bucket_records.h>
#include <weir/limits/series/credits.h>
#include <weir/limits/series/series_shares.h>

namespace weir {

struct Series;  // series.h

/// How an entry of the table holds its series.
enum class Form : std::uint8_t {
  unused = 0,  ///< nothing was consumed or learnt yet
  window = 1,  ///< the newest window and the one before, counts below 2^32
  bucket = 2,  ///< a bucket: what it owed at its last touch
  general = 3  ///< anything: a Series beside the table
};

/// Of an entry: what a bucket is.
struct BucketWords {
  std::uint64_t debt;    ///< at SeriesEntry::time, in ticks of the rule (program.h, CompactBucket)
  std::uint32_t number;  ///< the rule by which `debt` is counted
  /// Replicated: units in this node's slot. With kBeside: the number of a BucketRecord.
  std::uint32_t own;
};

/// One series: half a cache line. `head` is the only part that is read without its lock.
struct SeriesEntry {
  /// 51 bits of the series' id, 1 that says that it was used, 4 which thread was the last to
  /// decide, 8 of flags. 0: free. Through std::atomic_ref.
  std::uint64_t head;
  Nanos time;  ///< window: start of the newest; bucket: last touch; general: not over before
  union {
    std::uint32_t count[4];  ///< window: own, others; the same of the window before
    BucketWords bucket;
    std::uint64_t word[2];  ///< all of it
    Series* series;         ///< general
  };

  static constexpr std::uint64_t kLocked = 1;
  static constexpr std::uint64_t kListed = 2;  ///< in a list of what to drain
  static constexpr std::uint64_t kUrgent = 4;  ///< crossed a threshold of its limit
  static constexpr std::uint64_t kDirty =
      8;  ///< the newest window, or the bucket, has undrained units
  static constexpr std::uint64_t kDirtyBefore = 16;  ///< the window before has
  static constexpr std::uint64_t kBeside = 16;       ///< of a bucket: has a BucketRecord
  static constexpr unsigned kFormShift = 5;          ///< two bits
  static constexpr std::uint64_t kErased = 128;   ///< alone: was in use, others may lie behind it
  static constexpr std::uint64_t kCredits = 128;  ///< of one in use: credits are open
  static constexpr unsigned kLastShift = 8;
  static constexpr std::uint64_t kLast = 15 << kLastShift;  ///< the thread that decided last
  static constexpr std::uint64_t kUsed = 1 << 12;  ///< since somebody last looked for idle ones
  static constexpr unsigned kTagShift = 13;

  static std::uint64_t tag_of(std::uint64_t head) { return head >> kTagShift; }
  std::size_t last() const { return (load() & kLast) >> kLastShift; }

  // With its lock held. Flags other than the lock change only then.
  bool has(std::uint64_t flag) const { return (load() & flag) != 0; }
  void set(std::uint64_t flag, bool on = true) { store(on ? load() | flag : load() & ~flag); }
  Form form() const { return static_cast<Form>((load() >> kFormShift) & 3); }
  void set_form(Form form) {
    store((load() & ~(std::uint64_t{3} << kFormShift)) |
          (static_cast<std::uint64_t>(form) << kFormShift));
  }

  std::uint64_t load(std::memory_order order = std::memory_order_relaxed) const {
    return std::atomic_ref<const std::uint64_t>(head).load(order);
  }
  void store(std::uint64_t value, std::memory_order order = std::memory_order_relaxed) {
    std::atomic_ref<std::uint64_t>(head).store(value, order);
  }
  bool exchange(std::uint64_t& expected, std::uint64_t wanted) {
    return std::atomic_ref<std::uint64_t>(head).compare_exchange_weak(
        expected, wanted, std::memory_order_acquire, std::memory_order_relaxed);
  }
};
static_assert(sizeof(SeriesEntry) == 32);

/// Preallocated open addressing: series id -> SeriesEntry. It never grows, moves or rehashes.
///
/// Thread-safe. Entries have a lock each; one who wants several takes them in the order of their
/// addresses. Where entries come and go a segment of kSegment entries is locked; that lock is never
/// asked for with an entry's lock in hand. A probe stays in its segment and, at the loads that the
/// size is made for, mostly in one cache line.
class SeriesTable {
 public:
  static constexpr std::uint32_t kNoRule = ~std::uint32_t{0};
  static constexpr std::size_t kSegment = 1024;

  /// Room for `max_series`. Memory is taken when first touched: 36 bytes an entry and 8 entries for
  /// 5 series; with `keep_ids` 46 bytes an entry and 7 entries for 5 series, and 48 bytes for each
  /// bucket that has a record. With `populate` it is taken at once, but for records. Throws
  /// std::bad_alloc.
  SeriesTable(std::size_t max_series, bool keep_ids, bool populate);
  ~SeriesTable();
  SeriesTable(const SeriesTable&) = delete;
  SeriesTable& operator=(const SeriesTable&) = delete;

  std::size_t size() const { return size_.load(std::memory_order_relaxed); }
  /// Which rules' series may take how much of it.
  SeriesShares& shares() { return shares_; }
  const SeriesShares& shares() const { return shares_; }

  /// Where find() looks first.
  SeriesEntry* first(const crdt::SeriesId& id) const { return &entries_[home(id)]; }
  /// Null if it is not there. Without a lock: it may be gone before lock() says so.
  SeriesEntry* find(const crdt::SeriesId& id) const { return find(id, &entries_[home(id)]); }
  /// `first`: first(id).
  [[gnu::always_inline]] SeriesEntry* find(const crdt::SeriesId& id, SeriesEntry* first) const {
    auto is_it = [wanted = tag(id)](const SeriesEntry& entry) {
      return SeriesEntry::tag_of(entry.load(std::memory_order_acquire)) == wanted;
    };
    if (is_it(first[0])) return first;
    return is_it(first[1]) ? first + 1 : scan(id, nullptr);
  }
  /// False if the entry no longer holds this series.
  bool lock(SeriesEntry& entry, const crdt::SeriesId& id) {
    if (!lock_with_credits(entry, id)) return false;
    close_credits(entry);
    return true;
  }
  /// The same, but credits stay open: their units are consumed, as far as the entry says.
  [[gnu::always_inline]] bool lock_with_credits(SeriesEntry& entry, const crdt::SeriesId& id) {
    std::uint64_t head = entry.load();
    bool free = SeriesEntry::tag_of(head) == tag(id) && (head & SeriesEntry::kLocked) == 0;
    return (free && entry.exchange(head, head | SeriesEntry::kLocked)) || wait_and_lock(entry, id);
  }
  /// find() and lock_with_credits() in one. Null if it is not there.
  [[gnu::always_inline]] SeriesEntry* find_and_lock(const crdt::SeriesId& id, SeriesEntry* first) {
    SeriesEntry* entry = first;
    std::uint64_t head = entry->load();
    // A first place is the first half of its cache line.
    if (SeriesEntry::tag_of(head) != tag(id)) head = (++entry)->load();
    bool free = SeriesEntry::tag_of(head) == tag(id) && (head & SeriesEntry::kLocked) == 0;
    if (free && entry->exchange(head, head | SeriesEntry::kLocked)) [[likely]]
      return entry;
    return look_and_lock(id);
  }
  /// With the lock.
  void close_credits(SeriesEntry& entry) {
    if (entry.has(SeriesEntry::kCredits)) take_back_credits(entry);
  }
  Credit& credit(std::size_t thread, const crdt::SeriesId& id) {
    return credits_.of(thread, tag(id));
  }
  /// With the lock. What is in the entry's credits.
  Credits::Open open_credits(const SeriesEntry& entry) const {
    if (!entry.has(SeriesEntry::kCredits)) return {};
    return credits_.open(place(entry), SeriesEntry::tag_of(entry.load()));
  }
  /// With the lock, once the entry counts `units` as consumed: they are this thread's until then.
  /// The credit must be the series', or empty.
  void open_credit(SeriesEntry& entry, Credit& credit, std::uint32_t units, std::uint64_t per_unit,
                   Nanos until) const {
    credit.until.store(until, std::memory_order_relaxed);
    credit.per_unit.store(per_unit, std::memory_order_relaxed);
    credit.held.store(place(entry) << 32 | units, std::memory_order_release);
    entry.set(SeriesEntry::kCredits);
  }
  bool may_have_credits(const SeriesEntry& entry) const {
    return place(entry) <= Credits::kMaxPlace;
  }
  /// Says that it was used, and by whom.
  static void unlock(SeriesEntry& entry, std::size_t thread) {
    std::uint64_t rest = entry.load() & ~(SeriesEntry::kLocked | SeriesEntry::kLast);
    entry.store(rest | SeriesEntry::kUsed | thread << SeriesEntry::kLastShift,
                std::memory_order_release);
  }
  static void unlock(SeriesEntry& entry) {
    entry.store(entry.load() & ~SeriesEntry::kLocked, std::memory_order_release);
  }

  /// Finds it or makes an entry, not locked: an unused one, or with form, time and words of
  /// `content`. Null if there is no room for one more of this rule; with `anywhere`, if there is
  /// none at all. `made` says whether it is new.
  SeriesEntry* insert(const crdt::SeriesId& id, std::uint32_t rule, bool& made,
                      const SeriesEntry& content = {}, bool anywhere = false);
  /// As much of a series' id as an entry has.
  crdt::SeriesId short_id(const crdt::SeriesId& id) const { return {segment_of(id), tag(id)}; }
  crdt::SeriesId short_id(const SeriesEntry& entry) const {
    return {index(entry) / kSegment, SeriesEntry::tag_of(entry.load())};
  }
  /// Looks at kSegment / 4 entries, other ones each time, and removes those in use for which
  /// `over(entry)`, with its lock, is true. Returns how many. For when there is no room.
  template <typename Over>
  std::size_t make_room(Over over) {
    constexpr std::size_t kLook = kSegment / 4;
    std::size_t at =
        next_look_.fetch_add(kLook, std::memory_order_relaxed) % (segments_count_ * kSegment);
    lock_segment(at / kSegment);
    std::size_t removed = visit(at, kLook, over);
    unlock_segment(at / kSegment);
    return removed;
  }
  /// Removes an entry that is still unused.
  void remove_unused(SeriesEntry& entry, const crdt::SeriesId& id);

  /// Which rule's it is, as insert() was given it. With its lock. A bucket says so itself: what is
  /// beside it is for its birth.
  std::uint32_t rule(const SeriesEntry& entry) const {
    return entry.form() == Form::bucket ? entry.bucket.number : beside(entry);
  }
  /// It turns out to be another rule's. Not of the form `bucket`, whose debt is in its rule's
  /// ticks.
  void set_rule(const SeriesEntry& entry, std::uint32_t rule) {
    std::uint32_t known = beside(entry);
    if (known == rule) return;
    shares_.move(known, rule);
    set_beside(entry, rule);
  }
  /// Of a bucket that has no record, with `keep_ids`: in which second its slot was born.
  std::uint32_t birth(const SeriesEntry& entry) const { return beside(entry); }
  void set_birth(const SeriesEntry& entry, std::uint32_t second) { set_beside(entry, second); }
  /// An entry of the form `bucket` is about to have another one.
  void end_bucket(SeriesEntry& entry) {
    set_beside(entry, entry.bucket.number);
    drop_record(entry);
  }
  /// Only with `keep_ids`. With its lock.
  crdt::SeriesId id(const SeriesEntry& entry) const {
    const Known& known = known_[index(entry)];
    std::uint64_t tag = SeriesEntry::tag_of(entry.load());
    if ((known.low & kNoTag) != 0) tag = 0;
    return {known.high, tag << SeriesEntry::kTagShift | (known.low & (kNoTag - 1))};
  }

  /// With the lock of an entry of the form `bucket` with kBeside.
  BucketRecord& record(const SeriesEntry& entry) const { return records_.at(entry.bucket.own); }
  /// Gives an entry of the form `bucket` a record, or takes its away.
  BucketRecord& put_beside(SeriesEntry& entry) {
    if (!entry.has(SeriesEntry::kBeside)) {
      entry.bucket.own = records_.take();
      entry.set(SeriesEntry::kBeside);
    }
    return record(entry);
  }
  void drop_record(SeriesEntry& entry) {
    if (entry.form() != Form::bucket || !entry.has(SeriesEntry::kBeside)) return;
    records_.give_back(entry.bucket.own);
    entry.set(SeriesEntry::kBeside, false);
  }

  std::size_t index(const SeriesEntry& entry) const {
    return static_cast<std::size_t>(&entry - entries_);
  }
  /// Asks for the memory of an entry and its id. (Inlined always: GCC drops calls of a function
  /// that only prefetches.)
  [[gnu::always_inline]] void prefetch(std::size_t index) const {
    __builtin_prefetch(&entries_[index], 1);
    if (known_ != nullptr) __builtin_prefetch(&known_[index]);
  }
  /// An entry that was in use and may not be any more.
  SeriesEntry& at(std::size_t index) const { return entries_[index]; }
  /// Locks whatever is there; false if it is free.
  bool lock_any(SeriesEntry& entry);

  /// Calls `over(entry)` for every entry in use, with its lock; removes those for which it returns
  /// true. One segment is locked at a time, for some microseconds. Returns how many were removed.
  template <typename Over>
  std::size_t visit_all(Over over) {
    std::size_t segment = 0;
    return visit_some(segment, std::numeric_limits<std::size_t>::max(), over);
  }
  /// The same from `segment` on, for about `most` places: where to go on, or 0 behind the last.
  template <typename Over>
  std::size_t visit_some(std::size_t& segment, std::size_t most, Over over) {
    std::size_t removed = 0;
    for (std::size_t places = 0; segment < segments_count_ && places < most; ++segment) {
      if (segments_[segment].count().load(std::memory_order_relaxed) == 0) {
        ++places;  // a line of memory, as an entry is
        continue;
      }
      places += kSegment;
      lock_segment(segment);
      removed += visit(segment * kSegment, kSegment, over);
      unlock_segment(segment);
    }
    if (segment == segments_count_) segment = 0;
    return removed;
  }

 private:
  /// Of entries of one segment, whose lock is held.
  template <typename Over>
  std::size_t visit(std::size_t first, std::size_t count, Over over) {
    std::size_t removed = 0;
    for (std::size_t i = first; i < first + count; ++i) {
      SeriesEntry& entry = entries_[i];
      if (SeriesEntry::tag_of(entry.load()) == 0 || !lock_any(entry)) continue;
      if (over(entry)) {
        erase(entry);
        ++removed;
      } else {
        unlock(entry);
      }
    }
    return removed;
  }

  struct alignas(64) Segment {  // zero at first
    std::uint32_t lock;
    std::uint32_t used;
    std::atomic_ref<std::uint32_t> locked() { return std::atomic_ref(lock); }
    std::atomic_ref<std::uint32_t> count() { return std::atomic_ref(used); }
  };

  /// With `keep_ids`: what makes an entry's tag the whole id, and rule() or birth().
  struct [[gnu::packed]] Known {
    std::uint64_t high;
    std::uint32_t rest;
    std::uint16_t low;
  };
  static_assert(sizeof(Known) == 14);
  /// Of Known::low: the id has the tag 0, and the entry says 1.
  static constexpr std::uint16_t kNoTag = 1u << SeriesEntry::kTagShift;

  static std::uint64_t tag(const crdt::SeriesId& id) {
    std::uint64_t bits = SeriesEntry::tag_of(id.lo);
    return bits == 0 ? 1 : bits;
  }
  /// The segment from the high bits of one half, the place in it from the low ones, the tag from
  /// the other half: a place says nothing of a tag.
  std::size_t segment_of(const crdt::SeriesId& id) const {
    return static_cast<std::size_t>((static_cast<Uint128>(id.hi) * segments_count_) >> 64);
  }
  std::size_t home(const crdt::SeriesId& id) const {
    return segment_of(id) * kSegment + (id.hi & (kSegment - 2));
  }
  SeriesEntry* scan(const crdt::SeriesId& id, SeriesEntry** free) const;
  std::uint64_t place(const SeriesEntry& entry) const { return index(entry) + 1; }
  std::uint32_t beside(const SeriesEntry& entry) const {
    return known_ != nullptr ? known_[index(entry)].rest : rules_[index(entry)];
  }
  void set_beside(const SeriesEntry& entry, std::uint32_t word) {
    if (known_ != nullptr) {
      known_[index(entry)].rest = word;
    } else {
      rules_[index(entry)] = word;
    }
  }
  void take_back_credits(SeriesEntry& entry);
  bool wait_and_lock(SeriesEntry& entry, const crdt::SeriesId& id) const;
  SeriesEntry* look_and_lock(const crdt::SeriesId& id);
  void lock_segment(std::size_t segment);
  void unlock_segment(std::size_t segment);
  void erase(SeriesEntry& entry);  // both locks held; releases the entry's

  SeriesShares shares_;
  const std::size_t segments_count_;
  Segment* segments_ = nullptr;
  SeriesEntry* entries_ = nullptr;
  std::uint32_t* rules_ = nullptr;  // or
  Known* known_ = nullptr;          // with `keep_ids`
  BucketRecords records_;
  std::atomic<std::size_t> size_{0};
  std::atomic<std::size_t> next_look_{0};
  Credits credits_;
};

}  // namespace weir
