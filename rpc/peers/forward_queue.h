#pragma once

#include <kj/async.h>
#include <kj/timer.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weir.capnp.h>

#include <weir/crdt/time.h>
#include <weir/rpc/check.h>
#include <weir/rpc/peers/circuit.h>

namespace weir::rpc {

struct ForwardLimits {
  std::size_t requests = 4096;   ///< without an answer
  std::size_t bytes = 2u << 20;  ///< theirs together, on the wire, with what the answers may take
  Circuit::Options circuit;
};

struct ForwardCounters {
  std::uint64_t sent = 0;    ///< requests
  std::uint64_t unsent = 0;  ///< ended without being sent
  std::uint64_t missed = 0;  ///< sent, and not answered within their patience
  std::uint64_t failed = 0;  ///< sent, and lost with the session, or refused
};

/// The requests that one peer is asked to decide (PeerNetwork::ask), over the sessions to it. What
/// is asked in one turn of the loop travels in one call, in the order in which it was asked.
///
/// Nothing waits for a session. While the peer leaves requests unanswered the circuit is open:
/// requests end at once, but for one now and then that tries.
///
/// For the loop's thread only. `done` of any request may call any member, but not destroy the
/// queue.
class ForwardQueue final : private kj::TaskSet::ErrorHandler {
 public:
  /// `room` says whether the connection takes more; asked while there is a session.
  ForwardQueue(kj::Timer& timer, const ForwardLimits& limits, std::function<bool()> room);

  void check(CheckItem item, Nanos patience, std::function<void(Reply)> done);
  void reserve(CheckItem item, Nanos timeout, Nanos patience,
               std::function<void(ReserveReply)> done);
  void settle(std::string ticket, std::uint64_t hits, Nanos patience,
              std::function<void(SettleReply)> done);
  /// A request would be sent now.
  bool usable() const { return obstacle(0).kind == ErrorKind::none; }

  void session_up(schema::Link::Client link);
  /// Nothing more is sent in this session.
  void mute();
  /// Ends what is unanswered. Harmless without a session.
  void session_down(const std::string& why);

  const ForwardCounters& counters() const { return counters_; }
  /// Requests that have no answer yet.
  std::size_t open() const { return open_.size(); }

 private:
  struct Session;
  struct Call;
  struct CheckCall;
  struct SingleCall;
  struct ReserveCall;
  struct SettleCall;
  using CallPtr = std::shared_ptr<Call>;
  using Batch = std::vector<std::shared_ptr<CheckCall>>;
  using Open = std::multimap<Nanos, CallPtr>;

  Nanos now() const { return (timer_.now() - kj::origin<kj::TimePoint>()) / kj::NANOSECONDS; }
  struct Obstacle {
    ErrorKind kind = ErrorKind::none;
    const char* why = "";
  };
  Obstacle obstacle(std::size_t bytes) const;
  void submit(const CallPtr& call, Nanos patience, const std::string& wrong);
  void end(Call& call, const Error& error);

  void flush_later();
  void flush();
  void send_batch();
  void send_single(const std::shared_ptr<SingleCall>& call);
  void mark_sent(Call& call);
  void await(kj::Promise<void> answer, Nanos latest, std::vector<CallPtr> calls);
  void answered(const Batch& batch, capnp::List<schema::CheckResult>::Reader results);

  void watch_deadlines();
  void expire();
  void taskFailed(kj::Exception&& e) override;

  kj::Timer& timer_;
  const ForwardLimits limits_;
  const std::function<bool()> room_;
  ForwardCounters counters_;
  Circuit circuit_;
  std::shared_ptr<Session> session_;  // null: none
  Open open_;                         // by deadline
  std::size_t bytes_ = 0;             // of those
  std::deque<CallPtr> queue_;         // to be sent; some may have ended
  bool flush_scheduled_ = false;
  Nanos watching_ = kNever;
  kj::TaskSet tasks_;
};

}  // namespace weir::rpc
