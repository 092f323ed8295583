#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <weir/limits/limiter/program.h>
#include <weir/limits/request.h>
#include <weir/limits/rules/rule.h>

namespace weir {

/// A rule with other numbers than its own: those that a request brought.
struct AskedRule {
  explicit AskedRule(const Rule& from) : rule(from) {}
  AskedRule(const AskedRule&) = delete;
  AskedRule& operator=(const AskedRule&) = delete;
  Rule rule;
  CompiledRule compiled;  ///< of `rule`
};
using AskedRulePtr = std::shared_ptr<const AskedRule>;

/// The numbers that hold where `asked` comes with a request for `rule`: none is 0 but those that
/// the rule has none of, and a bucket is full again within crdt::kMaxLifetime.
RequestLimit numbers_of(const Rule& rule, const RequestLimit& asked);

/// Lately asked rules, of one thread. The numbers come from outside: it holds a fixed number of
/// them, and what is not there is compiled again.
class AskedRules {
 public:
  /// `make()` returns an AskedRulePtr, if it is not there.
  template <typename Make>
  const AskedRulePtr& find(const CompiledRule& base, const RequestLimit& numbers, Make make) {
    Place& place = places_[place_of(base.hash_number, numbers)];
    if (place.base != base.hash_number || place.numbers != numbers) {
      place = {base.hash_number, numbers, make()};
    }
    return place.rule;
  }

 private:
  struct Place {
    std::uint64_t base = 0;  // CompiledRule::hash_number, which is never 0
    RequestLimit numbers;
    AskedRulePtr rule;
  };
  static constexpr std::size_t kPlaces = 64;

  static std::size_t place_of(std::uint64_t base, const RequestLimit& numbers);

  std::array<Place, kPlaces> places_;
};

}  // namespace weir
