#include <weir/crdt/cell_arena.h>

#include <cstring>
#include <new>

namespace weir::crdt {
namespace {

// Size classes. Most cells have 24 to 128 bytes, where a step of 8 wastes little; above, steps grow
// with the size, so that a cell that gets slot after slot does not move each time.
constexpr std::size_t kFine = 256;
constexpr std::size_t kMiddle = 1024;

std::size_t round_up(std::size_t size, std::size_t step) {
  return (size + step - 1) / step * step;
}

}  // namespace

CellArena::CellArena() : bases_(1, nullptr), pages_(1) {}

CellArena::~CellArena() {
  for (std::byte* base : bases_) ::operator delete(base);
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
  auto* base = static_cast<std::byte*>(::operator new(bytes));
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
  pages_[number].size = static_cast<std::uint32_t>(record);
  bytes_ += bytes;
  return number;
}

void CellArena::drop_page(std::uint32_t number) {
  bytes_ -= pages_[number].size > kLargest ? pages_[number].size : kPageBytes;
  ::operator delete(bases_[number]);
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
