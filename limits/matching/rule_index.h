#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/request.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// Finds the rules that apply to a request without looking at all of them. Not installed; RuleSet
/// has one.
///
/// A rule is a set of conditions: its domain, its matchers, and the presence of its key entries.
/// Each rule's conditions are put in one order, the most selective first, and the rules form a tree
/// over these sequences. From a node, hash tables lead on for exact values, radix trees for
/// prefixes, sorted nested networks for CIDRs, segment trees for ranges of numbers, and lists for
/// presence and absence. Where at most
/// kScanned rules are left, they stand in a list with the conditions that remain to be checked. A
/// request follows every edge that holds for it; every rule stands in one place.
///
/// Some conditions are asked of a view of a value: its path in one spelling, or the value
/// backwards, whose prefixes are its suffixes. A view is an entry as others are, and is made only
/// of entries of which some rule asks for it. A rule with a list of values or networks stands in
/// the tree once for each of them. What no edge can say (what must not hold, patterns, further
/// lists) is checked of the rules that the others lead to.
///
/// How selective a condition is, is guessed from the rules: the values that they name for an entry
/// stand for the values that requests have. A wrong guess costs time only.
///
/// Immutable and thread-safe. No hash needs luck: equal hashes are searched by bisection, so no set
/// of rules makes building or matching quadratic.
class RuleIndex {
 public:
  /// Keeps views of `rules`, which must stay where they are. They need not be valid. Takes time and
  /// memory about linear in their text (100,000 rules: a fraction of a second, some 20 MB).
  explicit RuleIndex(const std::vector<Rule>& rules);

  /// Appends to `out`, in ascending order, the index of each rule whose domain is the request's and
  /// for which Rule::matches is true; of several descriptors only the first counts. Work space is
  /// kept per thread, so nothing is allocated once a thread has matched a request this long and
  /// `out` has room.
  void match(const Request& request, std::vector<std::uint32_t>& out) const;

  /// Bytes held, without the rules.
  std::size_t memory() const;

  /// At most this many rules are tried one by one.
  static constexpr std::size_t kScanned = 8;

 private:
  class Builder;
  class Search;

  /// In this order where two are equally selective.
  enum class Kind : std::uint8_t { exact, cidr, prefix, range, any, absent, other };

  /// From (owner, text) to a number. Sorted by hash, with a directory over the hashes' first bits.
  class TextMap {
   public:
    struct Item {
      std::uint64_t hash = 0;
      const char* text = nullptr;
      std::uint32_t size = 0;
      std::uint32_t owner = 0;
      std::uint32_t target = 0;
      std::string_view view() const { return {text, size}; }
    };
    static std::uint64_t hash_text(std::string_view text);
    void add(std::uint32_t owner, std::string_view text, std::uint32_t target);
    /// After the last add, once.
    void finish();
    /// kNone if it is not there. `text_hash` is hash_text(text).
    std::uint32_t find(std::uint32_t owner, std::string_view text, std::uint64_t text_hash) const;
    std::size_t memory() const;

   private:
    static std::uint64_t mix(std::uint32_t owner, std::uint64_t text_hash);
    std::vector<Item> items_;
    std::vector<std::uint32_t> directory_;
    unsigned shift_ = 63;
  };

  /// A radix tree's node. Its children stand together, and what leads to each in trie_bytes_.
  struct TrieNode {
    const char* text = nullptr;  ///< what follows the byte that leads here
    std::uint32_t size = 0;
    std::uint32_t target = kNone;
    std::uint32_t children = 0;
    std::uint16_t child_count = 0;
  };

  struct Network {
    std::uint32_t outer = kNone;  ///< the smallest one around it, in networks_
    std::uint32_t target = kNone;
    Uint128 mask = 0;
  };

  /// A condition that remains to be checked.
  struct Check {
    const char* text = nullptr;
    /// Of the text; for a CIDR, an index into checked_networks_; for a range, into checked_ranges_;
    /// for `other`, into others_.
    std::uint32_t size = 0;
    std::uint32_t key = 0;
    Kind kind = Kind::any;
    std::string_view view() const { return {text, size}; }
  };
  struct CheckedNetwork {
    Uint128 start = 0;
    Uint128 mask = 0;
  };

  /// Numbers from `low` to `high`.
  struct CheckedRange {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
  };

  struct Candidate {
    std::uint32_t rule = 0;
    std::uint32_t checks = 0;  ///< the first
    std::uint32_t check_count = 0;
  };

  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  /// A segment tree over the parts into which bounds cut all numbers. A node has the edges of the
  /// ranges that hold all of its parts and not all of its parent's, so that those which hold a
  /// number are the ones on the way from its part to the root.
  struct RangeTree {
    Range bounds;              ///< in range_bounds_: where a part begins, but for the first
    std::uint32_t leaves = 0;  ///< a power of two, more than there are bounds
    std::uint32_t nodes = 0;   ///< the first in range_nodes_; node 1 is the root
  };

  /// The edges that one entry, if it is there, opens.
  struct Table {
    std::uint32_t key = 0;
    std::uint32_t any = kNone;
    std::uint32_t trie = kNone;
    std::uint32_t ranges = kNone;  ///< in range_trees_
    Range networks;                ///< in networks_ and network_starts_
    bool exact = false;            ///< exact_ has edges under this table's index
  };
  struct Absence {
    std::uint32_t key = 0;
    std::uint32_t target = kNone;
  };

  struct Node {
    Range certain;     ///< in certain_: rules of which nothing remains to be checked
    Range candidates;  ///< in candidates_
    Range tables;      ///< in tables_, by key
    Range absences;    ///< in absences_
  };

  /// What may be made of a value.
  enum View : std::uint8_t { path, folded_path, reversed };
  /// By View; 0: nobody asks for it.
  using Views = std::array<std::uint32_t, 3>;

  static void make_view(View view, std::string_view value, std::string& out);

  static constexpr std::uint32_t kNone = 0xFFFF'FFFF;
  /// The domain is an entry as others are, with this key and always there.
  static constexpr std::uint32_t kDomain = 0;

  std::size_t rule_count_;
  std::uint32_t key_count_ = 1;
  TextMap keys_;             // the entry keys that rules name
  TextMap exact_;            // by table and value
  std::vector<Node> nodes_;  // the first is the root
  std::vector<std::uint32_t> certain_;
  std::vector<Candidate> candidates_;
  std::vector<Check> checks_;
  std::vector<CheckedNetwork> checked_networks_;
  std::vector<CheckedRange> checked_ranges_;
  std::vector<RangeTree> range_trees_;
  std::vector<std::uint64_t> range_bounds_;
  std::vector<Range> range_nodes_;            // in range_targets_
  std::vector<std::uint32_t> range_targets_;  // nodes that edges lead to
  std::vector<const Match*> others_;          // of the rules
  std::vector<Views> views_;                  // by the number of a key, or none
  std::deque<std::string> texts_;             // that are in no rule
  std::vector<Table> tables_;
  std::vector<Absence> absences_;
  std::vector<TrieNode> trie_;
  std::vector<char> trie_bytes_;
  std::vector<Network> networks_;  // of each table by start, outer before inner
  std::vector<Uint128> network_starts_;
};

}  // namespace weir
