#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <weir/bench/spread.h>
#include <weir/limits/rules/rule.h>

namespace weir::bench {

struct PartOptions {
  bool quick = false;      ///< fewer keys and shorter rounds: about two minutes for all parts
  std::uint64_t keys = 0;  ///< 0: the part's own choice
  Algorithm algorithm = Algorithm::token_bucket;
};

// Each measures one thing, tells its progress on stderr, and returns an object: `figures` has what
// is compared between runs, everything else is for the report. Throws TooLittleMemory, or another
// std::runtime_error if a count was wrong.

Json part_single(const PartOptions& options);       ///< one rule: weir beside every baseline
Json part_four_rules(const PartOptions& options);   ///< four rules, one of them on a hot key
Json part_hot(const PartOptions& options);          ///< one key, 1 and 2 threads
Json part_match(const PartOptions& options);        ///< RuleSet::match with 10,000 rules
Json part_allocations(const PartOptions& options);  ///< operator new per decision
Json part_exact(const PartOptions& options);        ///< 2 threads against a sequential oracle
Json part_latency(const PartOptions& options);      ///< percentiles beside a working node
Json part_memory(const PartOptions& options);       ///< 100 million live keys

/// Calls of operator new by this thread so far.
std::uint64_t allocations();

/// Runs `body(thread)` on that many threads, each tied to a processor, at once; ns from when all
/// stood ready to the last end. `disturbed`, if given: how often other programs took a processor
/// away meanwhile.
std::uint64_t run_threads(int threads, const std::function<void(int)>& body,
                          std::uint64_t* disturbed = nullptr);
/// The same up to 3 times, until one run is undisturbed; the time of the least disturbed one. A
/// throughput of two threads means nothing if one of them did not run.
std::uint64_t run_undisturbed(int threads, const std::function<void(int)>& body,
                              const std::function<void()>& before_each);

/// This machine has too little memory for a part: no failure, it is left out.
struct TooLittleMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws TooLittleMemory unless this machine can give that much and 2 GiB besides.
void need_memory(std::uint64_t bytes, const std::string& what);
void say(const std::string& line);

}  // namespace weir::bench
