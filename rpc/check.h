#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <weir/limits/bounds.h>
#include <weir/limits/reply.h>
#include <weir/limits/request.h>

namespace weir::rpc {

/// A further descriptor of a CheckItem.
struct CheckDescriptor {
  std::vector<std::pair<std::string, std::string>> entries;
  std::uint64_t hits = 1;  ///< 0 peeks
  friend bool operator==(const CheckDescriptor&, const CheckDescriptor&) = default;
};

/// One request, owning its text.
struct CheckItem {
  std::string domain;
  std::vector<std::pair<std::string, std::string>> entries;
  std::uint64_t hits = 1;  ///< 0 peeks
  std::string id = {};     ///< names the request, which then counts once; empty: no name
  /// It may take long (a commit, another region): it shares no message with those that need not
  /// wait for it.
  bool isolated = false;
  /// Between nodes: the rules that are to decide, where they arrive: those that have their home
  /// there, or escrow rules, from the rights that are there. Empty: all, anywhere.
  std::vector<std::string> rule_filter = {};
  bool wants_bound = false;  ///< asks for Status::over_admission
  /// Further descriptors: all rules of all must allow, or nothing is consumed.
  std::vector<CheckDescriptor> more = {};
  RequestKind kind = RequestKind::check;
  RequestLimit limit = {};  ///< for rules with limit: from_request
  friend bool operator==(const CheckItem&, const CheckItem&) = default;
};

/// The item as a request: views into it, so the item outlives this. Leaves out `rule_filter`.
struct AsRequest {
  explicit AsRequest(const CheckItem& item) {
    std::size_t all = item.entries.size();
    for (const CheckDescriptor& each : item.more) all += each.entries.size();
    entries.reserve(all);
    auto keep = [this](const auto& texts) {
      const std::size_t first = entries.size();
      for (const auto& [key, value] : texts) entries.push_back({key, value});
      return std::span<const Entry>(entries.data() + first, texts.size());
    };
    request.domain = item.domain;
    request.descriptor = keep(item.entries);
    for (const CheckDescriptor& each : item.more) more.push_back({keep(each.entries), each.hits});
    request.more = more;
    request.hits = item.hits;
    request.id = item.id;
    request.wants_bound = item.wants_bound;
    request.kind = item.kind;
    request.limit = item.limit;
  }
  AsRequest(const AsRequest&) = delete;
  AsRequest& operator=(const AsRequest&) = delete;

  std::vector<Entry> entries;
  std::vector<Descriptor> more;
  Request request;
};

/// The request with texts of its own. Leaves out `rule_filter`.
CheckItem item_of(const Request& request);

/// Bounds of the client protocol, kept by clients and enforced by servers.
inline constexpr std::size_t kMaxRequestsPerCall = 1024;
using weir::kMaxEntries;
using weir::kMaxRequestId;
using weir::kMaxTicket;
inline constexpr std::size_t kMaxText = kMaxEntryText;  ///< and bytes of a domain
inline constexpr std::size_t kMaxRuleFilter = 64;       ///< rules that a forwarded request names

}  // namespace weir::rpc
