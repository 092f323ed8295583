#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/rpc/check.h>

namespace weir {

struct LeaseOptions {
  bool enabled = false;
  unsigned hot = 3;         ///< requests of one key within a term after which it takes leases
  std::uint64_t first = 8;  ///< hits of a key's first block, in requests like the one that asks
  std::uint64_t most = 1u << 14;  ///< hits of any block
  Nanos term = kSecond;           ///< of a block; a node may grant less, never more
  /// So long before a block's end what is left of it goes back (at most half of the term).
  Nanos return_ahead = 200 * kMillisecond;
  /// For so long at most a denial answers further requests of its key: others may return units.
  Nanos denied_for = 100 * kMillisecond;
  /// Keys known at once, about 400 bytes each. Beyond, the one that was quiet for longest goes, and
  /// its block goes back.
  std::size_t max_keys = 16384;
};

/// A client's leases: blocks of hits that a node holds for it (limits/lease.h), spent here without
/// a call. Decides what is asked for, spent and returned; does no I/O and reads no clock, `now` is
/// any clock of the client's own that does not run backwards. Not thread-safe.
///
/// A block is sized to its key's demand: the next one is twice as large when it ran out in less
/// than half of its term, and smaller when less than half of it was used.
///
/// Of each block at most what was granted is spent, and only before its end; once it is in a
/// Return, nothing more is spent of it. So what the node is told was used is what was.
class LeaseBook {
 public:
  explicit LeaseBook(LeaseOptions options) : options_(options) {}

  enum class Way : std::uint8_t {
    spent,   ///< from a block: it passes
    denied,  ///< as the node said lately: it does not
    lease,   ///< ask a node for it and for a block of at most Answer::most: then granted() or
             ///< refused()
    wait,    ///< a block is being asked for: take() again when that is over
    call,    ///< ask a node for it alone
  };
  struct Answer {
    Way way = Way::call;
    std::uint64_t most = 0;
    /// spent, denied: what the node said when it granted the block or denied, so long ago.
    std::shared_ptr<const Reply> reply;
    Nanos age = 0;
  };
  /// One request of `hits` (at least 1) for `key`.
  Answer take(std::string_view key, std::uint64_t hits, Nanos now);

  struct Grant {
    std::size_t node = 0;  ///< whose ticket it is
    std::string ticket;
    std::uint64_t hits = 0;  ///< those of the request that asked included
    Nanos term = 0;
    std::shared_ptr<const Reply> reply;
  };
  /// The answer to Way::lease: the block is this key's, less the `hits` of the request that asked.
  /// `sent` is when that was sent.
  void granted(std::string_view key, std::uint64_t hits, Grant grant, Nanos sent, Nanos now);
  /// The other answer: there is no block. `leasable` false: the key cannot be leased (or the node
  /// does not answer); it is not asked for again within a term.
  void refused(std::string_view key, bool leasable, Nanos now);
  /// A node denied `hits` of the key, whoever asked. `retry_after` as it said; kNever too.
  void denied(std::string_view key, std::uint64_t hits, std::shared_ptr<const Reply> reply,
              Nanos retry_after, Nanos now);

  /// What goes back: to be settled at `node` with `used`.
  struct Return {
    std::size_t node = 0;
    std::string ticket;
    std::uint64_t used = 0;
    unsigned attempts = 0;
  };
  /// Blocks that ran out, whose time is nearly over, or whose key went. Each once.
  std::vector<Return> take_returns(Nanos now);
  /// A block that nobody waited for any more: it goes back with what its request used.
  void give_back(Return returned) { keep_return(std::move(returned)); }
  /// It is not known to be settled: once more, three times in all. (Then the node charges it in
  /// full.)
  void try_again(Return returned);
  /// Closes every block, for instance before the client goes.
  void close_all(Nanos now);

  std::size_t keys() const { return entries_.size(); }
  std::size_t blocks() const { return by_end_.size(); }

 private:
  struct Block {
    Grant grant;
    std::uint64_t used = 0;
    Nanos taken = 0;
    Nanos close = 0;  // nothing is spent from here on
  };
  struct KeyState {
    std::string key;
    std::uint64_t next = 0;  // hits of the next block; 0: none yet
    unsigned recent = 0;     // requests since
    Nanos since = 0;
    bool asking = false;
    Nanos not_before = 0;  // no block is asked for
    std::optional<Block> block;
    std::shared_ptr<const Reply> reply;  // the denial
    std::uint64_t denied_hits = 0;
    Nanos denied_at = 0;
    Nanos denied_until = 0;
  };
  using Entries = std::list<KeyState>;  // the one used last comes first

  KeyState* find(std::string_view key);
  KeyState* find_or_make(std::string_view key, Nanos now);
  void close(KeyState& entry, bool ran_out, Nanos now);
  void keep_return(Return returned);

  const LeaseOptions options_;
  Entries entries_;
  std::unordered_map<std::string_view, Entries::iterator> by_key_;
  std::multimap<Nanos, KeyState*> by_end_;  // open blocks
  std::deque<Return> returns_;
};

}  // namespace weir
