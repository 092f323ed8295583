#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <weir/node/engine/engine.h>
#include <weir/node/service/caller_budgets.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/mailbox.h>

namespace weir::node {

/// What the main loop answers for a worker besides decisions. Called there.
struct MainLoopAnswers {
  std::function<RulesReply(std::string_view known)> rules;
  std::function<void(std::function<void(std::string)> done)> status;
};

/// The Service of one worker. Decides in place, on the worker's loop. What cannot be decided there
/// alone (a commit is waited for, another member decides) crosses to the main loop and back, as one
/// batch each way and turn.
///
/// What a front gives stays on the worker's thread: what crosses is its number. To be made and
/// destroyed on that thread, destroyed while the main loop's thread waits for it (Worker does).
class WorkerService final : public Service, private rpc::Flushable {
 public:
  WorkerService(rpc::EventLoop& loop, rpc::EventLoop& main_loop, Engine& engine,
                Coordinator& coordinator, CallerBudgets& budgets, const MainLoopAnswers& answers,
                std::function<Nanos()> wall);
  ~WorkerService() override;

  bool ready() const override { return state_.ready && !state_.leaving && !state_.stopping; }
  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const Caller& caller, CheckDone done) override;
  void reserve(const Request& request, Nanos timeout, const Caller& caller,
               Done<ReserveReply> done) override;
  void settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
              Done<SettleReply> done) override;
  void lease(const Request& request, const LeaseTerms& asked, const Caller& caller,
             Done<LeaseReply> done) override;
  void rules(std::string_view known, const Caller& caller, Done<RulesReply> done) override;
  void status(const Caller& caller, Done<StatusReply> done) override;

 private:
  /// What waits here for the main loop, by numbers.
  struct Pending {
    virtual ~Pending() = default;
    std::uint64_t number = 0;
  };
  /// A part of a call of which some replies wait.
  struct Waiting;
  /// A call whose only answer the main loop gives.
  template <typename Answer>
  struct Asked;
  /// Those that were decided in one turn, and wait for the same commit.
  struct Uncommitted;
  using AfterCommit = absl::AnyInvocable<void(bool durable)>;
  /// A request's part and its place there.
  struct Place {
    std::size_t part = 0;
    std::size_t index = 0;
  };
  struct Crossing;
  class Walk;

  bool refused(const Request& request, const Caller& caller, Nanos wall, Error& error);
  Error over_budget(const Request& request, const Caller& caller, Nanos wall);
  CallerBudgets::Hold hold_for(const Caller& caller, std::size_t requests);
  bool may_be_away(const Request& request);
  bool lacks_rights(const Decision& decision) const;
  const RuleSet* rules_of(const Decision& decision);
  std::span<const Request> sort_out(std::span<const Request> requests,
                                    std::span<const std::size_t> parts, const Caller& caller,
                                    Nanos wall);
  void keep_here(const Request& request, std::size_t index);
  void coordinator_decides(const Request& request, Place place);
  void finish(const Request& request, const Decision& decision, Reply& reply, Place place,
              Nanos wall);
  Waiting& waiting_for(std::size_t part);
  std::function<void(Reply)> reply_to(Place place);
  void tell_parts(std::span<const std::size_t> parts, CheckDone done);
  void committed(Waiting& part, bool durable);
  void arrived(Waiting& part);
  void await_commit(AfterCommit done);
  template <typename Answer>
  std::function<void(Answer)> back(const Caller& caller, Done<Answer> done);
  template <typename Kind>
  Kind& keep(std::unique_ptr<Kind> pending);
  std::unique_ptr<Pending> take(std::uint64_t number);
  void flush() noexcept override;

  rpc::EventLoop& loop_;
  Engine& engine_;
  Coordinator& coordinator_;
  CallerBudgets& budgets_;
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
  const Caller* caller_ = nullptr;
  std::size_t parts_ = 0;
  std::vector<Waiting*> waiting_;  // by part; empty if nothing waits
  // The rules that decisions went by last.
  std::uint64_t version_ = 0;
  std::shared_ptr<const RuleSet> rules_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Pending>> pending_;
  std::uint64_t numbers_ = 0;
  // Who waits for the commit of what was decided in this turn.
  std::vector<AfterCommit> uncommitted_;
  std::size_t uncommitted_requests_ = 0;
};

}  // namespace weir::node
