#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

namespace weir::rpc {

/// Bytes on their way out: a buffer that is appended to, in memory that is not cleared first.
/// Works with std::back_inserter, and so with fmt. Not thread-safe. Out of memory throws
/// std::bad_alloc and changes nothing.
class Output {
 public:
  using value_type = char;

  Output() = default;
  Output(Output&& other) noexcept { swap(other); }
  Output& operator=(Output&& other) noexcept {
    Output taken(static_cast<Output&&>(other));
    swap(taken);
    return *this;
  }

  char* data() { return data_.get(); }
  const char* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }
  bool empty() const { return size_ == 0; }
  std::string_view view() const { return {data_.get(), size_}; }

  void append(std::string_view bytes) {
    if (bytes.empty()) return;
    std::memcpy(extend(bytes.size()), bytes.data(), bytes.size());
  }
  void push_back(char byte) { *extend(1) = byte; }
  void append_decimal(std::uint64_t number);

  /// `count` bytes more at the end, for the caller to fill. Valid until the next change.
  char* extend(std::size_t count) {
    if (count > capacity_ - size_) reserve(size_ + count);
    char* at = data_.get() + size_;
    size_ += count;
    return at;
  }
  /// Keeps the first `size` bytes; there are at least that many.
  void truncate(std::size_t size) { size_ = size; }
  /// Removes the first `count` bytes; there are at least that many.
  void drop_front(std::size_t count);
  void clear() { size_ = 0; }
  /// Room for `size` bytes in all. Grows by half at least.
  void reserve(std::size_t size);

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  void swap(Output& other) noexcept {
    data_.swap(other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  std::unique_ptr<char, Free> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

}  // namespace weir::rpc
