#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/reply.h>
#include <weir/limits/rules/rule.h>
#include <weir/node/access/caller.h>
#include <weir/node/access/token.h>
#include <weir/node/config.h>
#include <weir/node/log.h>
#include <weir/rpc/net/address.h>

namespace weir::node {

/// Who may do what: what an access file says (access_file.h), and behind that, that loopback may do
/// everything. Immutable once it is in force.
class AccessTable {
 public:
  using GrantPtr = std::shared_ptr<const Grant>;

  /// Of who shows nothing. The first network that holds an address is the one that counts.
  void add_anonymous(const MatchCidr& from, GrantPtr grant);
  /// False if there is one of that name, or hash.
  bool add_certificate(GrantPtr grant);
  bool add_token(const TokenHash& hash, GrantPtr grant);

  /// Never null: who is unknown has a grant of nothing.
  const GrantPtr& anonymous(const rpc::Address& from) const;
  /// Null if it is not known. Takes as long for each that is not.
  GrantPtr token(std::string_view token) const;
  /// The first name that is known; null if none is.
  GrantPtr certificate(const std::vector<std::string>& names) const;
  static bool is_loopback(const rpc::Address& address);
  /// Somebody who is not on loopback may do something without showing anything.
  bool open_to_anonymous() const;
  /// Somebody who is not on loopback may do something.
  bool open_to_anyone() const {
    return open_to_anonymous() || !tokens_.empty() || !certificates_.empty();
  }

 private:
  struct From {
    MatchCidr network;
    GrantPtr grant;
  };
  std::vector<From> anonymous_;
  std::map<std::string, GrantPtr, std::less<>> certificates_;
  /// By the first bytes of the hash, which tell nothing of a token.
  std::unordered_multimap<std::uint64_t, std::pair<TokenHash, GrantPtr>> tokens_;
};

enum class DenialReason : std::uint8_t {
  anonymous,  ///< showed nothing, and where it comes from may not
  unknown,    ///< showed a token that is not known
  forbidden,  ///< is known, and may not
};
inline constexpr std::array<std::string_view, 3> kDenialReasons = {"anonymous", "unknown_token",
                                                                   "forbidden"};

/// The table in force, and denials. Thread-safe.
class Access {
 public:
  /// Without a log denials are counted only; it outlives this.
  explicit Access(Log* log = nullptr);

  void replace(std::shared_ptr<const AccessTable> table);
  std::shared_ptr<const AccessTable> table() const;
  /// Another one with each replace().
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }

  /// Says why `caller` may not do `what` ("check \"api\""), counts it and logs it, ten times in a
  /// row and once a second.
  Error deny(const Caller& caller, std::string_view what);
  /// By front (as in kFronts) and reason.
  std::uint64_t denials(std::size_t front, DenialReason reason) const;

 private:
  bool may_log();

  Log* const log_;
  mutable std::mutex mutex_;
  std::shared_ptr<const AccessTable> table_;
  double lines_;  // that may be logged
  Nanos lines_at_ = 0;
  std::uint64_t unlogged_ = 0;
  std::atomic<std::uint64_t> version_{1};
  std::array<std::array<std::atomic<std::uint64_t>, kDenialReasons.size()>, kFronts.size()>
      denials_{};
};

/// Access::deny, where there is one to tell.
Error deny(const Caller& caller, std::string_view what);

/// The line of the audit log for what changes a node's state from outside, other than by counting:
/// who, from where, what, and what became of it ("done", "refused: …").
void audit(Log& log, std::string_view who, std::string_view from, std::string_view what,
           std::string_view outcome);

}  // namespace weir::node
