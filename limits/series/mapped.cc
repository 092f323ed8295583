#include <weir/limits/series/mapped.h>

#include <sys/mman.h>

#include <new>

namespace weir::internal {
namespace {

constexpr std::size_t kPage = 4096;

/// Takes the memory from the system now. Where the system cannot do so at once, page by page.
void touch(void* memory, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (::madvise(memory, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
  auto* at = static_cast<volatile char*>(memory);
  for (std::size_t i = 0; i < bytes; i += kPage) at[i] = 0;
}

}  // namespace

void* map_zeros(std::size_t bytes, Pages pages, bool populate) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  if (pages == Pages::huge) ::madvise(memory, bytes, MADV_HUGEPAGE);
  if (populate) touch(memory, bytes);
  return memory;
}

void unmap_zeros(void* memory, std::size_t bytes) {
  if (memory != nullptr) ::munmap(memory, bytes);
}

}  // namespace weir::internal
