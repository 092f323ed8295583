#include <weir/limits/limiter/program.h>

#include <algorithm>
#include <cstring>

namespace weir {
namespace {

std::atomic<std::uint64_t> next_hash{1};

/// Small, and never above a hundredth of the limit (but for limits that have none).
std::uint64_t reserve_of(const Rule& rule) {
  return rule.durability == Durability::reserve ? std::max<std::uint64_t>(1, rule.limit / 100) : 0;
}

}  // namespace

void append_text(std::string& out, std::string_view text) {
  // Length first: ("a", "bc") and ("ab", "c") must differ.
  auto size = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(text);
}

SeriesId hash_with(const internal::KeyedHash& hash_key, std::string_view text) {
  std::array<std::uint64_t, 2> hash = hash_key(text);
  return {hash[0], hash[1]};
}

std::string identity(const Rule& rule) {
  std::string text;
  append_text(text, rule.domain);
  append_text(text, rule.name);
  append_text(text, to_string(rule.algorithm));
  bool sliding = rule.algorithm == Algorithm::sliding_window;
  append_text(text, std::to_string(rule.calendar ? 0 : rule.window));
  if (rule.calendar) {
    append_text(text, to_string(rule.calendar->unit));
    append_text(text, rule.calendar->time_zone);
  }
  append_text(text, std::to_string(sliding ? rule.slots : 0));
  append_text(text, sliding && rule.strict ? "strict" : "");
  append_text(text, rule.phase == Phase::spread ? "spread" : "");
  if (rule.enforcement == Enforcement::escrow) append_text(text, "escrow");
  for (const std::string& key : rule.key) append_text(text, key);
  return text;
}

std::vector<Prefilter> prefilters_of(const std::vector<Plan>& plans) {
  std::vector<Prefilter> prefilters;
  for (const Plan& plan : plans) {
    const Rule& rule = *plan.rule;
    Prefilter prefilter;
    prefilter.plan = &plan;
    prefilter.domain = rule.domain;
    prefilter.same_domain = !prefilters.empty() && prefilters.back().domain == rule.domain;
    prefilter.one_entry = rule.match.empty() && rule.key.size() == 1;
    if (prefilter.one_entry) prefilter.key = rule.key[0];
    prefilters.push_back(prefilter);
  }
  return prefilters;
}

Plan plan_of(const Rule& rule, std::uint32_t number, const SeriesId& identity) {
  Plan plan;
  plan.rule = &rule;
  plan.number = number;
  plan.hash_number = next_hash.fetch_add(1, std::memory_order_relaxed);
  HashKey own;
  std::memcpy(own.data(), &identity, sizeof identity);
  plan.hash_key = internal::KeyedHash(own);
  plan.plain_cost = rule.cost_by_method.empty();
  plan.default_cost = rule.default_cost;
  plan.shadow = rule.shadow;
  plan.escrow = rule.enforcement == Enforcement::escrow;
  plan.reserve = reserve_of(rule);
  plan.commit = rule.durability == Durability::commit && !plan.escrow;
  plan.bucket_cell = is_bucket(rule.algorithm);
  plan.log = rule.algorithm == Algorithm::sliding_log;
  plan.limit = plan.bucket_cell ? rule.burst : rule.limit;
  if (plan.bucket_cell) {
    plan.bucket = bucket_shape(rule);
    plan.compact = CompactBucket::of(plan.bucket);
    plan.escrow_bucket = escrow_bucket_shape(rule);
  } else if (!plan.log) {
    WindowShape shape = window_shape(rule, {});
    // A thread that is late by the grace still finds its window.
    plan.small_windows = shape.previous <= 1 && (shape.calendar || shape.sub >= kGrace) &&
                         !plan.escrow && plan.reserve == 0;
    plan.plain_windows = plan.small_windows && shape.calendar == nullptr && !shape.strict;
    plan.spread = rule.phase == Phase::spread;
    plan.sub = internal::Divisor(static_cast<std::uint64_t>(shape.sub));
    shape.phase = 0;
    plan.window = shape;
  }
  plan.small = plan.compact.fits || plan.plain_windows;
  return plan;
}

}  // namespace weir
