#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace weir {

/// Calls of operator new by this thread, in a program one file of which includes this header. For
/// tests and measurements; not installed.
inline thread_local std::uint64_t allocations = 0;

namespace internal {
inline void* counted(std::size_t size, std::align_val_t align) noexcept {
  ++allocations;
  auto unit = static_cast<std::size_t>(align);
  if (unit <= alignof(std::max_align_t)) return std::malloc(size == 0 ? 1 : size);
  return std::aligned_alloc(unit, (size + unit - 1) / unit * unit);
}
inline void* counted_or_throw(std::size_t size, std::align_val_t align) {
  if (void* memory = counted(size, align)) return memory;
  throw std::bad_alloc();
}
}  // namespace internal
}  // namespace weir

// All forms, or an allocation of one would meet the release of another. Not inlined: the compiler
// would see malloc's memory in delete and warn.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return weir::internal::counted_or_throw(size, std::align_val_t{1});
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t align) {
  return weir::internal::counted_or_throw(size, align);
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return weir::internal::counted(size, std::align_val_t{1});
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t align,
                                     const std::nothrow_t&) noexcept {
  return weir::internal::counted(size, align);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
