#include <weir/limits/limiter/program.h>

#include <fmt/format.h>

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
  append_text(text, rule.phase == Phase::aligned ? "" : to_string(rule.phase));
  // What stands here is "escrow" of escrow rules only: an entry of a key is never empty.
  if (rule.enforcement == Enforcement::escrow) {
    append_text(text, "escrow");
  } else if (!rule.key.empty() && rule.key[0] == "escrow") {
    append_text(text, "");
  }
  for (std::size_t i = 0; i < rule.key.size(); ++i) {
    append_text(text, rule.key[i]);
    const KeyForm form = rule.key_form(i);
    if (form == KeyForm{}) continue;
    // As an entry is never empty, what follows is how the one before is counted.
    append_text(text, "");
    append_text(text, fmt::format("{} {} {} {} {}", static_cast<unsigned>(form.kind), form.v4,
                                  form.v6, form.segments, form.ignore_case));
  }
  return text;
}

std::vector<Prefilter> prefilters_of(const std::vector<CompiledRule>& compiled_rules) {
  std::vector<Prefilter> prefilters;
  for (const CompiledRule& compiled : compiled_rules) {
    const Rule& rule = *compiled.rule;
    Prefilter prefilter;
    prefilter.compiled = &compiled;
    prefilter.domain = rule.domain;
    prefilter.same_domain = !prefilters.empty() && prefilters.back().domain == rule.domain;
    prefilter.one_entry =
        rule.match.empty() && rule.key.size() == 1 && !compiled.formed && !compiled.special;
    if (prefilter.one_entry) prefilter.key = rule.key[0];
    prefilters.push_back(prefilter);
  }
  return prefilters;
}

CompiledRule compile(const Rule& rule, std::uint32_t number, const SeriesId& identity) {
  CompiledRule compiled;
  compiled.rule = &rule;
  compiled.number = number;
  compiled.hash_number = next_hash.fetch_add(1, std::memory_order_relaxed);
  HashKey own;
  std::memcpy(own.data(), &identity, sizeof identity);
  compiled.hash_key = internal::KeyedHash(own);
  compiled.plain_cost = rule.cost_by_method.empty() && rule.cost_by_entry.empty();
  compiled.formed = !rule.key_forms.empty();
  compiled.special = rule.unlimited || rule.limit_from_request;
  compiled.default_cost = rule.default_cost;
  compiled.shadow = rule.shadow;
  compiled.escrow = rule.enforcement == Enforcement::escrow;
  compiled.reserve = reserve_of(rule);
  compiled.commit = rule.durability == Durability::commit && !compiled.escrow;
  compiled.bucket_cell = is_bucket(rule.algorithm);
  compiled.first_hit = rule.phase == Phase::first_hit;
  compiled.log = rule.algorithm == Algorithm::sliding_log || compiled.first_hit;
  compiled.count_denied = rule.count_denied;
  compiled.limit = compiled.bucket_cell ? rule.burst : rule.limit;
  if (compiled.bucket_cell) {
    compiled.bucket = bucket_shape(rule);
    compiled.compact = CompactBucket::of(compiled.bucket);
    compiled.escrow_bucket = escrow_bucket_shape(rule);
  } else if (!compiled.log) {
    WindowShape shape = window_shape(rule, {});
    // A thread that is late by the grace still finds its window.
    compiled.small_windows = shape.previous <= 1 && (shape.calendar || shape.sub >= kGrace) &&
                             !compiled.escrow && compiled.reserve == 0;
    compiled.plain_windows = compiled.small_windows && shape.calendar == nullptr && !shape.strict;
    compiled.spread = rule.phase == Phase::spread;
    compiled.sub = internal::Divisor(static_cast<std::uint64_t>(shape.sub));
    shape.phase = 0;
    compiled.window = shape;
  }
  if (compiled.special) {
    // An entry's number stands for one rule's numbers: what others count by has the general form.
    compiled.compact.fits = compiled.small_windows = compiled.plain_windows = false;
  }
  compiled.small = (compiled.compact.fits && !compiled.escrow) || compiled.plain_windows;
  // What the quick way does not know.
  compiled.small = compiled.small && !rule.count_denied && !rule.candidate;
  if (rule.candidate) {
    auto candidate = std::make_shared<CompiledCandidate>();
    candidate->rule = rule;
    candidate->rule.limit = rule.candidate->limit;
    candidate->rule.burst = rule.candidate->burst;
    candidate->rule.candidate.reset();
    candidate->compiled = compile(candidate->rule, number, identity);
    compiled.candidate = std::move(candidate);
  }
  return compiled;
}

}  // namespace weir
