#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include <weir/crdt/epoch.h>

namespace weir {

/// Rights that this node lacks in one window.
struct RightsNeed {
  crdt::SeriesId rule;      ///< names it, alike on all nodes
  std::uint64_t limit = 0;  ///< the rule's
  crdt::CellId cell;
  std::uint64_t units = 0;    ///< about how many
  std::uint32_t attempt = 0;  ///< how often it was asked for before, without an answer that helped
  bool ahead = false;         ///< of a bucket: given only before `cell` begins, best by all at once
};

/// What decisions lack, until somebody asks the other members for it: noted by any thread, taken by
/// one. Each window is asked for at most every 50 ms, ever more seldom while nothing comes of it,
/// and no more once nobody lacks it. Thread-safe. At most kMost at a time: what finds no room is
/// noted again by the next request.
class EscrowNeeds {
 public:
  static constexpr std::size_t kMost = 4096;

  /// With `ahead` it is asked for shortly before the cell begins, and not afterwards.
  void note(const crdt::SeriesId& rule, std::uint64_t limit, const crdt::CellId& cell,
            std::uint64_t units, bool ahead = false);
  /// Rights have come: the next lack is a new one.
  void satisfied(const crdt::CellId& cell);
  /// Those whose turn it is; of the ones noted `ahead`, from `lead` before their cells begin.
  void take_due(Nanos now, Nanos lead, std::vector<RightsNeed>& out);

 private:
  struct Need {
    crdt::SeriesId rule;
    std::uint64_t limit = 0;
    std::uint64_t units = 0;
    bool fresh = true;  // noted since it was last asked for
    bool ahead = false;
    Nanos next = 0;
    std::uint32_t attempt = 0;
  };
  std::mutex mutex_;
  std::map<crdt::CellId, Need> needs_;
};

}  // namespace weir
