#include <weir/limits/series/series_table.h>

#include <algorithm>
#include <thread>

#include <weir/limits/series/mapped.h>
#include <weir/limits/series/series.h>

namespace weir {
namespace {

constexpr std::size_t kHugeFrom = 64u << 20;
constexpr int kSpins = 64;

template <typename T>
T* reserve(std::size_t count, bool populate) {
  std::size_t bytes = count * sizeof(T);
  // Random places of a large table miss the TLB at every step otherwise.
  internal::Pages pages = bytes >= kHugeFrom ? internal::Pages::huge : internal::Pages::plain;
  return static_cast<T*>(internal::map_zeros(bytes, pages, populate));
}

template <typename T>
void release(T* memory, std::size_t count) {
  internal::unmap_zeros(memory, count * sizeof(T));
}

/// Where ids are kept a place takes more memory, and a node more time for a series than to find it.
std::size_t places_for(std::size_t max_series, bool keep_ids) {
  return max_series + max_series * (keep_ids ? 2 : 3) / 5;
}

void pause(int& spins) {
  if (++spins < kSpins) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  spins = 0;
  std::this_thread::yield();  // the holder may not be running
}

}  // namespace

SeriesTable::SeriesTable(std::size_t max_series, bool keep_ids, bool populate)
    : shares_(max_series),
      segments_count_(places_for(max_series, keep_ids) / kSegment + 1),
      // Only what is replicated has records.
      records_(keep_ids ? max_series : 0) {
  std::size_t count = segments_count_ * kSegment;
  try {
    segments_ = reserve<Segment>(segments_count_, populate);
    entries_ = reserve<SeriesEntry>(count, populate);
    if (keep_ids) {
      known_ = reserve<Known>(count, populate);
    } else {
      rules_ = reserve<std::uint32_t>(count, populate);
    }
  } catch (...) {
    release(segments_, segments_count_);
    release(entries_, count);
    throw;
  }
}

SeriesTable::~SeriesTable() {
  visit_all([](SeriesEntry&) { return true; });
  std::size_t count = segments_count_ * kSegment;
  release(segments_, segments_count_);
  release(entries_, count);
  release(rules_, count);
  release(known_, count);
}

SeriesEntry* SeriesTable::scan(const crdt::SeriesId& id, SeriesEntry** free) const {
  std::uint64_t wanted = tag(id);
  SeriesEntry* first = entries_ + segment_of(id) * kSegment;
  std::size_t at = id.hi & (kSegment - 2);
  for (std::size_t i = 0; i < kSegment; ++i) {
    SeriesEntry& entry = first[(at + i) & (kSegment - 1)];
    std::uint64_t head = entry.load(std::memory_order_acquire);
    if (SeriesEntry::tag_of(head) == wanted) return &entry;
    if (SeriesEntry::tag_of(head) != 0) continue;
    if (free != nullptr && *free == nullptr) *free = &entry;
    if (head == 0) return nullptr;
  }
  return nullptr;
}

SeriesEntry* SeriesTable::look_and_lock(const crdt::SeriesId& id) {
  SeriesEntry* entry = find(id);
  return entry != nullptr && lock_with_credits(*entry, id) ? entry : nullptr;
}

bool SeriesTable::wait_and_lock(SeriesEntry& entry, const crdt::SeriesId& id) const {
  std::uint64_t wanted = tag(id);
  int spins = 0;
  for (;;) {
    std::uint64_t head = entry.load();
    if (SeriesEntry::tag_of(head) != wanted) return false;
    if ((head & SeriesEntry::kLocked) != 0) {
      pause(spins);
    } else if (entry.exchange(head, head | SeriesEntry::kLocked)) {
      return true;
    }
  }
}

bool SeriesTable::lock_any(SeriesEntry& entry) {
  int spins = 0;
  for (;;) {
    std::uint64_t head = entry.load();
    if (SeriesEntry::tag_of(head) == 0) return false;
    if ((head & SeriesEntry::kLocked) != 0) {
      pause(spins);
    } else if (entry.exchange(head, head | SeriesEntry::kLocked)) {
      close_credits(entry);
      return true;
    }
  }
}

void SeriesTable::take_back_credits(SeriesEntry& entry) {
  std::uint64_t units = credits_.take_back(place(entry), SeriesEntry::tag_of(entry.load()));
  if (entry.form() == Form::window) {
    entry.count[0] -= static_cast<std::uint32_t>(units);
  } else {
    entry.bucket.debt -= units;
  }
  entry.set(SeriesEntry::kCredits, false);
}

SeriesEntry* SeriesTable::insert(const crdt::SeriesId& id, std::uint32_t rule, bool& made,
                                 const SeriesEntry& content, bool anywhere) {
  made = false;
  std::size_t segment = segment_of(id);
  lock_segment(segment);
  SeriesEntry* free = nullptr;
  SeriesEntry* entry = scan(id, &free);
  if (entry == nullptr && free != nullptr && shares_.take(rule, anywhere)) {
    entry = free;
    made = true;
    size_.fetch_add(1, std::memory_order_relaxed);
    entry->time = content.time;
    entry->word[0] = content.word[0];
    entry->word[1] = content.word[1];
    set_beside(*entry, rule);
    if (known_ != nullptr) {
      Known& known = known_[index(*entry)];
      known.high = id.hi;
      known.low = static_cast<std::uint16_t>(id.lo & (kNoTag - 1));
      if (SeriesEntry::tag_of(id.lo) == 0) known.low |= kNoTag;
    }
    segments_[segment].count().fetch_add(1, std::memory_order_relaxed);
    entry->store(tag(id) << SeriesEntry::kTagShift | content.head | SeriesEntry::kUsed,
                 std::memory_order_release);
  }
  unlock_segment(segment);
  return entry;
}

void SeriesTable::remove_unused(SeriesEntry& entry, const crdt::SeriesId& id) {
  std::size_t segment = segment_of(id);
  lock_segment(segment);
  if (lock(entry, id)) {
    if (entry.form() == Form::unused) {
      erase(entry);
    } else {
      unlock(entry);
    }
  }
  unlock_segment(segment);
}

void SeriesTable::erase(SeriesEntry& entry) {
  const std::uint32_t number = rule(entry);
  if (entry.form() == Form::general) delete entry.series;
  drop_record(entry);
  std::size_t place = index(entry);
  std::size_t segment = place / kSegment;
  SeriesEntry* first = entries_ + segment * kSegment;
  std::size_t at = place % kSegment;
  bool last = first[(at + 1) % kSegment].load() == 0;
  entry.store(last ? 0 : SeriesEntry::kErased, std::memory_order_release);
  // What was kept for those behind it is free too.
  while (last) {
    at = (at + kSegment - 1) % kSegment;
    if (first[at].load() != SeriesEntry::kErased) break;
    first[at].store(0, std::memory_order_release);
  }
  segments_[segment].count().fetch_sub(1, std::memory_order_relaxed);
  shares_.give_back(number);
  size_.fetch_sub(1, std::memory_order_relaxed);
}

void SeriesTable::lock_segment(std::size_t segment) {
  int spins = 0;
  std::uint32_t open = 0;
  while (!segments_[segment].locked().compare_exchange_weak(open, 1, std::memory_order_acquire)) {
    open = 0;
    pause(spins);
  }
}

void SeriesTable::unlock_segment(std::size_t segment) {
  segments_[segment].locked().store(0, std::memory_order_release);
}

}  // namespace weir
