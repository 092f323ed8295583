#include <weir/crdt/cell_arena.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

namespace weir::crdt {
namespace {

// Size classes. Most cells have 24 to 128 bytes, where a step of 8 wastes little; above, steps grow
// with the size, so that a cell that gets slot after slot does not move each time.
constexpr std::size_t kFine = 256;
constexpr std::size_t kMiddle = 1024;

std::byte* taken(std::size_t alignment, std::size_t bytes) {
  auto* base = static_cast<std::byte*>(std::aligned_alloc(alignment, bytes));
  if (base == nullptr) throw std::bad_alloc();
  return base;
}

std::size_t round_up(std::size_t size, std::size_t step) {
  return (size + step - 1) / step * step;
}

}  // namespace

CellArena::CellArena() : bases_(1, nullptr), pages_(1) {}

CellArena::~CellArena() {
  for (std::size_t number = 1; number < pages_.size(); ++number) {
    if (pages_[number].size > 0 && pages_[number].chunk == kNoChunk) std::free(bases_[number]);
  }
  for (const Chunk& chunk : chunks_) std::free(chunk.base);
}

std::size_t CellArena::room_for(std::size_t size) {
  if (size <= kFine) return round_up(size, kUnit);
  if (size <= kMiddle) return round_up(size, 64);
  if (size <= kLargest) return round_up(size, 512);
  return round_up(size, kLargest);
}

std::size_t CellArena::class_of(std::size_t size) {
  if (size <= kFine) return size / kUnit;
  if (size <= kMiddle) return kFine / kUnit + (size - kFine) / 64;
  return kFine / kUnit + (kMiddle - kFine) / 64 + (size - kMiddle) / 512;
}

std::size_t CellArena::room(RecordRef ref) const {
  return pages_[ref >> kUnitBits].size;
}

bool CellArena::full(const Page& page) {
  return page.freed == kNone && page.fresh + page.size / kUnit > kUnits;
}

RecordRef CellArena::allocate(std::size_t size) {
  size = room_for(size);
  if (size > kLargest) return new_page(size, size) << kUnitBits;
  std::uint32_t number = with_room_[class_of(size)];
  if (number == 0) {
    number = new_page(kPageBytes, size);
    link(number);
  }
  Page& page = pages_[number];
  std::uint32_t unit = page.freed;
  if (unit != kNone) {
    std::memcpy(&page.freed, bases_[number] + unit * kUnit, sizeof page.freed);
  } else {
    unit = page.fresh;
    page.fresh = static_cast<std::uint16_t>(page.fresh + size / kUnit);
  }
  ++page.used;
  if (full(page)) unlink(number);
  return number << kUnitBits | unit;
}

void CellArena::free(RecordRef ref) {
  std::uint32_t number = ref >> kUnitBits;
  Page& page = pages_[number];
  if (page.size > kLargest) return drop_page(number);
  if (--page.used == 0) {
    if (!full(page)) unlink(number);
    return drop_page(number);
  }
  if (full(page)) link(number);
  std::memcpy(at(ref), &page.freed, sizeof page.freed);
  page.freed = static_cast<std::uint16_t>(ref & (kUnits - 1));
}

std::uint32_t CellArena::new_page(std::size_t bytes, std::size_t record) {
  if (unused_.empty() && pages_.size() == (std::size_t{1} << (32 - kUnitBits))) {
    throw std::bad_alloc();
  }
  Page page;
  page.size = static_cast<std::uint32_t>(record);
  std::byte* base = record > kLargest ? taken(kUnit, bytes) : take_page(page);
  std::uint32_t number;
  if (unused_.empty()) {
    number = static_cast<std::uint32_t>(pages_.size());
    pages_.emplace_back();
    bases_.push_back(base);
  } else {
    number = unused_.back();
    unused_.pop_back();
    bases_[number] = base;
  }
  pages_[number] = page;
  if (page.chunk == kNoChunk) bytes_ += bytes;
  return number;
}

/// Of the first chunk that has one: so later ones empty, and go.
std::byte* CellArena::take_page(Page& page) {
  if (open_chunks_.empty()) {
    if (bytes_ < kChunkBytes) return taken(kPageBytes, kPageBytes);
    std::byte* base = taken(kChunkBytes, kChunkBytes);
    std::uint32_t number = static_cast<std::uint32_t>(chunks_.size());
    if (unused_chunks_.empty()) {
      chunks_.emplace_back();
    } else {
      number = unused_chunks_.back();
      unused_chunks_.pop_back();
    }
    chunks_[number] = {base, ~std::uint32_t{0}};
    open_chunks_.insert(number);
    bytes_ += kChunkBytes;
  }
  page.chunk = *open_chunks_.begin();
  Chunk& chunk = chunks_[page.chunk];
  auto at = static_cast<std::size_t>(std::countr_zero(chunk.unused));
  chunk.unused &= chunk.unused - 1;
  if (chunk.unused == 0) open_chunks_.erase(open_chunks_.begin());
  return chunk.base + at * kPageBytes;
}

void CellArena::give_page(const Page& page, std::byte* base) {
  Chunk& chunk = chunks_[page.chunk];
  open_chunks_.insert(page.chunk);
  chunk.unused |= 1u << (static_cast<std::size_t>(base - chunk.base) / kPageBytes);
  if (chunk.unused != ~std::uint32_t{0}) return;
  std::free(chunk.base);
  chunk = {};
  open_chunks_.erase(page.chunk);
  unused_chunks_.push_back(page.chunk);
  bytes_ -= kChunkBytes;
}

void CellArena::drop_page(std::uint32_t number) {
  const Page& page = pages_[number];
  if (page.chunk != kNoChunk) {
    give_page(page, bases_[number]);
  } else {
    bytes_ -= page.size > kLargest ? page.size : kPageBytes;
    std::free(bases_[number]);
  }
  bases_[number] = nullptr;
  pages_[number] = {};
  unused_.push_back(number);
}

void CellArena::link(std::uint32_t number) {
  std::uint32_t& first = with_room_[class_of(pages_[number].size)];
  pages_[number].before = 0;
  pages_[number].behind = first;
  if (first != 0) pages_[first].before = number;
  first = number;
}

void CellArena::unlink(std::uint32_t number) {
  const Page& page = pages_[number];
  if (page.before == 0) {
    with_room_[class_of(page.size)] = page.behind;
  } else {
    pages_[page.before].behind = page.behind;
  }
  if (page.behind != 0) pages_[page.behind].before = page.before;
}

}  // namespace weir::crdt
