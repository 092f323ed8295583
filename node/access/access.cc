#include <weir/node/access/access.h>

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <ctime>

#include <weir/node/access/network.h>

namespace weir::node {
namespace {

constexpr double kLinesAtOnce = 10;
constexpr std::size_t kShownWhat = 200;

bool is_loopback_network(const MatchCidr& cidr) {
  return std::any_of(loopback().begin(), loopback().end(),
                     [&](const MatchCidr& outer) { return within(cidr, outer); });
}

std::uint64_t place_of(const TokenHash& hash) {
  std::uint64_t out = 0;
  std::memcpy(&out, hash.data(), sizeof out);
  return out;
}

DenialReason reason_of(const Caller& caller) {
  if (!caller.flaw.empty()) return DenialReason::unknown;
  const bool named = caller.grant != nullptr && !caller.grant->name.empty();
  return named ? DenialReason::forbidden : DenialReason::anonymous;
}

Error error_of(const Caller& caller, DenialReason reason, std::string_view what) {
  Error error;
  error.kind =
      reason == DenialReason::forbidden ? ErrorKind::forbidden : ErrorKind::unauthenticated;
  if (reason == DenialReason::unknown) {
    error.detail = caller.flaw;
  } else if (reason == DenialReason::forbidden) {
    error.detail.append(caller.grant->name).append(" may not ").append(what);
  } else {
    error.detail.append("who shows neither a token nor a certificate may not ").append(what);
  }
  return error;
}

}  // namespace

void AccessTable::add_anonymous(const MatchCidr& from, GrantPtr grant) {
  anonymous_.push_back({from, std::move(grant)});
}

bool AccessTable::add_certificate(GrantPtr grant) {
  std::string name = grant->name;
  return certificates_.emplace(std::move(name), std::move(grant)).second;
}

bool AccessTable::add_token(const TokenHash& hash, GrantPtr grant) {
  const auto [begin, end] = tokens_.equal_range(place_of(hash));
  if (std::any_of(begin, end, [&](const auto& one) { return one.second.first == hash; })) {
    return false;
  }
  tokens_.emplace(place_of(hash), std::pair(hash, std::move(grant)));
  return true;
}

const AccessTable::GrantPtr& AccessTable::anonymous(const rpc::Address& from) const {
  static const GrantPtr kNothing = std::make_shared<const Grant>();
  static const GrantPtr kEverything = std::make_shared<const Grant>(Grant::everything());
  const Ip ip = mapped(from);
  const auto at = std::find_if(anonymous_.begin(), anonymous_.end(),
                               [&](const From& one) { return holds(one.network, ip); });
  if (at != anonymous_.end()) return at->grant;
  return is_loopback(from) ? kEverything : kNothing;
}

bool AccessTable::is_loopback(const rpc::Address& address) {
  return holds(loopback(), mapped(address));
}

AccessTable::GrantPtr AccessTable::token(std::string_view token) const {
  if (token.size() > kMaxToken) return nullptr;
  const TokenHash hash = hash_token(token);
  const auto [begin, end] = tokens_.equal_range(place_of(hash));
  GrantPtr found;
  for (auto at = begin; at != end; ++at) {
    if (sodium_memcmp(at->second.first.data(), hash.data(), hash.size()) == 0) {
      found = at->second.second;
    }
  }
  return found;
}

AccessTable::GrantPtr AccessTable::certificate(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    const auto at = certificates_.find(name);
    if (at != certificates_.end()) return at->second;
  }
  return nullptr;
}

bool AccessTable::open_to_anonymous() const {
  return std::any_of(anonymous_.begin(), anonymous_.end(), [](const From& one) {
    return one.grant->may_anything() && !is_loopback_network(one.network);
  });
}

Access::Access(Log* log)
    : log_(log), table_(std::make_shared<const AccessTable>()), lines_(kLinesAtOnce) {}

void Access::replace(std::shared_ptr<const AccessTable> table) {
  std::lock_guard lock(mutex_);
  table_ = std::move(table);
  version_.fetch_add(1, std::memory_order_release);
}

std::shared_ptr<const AccessTable> Access::table() const {
  std::lock_guard lock(mutex_);
  return table_;
}

Error Access::deny(const Caller& caller, std::string_view what) {
  const DenialReason reason = reason_of(caller);
  const auto front = std::find(kFronts.begin(), kFronts.end(), caller.front);
  if (front != kFronts.end()) {
    denials_[static_cast<std::size_t>(front - kFronts.begin())][static_cast<std::size_t>(reason)]
        .fetch_add(1, std::memory_order_relaxed);
  }
  what = what.substr(0, kShownWhat);
  if (log_ != nullptr && may_log()) {
    std::uint64_t unlogged = 0;
    {
      std::lock_guard lock(mutex_);
      unlogged = std::exchange(unlogged_, 0);
    }
    log_->warn("access_denied", {{"front", caller.front},
                                 {"reason", kDenialReasons[static_cast<std::size_t>(reason)]},
                                 {"who", caller.grant == nullptr ? "" : caller.grant->name},
                                 {"from", caller.address},
                                 {"what", what},
                                 {"not_logged", unlogged}});
  }
  return error_of(caller, reason, what);
}

bool Access::may_log() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const Nanos now = static_cast<Nanos>(time.tv_sec) * kSecond + time.tv_nsec;
  std::lock_guard lock(mutex_);
  const double passed = static_cast<double>(now - std::exchange(lines_at_, now));
  lines_ = std::min(kLinesAtOnce, lines_ + passed / static_cast<double>(kSecond));
  if (lines_ < 1) {
    ++unlogged_;
    return false;
  }
  lines_ -= 1;
  return true;
}

std::uint64_t Access::denials(std::size_t front, DenialReason reason) const {
  return denials_[front][static_cast<std::size_t>(reason)].load(std::memory_order_relaxed);
}

Error deny(const Caller& caller, std::string_view what) {
  if (caller.access != nullptr) return caller.access->deny(caller, what);
  return error_of(caller, reason_of(caller), what.substr(0, kShownWhat));
}

void audit(Log& log, std::string_view who, std::string_view from, std::string_view what,
           std::string_view outcome) {
  log.info("audit", {{"who", who}, {"from", from}, {"what", what}, {"outcome", outcome}});
}

}  // namespace weir::node
