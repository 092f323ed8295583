#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weir/crdt/epoch.h>
#include <weir/rpc/check.h>

namespace weir::node {

/// What came of asking other members for rights of a window, so that a flood of requests beyond the
/// limit does not become a flood of questions:
///  - of one window no more units are asked for at a time than its limit has;
///  - what nobody could give is not asked for again for 100 ms, and for twice as long each time,
///    up to 2 s; what is used up everywhere, not before the window ends;
///  - at most kMost windows are asked about at a time.
class RightsNegativeCache {
 public:
  static constexpr std::size_t kMost = 4096;

  /// May others be asked? If so, finish with one of those below.
  bool begin(const crdt::CellId& cell, std::uint64_t cost, std::uint64_t limit, Nanos now);
  void passed(const crdt::CellId& cell, std::uint64_t cost);
  /// `used_up`: as far as those know that were asked, nobody has rights.
  void denied(const crdt::CellId& cell, std::uint64_t cost, bool used_up, Nanos now);
  /// Nobody was asked in the end.
  void dropped(const crdt::CellId& cell, std::uint64_t cost) { end(cell, cost); }

  std::size_t size() const { return records_.size(); }

 private:
  struct Record {
    std::uint64_t asking = 0;    // units, of requests that are on their way
    std::uint64_t cost = 0;      // this or more is not asked for
    Nanos until = 0;             // before this
    std::uint64_t gone = kNone;  // and this or more not at all
    unsigned misses = 0;
  };
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  Record* end(const crdt::CellId& cell, std::uint64_t cost);
  bool make_room(Nanos now);

  std::map<crdt::CellId, Record> records_;
  Nanos next_sweep_ = 0;
};

/// Which member was asked to count a request with an id, so that it is asked again if the request
/// comes again; and what it answered if it let the request pass. At most kMost, the oldest go
/// first.
class AskedMembers {
 public:
  static constexpr std::size_t kMost = 16384;
  struct Asked {
    std::size_t member = 0;
    std::vector<std::string> rules;  ///< that it was asked about
    std::optional<Reply> answer;     ///< to the client: the request passed
  };

  explicit AskedMembers(Nanos ttl) : ttl_(ttl) {}
  bool empty() const { return asked_.empty(); }
  void remember(const std::string& id, Asked asked, Nanos now);
  const Asked* find(const std::string& id, Nanos now) const;
  void forget(const std::string& id);

 private:
  struct Kept {
    Asked asked;
    std::uint64_t number = 0;
    Nanos until = 0;
  };
  Nanos ttl_;
  std::map<std::string, Kept> asked_;
  std::deque<std::pair<std::uint64_t, std::string>> order_;  // some are forgotten by now
  std::uint64_t next_ = 0;
};

}  // namespace weir::node
