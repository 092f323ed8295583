#include <weir/limits/limiter/rule_numbers.h>

#include <bit>

namespace weir {

RuleNumbers::~RuleNumbers() {
  for (std::uint32_t number = 0; number < end_; ++number) delete place(number).load();
  for (std::atomic<Place*>& block : blocks_) delete[] block.load();
}

RuleNumbers::Meaning RuleNumbers::meaning_of(const crdt::SeriesId& identity, const Rule& rule) {
  if (!is_bucket(rule.algorithm)) return {identity};
  return {identity, rule.limit, rule.burst, rule.max_debt};
}

std::unique_ptr<RuleNumbers::Kept> RuleNumbers::kept_of(const crdt::SeriesId& identity,
                                                        const Rule& rule) {
  auto kept = std::make_unique<Kept>();
  kept->identity = identity;
  kept->rule.limit = rule.limit;
  kept->rule.window = rule.window;
  kept->rule.calendar = rule.calendar;
  kept->rule.algorithm = rule.algorithm;
  kept->rule.burst = rule.burst;
  kept->rule.slots = rule.slots;
  kept->rule.strict = rule.strict;
  kept->rule.max_debt = rule.max_debt;
  kept->rule.phase = rule.phase;
  kept->rule.durability = rule.durability;
  kept->rule.enforcement = rule.enforcement;
  kept->rule.limit_from_request = rule.limit_from_request;
  if (is_bucket(rule.algorithm)) {
    kept->bucket = bucket_shape(rule);
    // Rights are no matter of debt: no series of an escrow rule is kept as one.
    if (rule.enforcement != Enforcement::escrow) kept->compact = CompactBucket::of(kept->bucket);
  }
  return kept;
}

RuleNumbers::Place& RuleNumbers::place(std::uint32_t number) const {
  std::uint64_t shifted = number + kFirst;
  auto block = static_cast<std::size_t>(std::bit_width(shifted) - std::bit_width(kFirst));
  return blocks_[block].load(std::memory_order_acquire)[shifted - (kFirst << block)];
}

std::uint32_t RuleNumbers::number_of(const crdt::SeriesId& identity, const Rule& rule) {
  auto [known, fresh] = numbers_.try_emplace(meaning_of(identity, rule), 0);
  if (!fresh) return known->second;
  if (free_.empty()) {
    std::uint64_t shifted = end_ + kFirst;
    if (std::has_single_bit(shifted)) {
      auto block = static_cast<std::size_t>(std::bit_width(shifted) - std::bit_width(kFirst));
      blocks_[block].store(new Place[shifted](), std::memory_order_release);
    }
    free_.push_back(end_++);
  }
  known->second = free_.back();
  free_.pop_back();
  ++identities_[identity];
  place(known->second).store(kept_of(identity, rule).release(), std::memory_order_release);
  return known->second;
}

void RuleNumbers::keep_only(const NumbersInUse& in_use) {
  std::erase_if(numbers_, [&](const auto& known) {
    std::uint32_t number = known.second;
    if (in_use.has(number)) return false;
    std::unique_ptr<const Kept> gone(place(number).exchange(nullptr, std::memory_order_acq_rel));
    auto identity = identities_.find(gone->identity);
    if (--identity->second == 0) identities_.erase(identity);
    free_.push_back(number);
    return true;
  });
}

}  // namespace weir
