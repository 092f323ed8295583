#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>
#include <string_view>

#include <weir/crdt/ids.h>
#include <weir/crdt/time.h>

namespace weir::sim {

/// The history of a run: a running hash of everything that happened, and, if asked for, the lines a
/// person reads. The hash does not depend on whether lines are made.
class Trace {
 public:
  static constexpr int kWorld = -1;

  /// Lines go to `out` (null: nowhere); the newest `tail` of them are kept.
  Trace(std::FILE* out, std::size_t tail) : out_(out), tail_(tail) {}

  /// One event. `text` makes its line and is called only if someone wants it.
  template <typename Text>
  void event(Nanos at, int node, std::string_view what, std::uint64_t a, std::uint64_t b,
             Text text) {
    fold(static_cast<std::uint64_t>(at));
    fold(static_cast<std::uint64_t>(node));
    for (char letter : what) fold(static_cast<unsigned char>(letter));
    fold(a);
    fold(b);
    if (out_ != nullptr || tail_ > 0) line(at, node, what, text());
  }
  void fold(std::uint64_t word) { hash_ = crdt::mix64(hash_, word); }

  std::uint64_t hash() const { return hash_; }
  const std::deque<std::string>& tail() const { return lines_; }

 private:
  void line(Nanos at, int node, std::string_view what, const std::string& text);

  std::FILE* out_;
  std::size_t tail_;
  std::deque<std::string> lines_;
  std::uint64_t hash_ = 1;
};

}  // namespace weir::sim
