#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/node/engine/engine.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/mailbox.h>

namespace weir::node {

/// What the main loop answers for a worker besides decisions. Called there.
struct MainLoopAnswers {
  std::function<RulesReply(std::string_view known)> rules;
  std::function<std::string()> status;
};

/// The Service of one worker. Decides in place, on the worker's loop. What cannot be decided there
/// alone (a commit is waited for, another member decides) crosses to the main loop and back, as one
/// batch each way and turn.
///
/// To be made and destroyed on the worker's thread; the main loop must not run tasks of it any more
/// when it is destroyed (Worker sees to it).
class WorkerService final : public Service, private rpc::Flushable {
 public:
  WorkerService(rpc::EventLoop& loop, rpc::EventLoop& main_loop, Engine& engine,
                Coordinator& coordinator, const MainLoopAnswers& answers,
                std::function<Nanos()> wall);
  ~WorkerService() override;

  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const Caller& caller, CheckDone done) override;
  void reserve(const Request& request, Nanos timeout, const Caller& caller,
               Done<ReserveReply> done) override;
  void settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
              Done<SettleReply> done) override;
  void lease(const Request& request, const LeaseTerms& terms, const Caller& caller,
             Done<LeaseReply> done) override;
  void rules(std::string_view known, const Caller& caller, Done<RulesReply> done) override;
  void status(const Caller& caller, Done<std::string> done) override;

 private:
  /// A part of a call of which some replies wait. It belongs to the worker's thread; tasks on the
  /// main loop carry it there and back, and do not look inside.
  struct Waiting {
    struct Uncommitted {
      std::size_t index = 0;  // in the part
      bool open = false;      // on failure
    };
    std::size_t part = 0;
    std::vector<Reply> replies;
    std::vector<Uncommitted> uncommitted;
    std::size_t open = 0;  // answers that are still to come
    std::shared_ptr<CheckDone> done;
  };
  using WaitingPtr = std::shared_ptr<Waiting>;
  /// A request's part and its place there.
  struct Place {
    std::size_t part = 0;
    std::size_t index = 0;
  };
  struct Crossing;
  class Walk;

  bool refused(const Request& request, Nanos wall, Error& error);
  bool may_be_away(const Request& request);
  bool lacks_rights(const Decision& decision) const;
  const RuleSet* rules_of(const Decision& decision);
  std::span<const Request> sort_out(std::span<const Request> requests,
                                    std::span<const std::size_t> parts, Nanos wall);
  void keep_here(const Request& request, std::size_t index);
  void coordinator_decides(const Request& request, Place place);
  void finish(const Request& request, const Decision& decision, Reply& reply, Place place,
              Nanos wall);
  WaitingPtr& waiting_for(std::size_t part);
  std::function<void(Reply)> reply_to(Place place);
  void tell_parts(std::span<const std::size_t> parts, CheckDone done);
  void committed(const WaitingPtr& part, bool durable);
  static void arrived(Waiting& part);
  void await_commit(std::function<void(bool)> done);
  template <typename Answer>
  std::function<void(Answer)> back(Done<Answer> done);
  void flush() noexcept override;

  rpc::EventLoop& loop_;
  Engine& engine_;
  Coordinator& coordinator_;
  SharedState& state_;
  const MainLoopAnswers& answers_;
  const std::function<Nanos()> wall_;
  rpc::Mailbox to_main_;
  std::shared_ptr<Crossing> crossing_;
  // Of the call that is being decided; they keep their memory.
  std::vector<Request> here_;       // requests that are decided here, where not all are
  std::vector<std::size_t> where_;  // their places in the call
  std::vector<Decision> decisions_;
  std::vector<Reply> replies_;
  std::size_t parts_ = 0;
  std::vector<WaitingPtr> waiting_;  // by part; empty if nothing waits
  // The rules that decisions went by last.
  std::uint64_t version_ = 0;
  std::shared_ptr<const RuleSet> rules_;
  // Who waits for the commit of what was decided in this turn.
  std::vector<std::function<void(bool)>> uncommitted_;
  std::size_t uncommitted_requests_ = 0;
};

}  // namespace weir::node
