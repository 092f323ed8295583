#include <weir/rpc/client/lease_book.h>

#include <algorithm>
#include <utility>

namespace weir {
namespace {

constexpr unsigned kAttempts = 3;

}  // namespace

LeaseBook::KeyState* LeaseBook::find(std::string_view key) {
  auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &*found->second;
}

LeaseBook::KeyState* LeaseBook::find_or_make(std::string_view key, Nanos now) {
  auto found = by_key_.find(key);
  if (found != by_key_.end()) {
    entries_.splice(entries_.begin(), entries_, found->second);
    return &entries_.front();
  }
  if (entries_.size() >= std::max<std::size_t>(options_.max_keys, 1)) {
    KeyState& quiet = entries_.back();
    if (quiet.asking) return nullptr;
    close(quiet, false, now);
    by_key_.erase(quiet.key);
    entries_.pop_back();
  }
  KeyState& made = entries_.emplace_front();
  made.key = std::string(key);
  made.since = now;
  by_key_.emplace(made.key, entries_.begin());
  return &made;
}

LeaseBook::Answer LeaseBook::take(std::string_view key, std::uint64_t hits, Nanos now) {
  KeyState* entry = find_or_make(key, now);
  if (entry == nullptr) return {};
  if (entry->block) {
    Block& block = *entry->block;
    if (now < block.close && hits <= block.grant.hits - block.used) {
      block.used += hits;
      Answer answer{Way::spent, 0, block.grant.reply, now - block.taken};
      if (block.used == block.grant.hits) close(*entry, true, now);
      return answer;
    }
    close(*entry, now < block.close, now);
  }
  if (now < entry->denied_until && hits >= entry->denied_hits) {
    return {Way::denied, 0, entry->reply, now - entry->denied_at};
  }
  if (now - entry->since >= options_.term) {
    entry->since = now;
    entry->recent = 0;
  }
  ++entry->recent;
  if (entry->asking) return {Way::wait, 0, nullptr, 0};
  if (entry->recent < options_.hot || now < entry->not_before) return {};
  // The first block, or the first again after there was no demand: it is back.
  if (entry->next <= hits && entry->recent >= std::min<std::uint64_t>(options_.first, 1000)) {
    entry->next = 0;
  }
  if (entry->next == 0) entry->next = mul_saturated(hits, options_.first);
  const std::uint64_t most = std::min(entry->next, options_.most);
  if (most <= hits) return {};
  entry->asking = true;
  return {Way::lease, most, nullptr, 0};
}

void LeaseBook::granted(std::string_view key, std::uint64_t hits, Grant grant, Nanos sent,
                        Nanos now) {
  KeyState* entry = find(key);
  if (entry == nullptr) {
    keep_return({grant.node, std::move(grant.ticket), hits, 0});
    return;
  }
  entry->asking = false;
  close(*entry, false, now);
  const Nanos term = std::min(grant.term, options_.term);
  Block& block = entry->block.emplace();
  block.grant = std::move(grant);
  block.used = std::min(hits, block.grant.hits);
  block.taken = now;
  block.close = sent + std::max(term - options_.return_ahead, term / 2);
  by_end_.emplace(block.close, entry);
  if (block.used == block.grant.hits || block.close <= now) close(*entry, false, now);
}

void LeaseBook::refused(std::string_view key, bool leasable, Nanos now) {
  KeyState* entry = find(key);
  if (entry == nullptr) return;
  entry->asking = false;
  if (!leasable) entry->not_before = now + options_.term;
}

void LeaseBook::denied(std::string_view key, std::uint64_t hits, std::shared_ptr<const Reply> reply,
                       Nanos retry_after, Nanos now) {
  KeyState* entry = find(key);
  if (entry == nullptr) return;
  // One that denies less says more, while it lasts.
  if (now < entry->denied_until && entry->denied_hits < hits) return;
  entry->reply = std::move(reply);
  entry->denied_hits = hits;
  entry->denied_at = now;
  entry->denied_until = now + std::clamp<Nanos>(retry_after, 0, options_.denied_for);
}

void LeaseBook::close(KeyState& entry, bool ran_out, Nanos now) {
  if (!entry.block) return;
  Block& block = *entry.block;
  if (ran_out) {
    if (now - block.taken < options_.term / 2) {
      entry.next = std::min(mul_saturated(entry.next, 2), options_.most);
    }
  } else if (block.used <= block.grant.hits / 2) {
    entry.next = std::max<std::uint64_t>(std::max(block.used, block.grant.hits / 2), 1);
  }
  auto [first, last] = by_end_.equal_range(block.close);
  by_end_.erase(std::find_if(first, last, [&](const auto& one) { return one.second == &entry; }));
  keep_return({block.grant.node, std::move(block.grant.ticket), block.used, 0});
  entry.block.reset();
}

/// More than the keys can have open at once only if nobody takes them: the node then charges in
/// full.
void LeaseBook::keep_return(Return returned) {
  if (returns_.size() >= 2 * std::max<std::size_t>(options_.max_keys, 1)) return;
  returns_.push_back(std::move(returned));
}

std::vector<LeaseBook::Return> LeaseBook::take_returns(Nanos now) {
  while (!by_end_.empty() && by_end_.begin()->first <= now) {
    close(*by_end_.begin()->second, false, now);
  }
  std::vector<Return> out(std::make_move_iterator(returns_.begin()),
                          std::make_move_iterator(returns_.end()));
  returns_.clear();
  return out;
}

void LeaseBook::try_again(Return returned) {
  if (++returned.attempts < kAttempts) keep_return(std::move(returned));
}

void LeaseBook::close_all(Nanos now) {
  while (!by_end_.empty()) close(*by_end_.begin()->second, false, now);
}

}  // namespace weir
