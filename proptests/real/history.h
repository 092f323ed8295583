#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::real {

/// The kinds of rules that clients count in.
enum class Counter : std::uint8_t {
  commit,  ///< never denies; an answer means that the count is on disk
  async,   ///< never denies; a crash may lose what was answered a moment before
  quota,   ///< denies beyond its limit; its window is short
};
inline constexpr Counter kCounters[] = {Counter::commit, Counter::async, Counter::quota};
std::string_view to_string(Counter counter);

enum class Kind : std::uint8_t { add, read };
std::string_view to_string(Kind kind);

enum class Result : std::uint8_t {
  ok,
  denied,   ///< nothing was counted
  unknown,  ///< no answer: an add may have happened, once, or not
};
std::string_view to_string(Result result);

/// One call of one client. Times are monotonic nanoseconds, of one clock for the whole history.
struct Operation {
  Nanos start = 0;  ///< before anything was sent
  Nanos end = 0;    ///< after the answer was there, or was given up
  std::uint32_t client = 0;
  std::uint32_t node = 0;
  Kind kind = Kind::read;
  Counter counter = Counter::commit;
  std::string key;
  std::uint64_t hits = 0;  ///< 0: a read
  Result result = Result::unknown;
  /// Of an answer: what the node then knew as used, an allowed add's own hits included.
  std::uint64_t used = 0;
  std::int64_t window = 0;  ///< quota, answered: the number of the window, from the epoch
  std::string error;        ///< unknown: why
};

/// One process of a node. Runs of a node do not overlap.
struct Run {
  std::uint32_t node = 0;
  Nanos begin = 0;     ///< before the process was made
  Nanos end = kNever;  ///< before it was told to stop, or killed; kNever: it still runs
  bool clean = false;  ///< it ended by itself when told, with exit code 0
  std::vector<std::pair<Nanos, Nanos>> pauses;  ///< from before SIGSTOP to after SIGCONT
};

/// What a node said of a key when all faults were over and the nodes had agreed, or should have.
struct Final {
  std::uint32_t node = 0;
  Counter counter = Counter::commit;
  std::string key;
  std::uint64_t used = 0;
};

/// From `at` on the nodes form so many components: sets within which all can reach each other, if
/// need be through others.
struct Connectivity {
  Nanos at = 0;
  std::uint32_t components = 1;
};

struct History {
  std::uint32_t nodes = 0;
  std::uint64_t limit = 0;         ///< of a quota key in one window
  Nanos window = 10 * kSecond;     ///< of a quota
  Nanos wall_minus_monotonic = 0;  ///< of the clock that the windows go by
  std::vector<Operation> operations;
  std::vector<Run> runs;
  std::vector<Connectivity> connectivity;
  std::vector<Final> finals;  ///< empty: the run ended early, and nothing is claimed of its end
};

struct Violation {
  std::string what;       ///< one line
  std::string operation;  ///< the line of the history that shows it; may be empty
};

struct Totals {
  std::uint64_t acknowledged = 0;  ///< units of adds that were answered
  std::uint64_t attempted = 0;     ///< and of those that may have happened
  std::uint64_t counted = 0;       ///< what the nodes hold in the end
  std::uint64_t lost = 0;          ///< acknowledged beyond counted, summed over keys
};

struct Verdict {
  std::vector<Violation> violations;
  std::uint64_t reads_checked = 0;  ///< answered reads of counters
  std::uint64_t adds_checked = 0;   ///< answered adds: each tells a value as well
  /// Of those, started in one run of the node and ended in another: only their upper bound holds.
  std::uint64_t between_runs = 0;
  Totals commit;
  Totals async;
};

struct CheckOptions {
  /// An async add that was answered so much of the node's running time before it was killed is
  /// taken as durable. What is promised is commit_interval and a sync of the disk.
  Nanos async_settled = 5 * kSecond;
  /// Nodes have several workers: what the answer to an allowed add says is used may leave out what
  /// others added in the last millisecond, and may count credits that they have not spent
  /// (docs/architecture.md). Then only reads and denials are held to their word.
  bool adds_may_lag = false;
};

/// Judges the counters (quotas: see judge_quota). Every value that a node told, in the answer to a
/// read or an add, must be at least
///
///   - what this node acknowledged before the call began and has not been allowed to lose: under
///     commit all of it, whatever happened to the node; under async what its present process
///     acknowledged, what it acknowledged before a clean stop, and what had settled before a kill;
///   - an earlier value that it told, in the same process or before a clean stop, and what it
///     acknowledged since; a killed process may have told counts that were not yet on its disk;
///   - of an add, that and the add itself
///
/// and at most everything that was attempted anywhere before the call ended. In the end all nodes
/// must tell the same of every key: at least the sum of what was acknowledged and may not be lost,
/// and at most what was attempted.
///
/// What is missing, or too much, at a node is told once, by the first call that shows it, and again
/// only when it gets worse.
///
/// An operation that begins when another ends counts as concurrent to it.
Verdict check(const History& history, const CheckOptions& options = {});

/// What the quota's keys admitted. Nothing is claimed of it: under `merged` every component may
/// admit the whole limit, and a little more until its nodes have told each other.
struct QuotaReport {
  std::uint64_t windows = 0;           ///< of keys, with an answer
  std::uint64_t over_limit = 0;        ///< of them, admitted beyond the limit
  std::uint64_t over_components = 0;   ///< beyond limit x components at that time
  std::uint64_t worst_admitted = 0;    ///< in one window of a key
  std::uint64_t worst_components = 1;  ///< at the time of that window
  std::uint64_t worst_connected = 0;   ///< the most of a window during which nothing was cut
  double worst_ratio = 0;              ///< of admitted to limit x components
};
QuotaReport judge_quota(const History& history);

/// One line of JSON without its end.
std::string to_line(const Operation& operation);

/// JSON lines: one of the whole, then runs, connectivity, operations and finals.
void write(const History& history, std::ostream& out);
/// Reads them back. Throws std::runtime_error, with the number of the line, if one is malformed.
History read_history(std::istream& in);

}  // namespace weir::real
