#include <weir/limits/series/series_shares.h>

#include <iterator>
#include <utility>

namespace weir {

const SeriesShares::Account& SeriesShares::account(std::uint32_t number) const {
  if (number >= by_number_.size() || by_number_[number] == nullptr) return nobody_;
  return *by_number_[number];
}

SeriesShares::Account& SeriesShares::account(std::uint32_t number) {
  return const_cast<Account&>(std::as_const(*this).account(number));
}

bool SeriesShares::nearly_full() const {
  std::lock_guard lock(mutex_);
  return beyond_ >= pool_ - pool_ / 16;
}

bool SeriesShares::beyond(std::uint32_t number) const {
  std::lock_guard lock(mutex_);
  return account(number).beyond() > 0;
}

void SeriesShares::count() {
  std::uint64_t guaranteed = 0;
  beyond_ = nobody_.beyond();
  for (const auto& [rule, account] : accounts_) {
    guaranteed += account.guaranteed;
    beyond_ += account.beyond();
  }
  pool_ = all_ - (guaranteed < all_ ? guaranteed : all_);
}

void SeriesShares::set(std::span<const Part> parts) {
  std::lock_guard lock(mutex_);
  for (auto& [rule, account] : accounts_) account.guaranteed = 0;
  for (const Part& part : parts) {
    Account& account = accounts_[part.rule];
    account.guaranteed = part.guaranteed;
    if (part.number >= by_number_.size()) by_number_.resize(part.number + 1);
    by_number_[part.number] = &account;
  }
  // A number means the same until it is given to another rule: then no series has it.
  for (Account* account : by_number_) {
    if (account != nullptr) account->named = true;
  }
  for (auto at = accounts_.begin(); at != accounts_.end();) {
    at = std::exchange(at->second.named, false) ? std::next(at) : accounts_.erase(at);
  }
  count();
}

bool SeriesShares::take(std::uint32_t number, bool anywhere) {
  std::lock_guard lock(mutex_);
  Account& taker = account(number);
  const bool own = taker.series < taker.guaranteed;
  // Parts that have grown may be in use by others still.
  if (total_ >= all_ || (!own && !anywhere && beyond_ >= pool_)) {
    ++taker.refused;
    if (&taker != &nobody_) ++refused_;
    return false;
  }
  beyond_ += !own;
  ++taker.series;
  ++total_;
  return true;
}

void SeriesShares::give_back(std::uint32_t number) {
  std::lock_guard lock(mutex_);
  Account& giver = account(number);
  beyond_ -= giver.series > giver.guaranteed;
  --giver.series;
  --total_;
}

void SeriesShares::move(std::uint32_t from, std::uint32_t to) {
  std::lock_guard lock(mutex_);
  Account& before = account(from);
  Account& after = account(to);
  if (&before == &after) return;
  beyond_ -= before.series > before.guaranteed;
  --before.series;
  beyond_ += after.series >= after.guaranteed;
  ++after.series;
}

SeriesShares::Usage SeriesShares::of(const crdt::SeriesId& rule) const {
  std::lock_guard lock(mutex_);
  auto at = accounts_.find(rule);
  if (at == accounts_.end()) return {};
  return {at->second.series, at->second.guaranteed, at->second.refused};
}

std::uint64_t SeriesShares::refused() const {
  std::lock_guard lock(mutex_);
  return refused_;
}

}  // namespace weir
