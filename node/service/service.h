#pragma once

#include <absl/functional/any_invocable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/limits/lease.h>
#include <weir/limits/reply.h>
#include <weir/limits/request.h>
#include <weir/node/access/caller.h>

namespace weir::node {

struct StatusReply {
  Error error;  ///< not empty: it is not told
  std::string json;
};

/// All that a front knows of its node: a protocol parses, calls this, and prints. What every answer
/// has in common (access, stopping, shedding, other nodes that decide, waiting for the disk,
/// on_failure) is said here once.
///
/// A worker has a Service of its own. All calls come on that worker's loop, and every `done` is
/// called there exactly once (check(): once a part): before the call returns where nothing waits,
/// which is nearly always, or in a later turn of the loop. Views in a request need to live during
/// the call only. A reply is the callee's to move from; the span's memory is used again once `done`
/// returns. `done` must not call the Service. If the node stops first, `done` is destroyed
/// uncalled.
class Service {
 public:
  /// Told of each part of a call, by its place.
  using CheckDone = absl::AnyInvocable<void(std::size_t part, std::span<Reply>)>;
  template <typename Answer>
  using Done = absl::AnyInvocable<void(Answer&)>;

  virtual ~Service() = default;
  /// False: no requests should be sent here now. It lags by a second at most, but for a node that
  /// was told to stop.
  virtual bool ready() const { return true; }
  /// Decides requests, each on its own. Several that came together should be one call: their memory
  /// is fetched ahead. `parts` says how many of them belong together, and adds up to all: a part is
  /// told once all of its replies are known, in order, and waits for no other part. `done` is
  /// called once for each part; `parts` need to live during the call only.
  virtual void check(std::span<const Request> requests, std::span<const std::size_t> parts,
                     const Caller& caller, CheckDone done) = 0;
  /// `timeout` from 0 to Limiter::kMaxHold.
  virtual void reserve(const Request& request, Nanos timeout, const Caller& caller,
                       Done<ReserveReply> done) = 0;
  virtual void settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
                      Done<SettleReply> done) = 0;
  /// Only `most` and `term` of the terms are the client's.
  virtual void lease(const Request& request, const LeaseTerms& terms, const Caller& caller,
                     Done<LeaseReply> done) = 0;
  /// The rules in force; `known` is the version that the caller has, or empty.
  virtual void rules(std::string_view known, const Caller& caller, Done<RulesReply> done) = 0;
  /// The node's status as JSON.
  virtual void status(const Caller& caller, Done<StatusReply> done) = 0;
};

/// One of the things that make a node fit for work, or not.
struct Condition {
  std::string_view name;  ///< a literal
  bool ready = true;      ///< false: no requests should be sent here now
  bool alive = true;      ///< false: nothing but a restart helps
  std::string text = {};  ///< what is wrong; empty: nothing
};

/// What an operator asks: the admin front's side of the node. On the main loop.
class Operations {
 public:
  virtual ~Operations() = default;
  /// Told on the main loop, in this turn or a later one; destroyed untold if the node stops first.
  using Text = std::function<void(std::string)>;
  virtual void status_json(Text done) = 0;
  /// In the Prometheus text format.
  virtual void metrics(Text done) = 0;
  /// All of them, whether anything is wrong or not. In time that depends on the configuration only.
  virtual std::vector<Condition> conditions() = 0;
};

}  // namespace weir::node
