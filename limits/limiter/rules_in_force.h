#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <weir/limits/decision.h>
#include <weir/limits/limiter.h>
#include <weir/limits/limiter/program.h>
#include <weir/limits/limiter/published.h>
#include <weir/limits/limiter/rule_numbers.h>
#include <weir/limits/series/keyed_hash.h>

namespace weir {

/// The rules that decisions go by: how they are compiled and replaced, and what was counted of each
/// since the start, under whatever rules it was in force. It knows no series: who holds them says
/// which numbers they have.
///
/// Thread-safe. kept(), use(), identity_of(), number(), prepare() and what takes a Program hold no
/// lock; the rest takes this object's, with which a thread may hold no other, neither a series' nor
/// an overflow's. reload() and reclaim() hold it while they visit the series, and so take series'
/// locks inside it.
class RulesInForce {
 public:
  using Programs = Published<const Program, kStripes>;
  using Use = Programs::Use;
  /// Calls note() of every number that a series has. Null: nobody asks.
  using VisitSeries = std::function<void(NumbersInUse* in_use)>;

  /// rules(version) still knows so many, the newest ones.
  static constexpr std::size_t kVersionsKept = 8;
  /// At so many numbers of rules that are no longer in force, reload() looks which still matter.
  static constexpr std::size_t kManyNumbers = 1024;

  /// Told of each program, with its rules' numbers, before anybody can use it. With this object's
  /// lock held.
  using Numbered = std::function<void(const Program&)>;
  /// With `replicated`, answers of `commit` rules wait for the disk. `lost`: there are windows of
  /// which counts may be missing. The first version is 1.
  RulesInForce(std::shared_ptr<const RuleSet> rules, const HashKey& key, bool replicated,
               bool lost = false, Numbered numbered = nullptr);

  /// What use() gives, if that costs nothing: see Published.
  [[gnu::always_inline]] const Program* kept(std::size_t stripe) const {
    return programs_.kept(stripe);
  }
  /// The newest rules, for as long as the result lives. `stripe` is the calling thread's.
  Use use(std::size_t stripe) { return programs_.use(stripe); }

  /// What makes a rule count apart, alike on all nodes with this hash key.
  SeriesId identity_of(const Rule& rule) const;
  /// What a number stands for that a series or a program in use has.
  const RuleNumbers::Kept& number(std::uint32_t number) const { return numbers_.at(number); }
  /// The rule of `program` that a number belongs to. If there is none, as the number has it.
  CompiledRule compiled_for(const Program& program, std::uint32_t number) const;
  /// What was answered under `before`, in terms of `program`: of rules that are still there.
  void translate(const Program& program, const RuleSet& before, Decision& out) const;

  std::shared_ptr<const RuleSet> rules() const;
  /// Null if it is not kept, or never was.
  std::shared_ptr<const RuleSet> rules(std::uint64_t version) const;
  /// Of a rule in force, by its index; zeros beyond them.
  SeriesId identity(std::uint32_t rule) const;
  RuleCounters counters(std::uint32_t rule) const;

  /// All of a program but its version and its rules' numbers. Most of the work of a reload; changes
  /// nothing and holds no lock.
  std::unique_ptr<Program> prepare(std::shared_ptr<const RuleSet> rules) const;
  /// use() gives these from now on. `visit` is called only where there are many numbers.
  void reload(std::unique_ptr<Program> prepared, const VisitSeries& visit);
  /// Frees programs that nobody uses any more, and forgets numbers (and the counters of their
  /// rules) that neither a program nor a series has. `visit` is called once, whether or not numbers
  /// are asked for: for who visits the series anyway.
  void reclaim(const VisitSeries& visit);
  /// The same for who visits them bit by bit: frees programs, and says which numbers programs have,
  /// to be noted of series as well, if there are any to forget. `version` is that of the rules.
  std::optional<NumbersInUse> begin_reclaim(std::uint64_t& version);
  /// Forgets all others, unless rules have been replaced since.
  void end_reclaim(const NumbersInUse& in_use, std::uint64_t version);

 private:
  // With the lock.

  std::unique_ptr<const Program> number_program(std::unique_ptr<Program> prepared,
                                                std::uint64_t version);
  void free_programs();
  NumbersInUse numbers_of_programs() const;
  void forget_numbers(const NumbersInUse& in_use);

  const internal::KeyedHash hash_;
  const bool replicated_;
  const bool lost_;
  const Numbered numbered_;
  mutable std::mutex mutex_;
  RuleNumbers numbers_;
  std::vector<std::shared_ptr<const RuleSet>> versions_;  // the newest is the last
  std::unordered_map<SeriesId, RuleCounters> past_;       // of programs that were freed
  Programs programs_;
};

}  // namespace weir
