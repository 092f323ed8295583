#include <weir/limits/series/series_table.h>

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <thread>

#include <weir/limits/series/series.h>

namespace weir {
namespace {

constexpr std::size_t kHugeFrom = 64u << 20;
constexpr std::size_t kPage = 4096;
constexpr int kSpins = 64;

/// Takes the memory from the system now. Where the system cannot do so at once, page by page.
void touch(void* memory, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(memory, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
  auto* at = static_cast<volatile char*>(memory);
  for (std::size_t i = 0; i < bytes; i += kPage) at[i] = 0;
}

/// Zeros, taken from the system page by page as they are touched unless `populate`.
template <typename T>
T* reserve(std::size_t count, bool populate) {
  std::size_t bytes = count * sizeof(T);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // Random places of a large table miss the TLB at every step otherwise.
  if (bytes >= kHugeFrom) ::madvise(memory, bytes, MADV_HUGEPAGE);
  if (populate) touch(memory, bytes);
  return static_cast<T*>(memory);
}

template <typename T>
void release(T* memory, std::size_t count) {
  if (memory != nullptr) ::munmap(static_cast<void*>(memory), count * sizeof(T));
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
    : shares_(max_series), segments_count_((max_series + max_series * 3 / 5) / kSegment + 1) {
  std::size_t count = segments_count_ * kSegment;
  try {
    segments_ = reserve<Segment>(segments_count_, populate);
    entries_ = reserve<SeriesEntry>(count, populate);
    rules_ = reserve<std::uint32_t>(count, populate);
    if (keep_ids) ids_ = reserve<crdt::SeriesId>(count, populate);
  } catch (...) {
    release(segments_, segments_count_);
    release(entries_, count);
    release(rules_, count);
    throw;
  }
}

SeriesTable::~SeriesTable() {
  visit_all([](SeriesEntry&) { return true; });
  std::size_t count = segments_count_ * kSegment;
  release(segments_, segments_count_);
  release(entries_, count);
  release(rules_, count);
  release(ids_, count);
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
    entry.word[0] -= units;
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
    rules_[index(*entry)] = rule;
    if (ids_ != nullptr) ids_[index(*entry)] = id;
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
  if (entry.form() == Form::general) delete entry.series;
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
  shares_.give_back(rules_[place]);
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
