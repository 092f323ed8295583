#include <weir/rpc/net/output.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <new>

namespace weir::rpc {

void Output::append_decimal(std::uint64_t number) {
  std::array<char, 20> digits;
  const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  append({digits.data(), static_cast<std::size_t>(end - digits.data())});
}

void Output::drop_front(std::size_t count) {
  if (count == 0) return;
  std::memmove(data_.get(), data_.get() + count, size_ - count);
  size_ -= count;
}

void Output::reserve(std::size_t size) {
  if (size <= capacity_) return;
  const std::size_t wanted = std::max(size, capacity_ + capacity_ / 2);
  void* memory = std::realloc(data_.get(), wanted);
  if (memory == nullptr) throw std::bad_alloc();
  [[maybe_unused]] char* moved = data_.release();
  data_.reset(static_cast<char*>(memory));
  capacity_ = wanted;
}

}  // namespace weir::rpc
