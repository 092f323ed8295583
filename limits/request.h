#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <weir/crdt/time.h>
#include <weir/limits/matching/text.h>

namespace weir {

/// One key/value pair that a request carries: api_key=…, ip=…, path=….
struct Entry {
  std::string_view key;
  std::string_view value;
};

/// One thing that a request asks for: entries, and how many units.
struct Descriptor {
  std::span<const Entry> entries;  ///< if a key occurs twice, the first one counts
  std::uint64_t hits = 1;          ///< as Request::hits
};

/// Descriptors of one request at most, the first included. Whoever takes requests from outside
/// refuses more. A limiter does not look: it decides on up to 65,536, in time and memory that grow
/// with them.
inline constexpr std::size_t kMaxDescriptors = 16;

/// What a request is about. Values are those of the wire.
enum class RequestKind : std::uint8_t {
  check = 0,  ///< may it pass? If so, it consumes
  /// It has passed: what it used is counted whatever the limits say, and it is told as allowed. Of
  /// no rule it counts more units than the limit (a bucket's burst), and nothing beyond what
  /// docs/rules.md says of its algorithm and enforcement.
  report = 1,
  /// Hits that were consumed here are given back, as far as this node counted them and they still
  /// count: docs/rules.md. It is told as allowed, and Decision::given_back says how many.
  refund = 2,
};

/// Limits that a request brings for the rules that take them (Rule::limit_from_request). What is 0
/// is not brought, and the rule's maximum stands for it; what is beyond the maximum is cut to it.
struct RequestLimit {
  std::uint64_t limit = 0;  ///< units per window
  Nanos window = 0;         ///< below 1 ms it is taken for 1 ms
  std::uint64_t burst = 0;  ///< units, of buckets; 0: as the limit
  bool any() const { return limit != 0 || window != 0 || burst != 0; }
  friend bool operator==(const RequestLimit&, const RequestLimit&) = default;
};

/// "May this request pass?" Views only: everything must outlive the call.
struct Request {
  std::string_view domain;
  /// The descriptor, the first one if there are several. If a key occurs twice, the first one
  /// counts.
  std::span<const Entry> descriptor;
  /// How many units the request asks for, multiplied by each rule's cost. 0 peeks: it reports the
  /// state of each rule and consumes nothing.
  std::uint64_t hits = 1;
  /// Names this request, within its domain; empty: it has no name. The same name again is the same
  /// request again (Limiter::check), whatever else it says.
  std::string_view id = {};
  /// The answer should tell by how much each rule may be over its limit at most (a node's business:
  /// the limiter does not look at it).
  bool wants_bound = false;
  /// If not empty: of the rules that match only those of these names apply. For one request that is
  /// decided in several places.
  std::span<const std::string_view> rule_filter = {};
  /// Escrow: what it asks for was counted before, perhaps by another member. It is no sign of
  /// demand here.
  bool demand_counted = false;
  /// Further descriptors of the same request, each with hits of its own. All pass or none does: a
  /// series that several of them count in must have room for the sum of their costs.
  std::span<const Descriptor> more = {};
  /// ReplicaSide::warm was asked about it, by the thread that asks for the decision.
  bool warmed = false;
  RequestKind kind = RequestKind::check;
  /// Of all its descriptors.
  RequestLimit limit = {};

  std::size_t descriptors() const { return 1 + more.size(); }
  /// What it would be with this descriptor alone, in a request without an id. `index` is below
  /// descriptors().
  Request part(std::size_t index) const {
    Request one = *this;
    one.id = {};
    one.more = {};
    if (index == 0) return one;
    one.descriptor = more[index - 1].entries;
    one.hits = more[index - 1].hits;
    return one;
  }

  /// The value of `key` in the first descriptor, or nullptr.
  const std::string_view* find(std::string_view key) const {
    for (const Entry& entry : descriptor) {
      if (internal::same_text(entry.key, key)) return &entry.value;
    }
    return nullptr;
  }
};

}  // namespace weir
