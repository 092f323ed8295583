#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/limits/lease.h>
#include <weir/limits/reply.h>
#include <weir/node/engine/engine.h>
#include <weir/node/service/forwarder.h>
#include <weir/rpc/check.h>

namespace weir::node {

/// What workers ask about on every request. Written on the main loop, read by all threads.
struct SharedState {
  std::atomic<bool> ready{true};             ///< as all conditions say (Condition::ready)
  std::atomic<bool> leaving{false};          ///< the node was told to stop, and still decides
  std::atomic<bool> stopping{false};         ///< nothing is decided any more
  std::atomic<bool> has_home_rules{false};   ///< some rule in force has a home
  std::atomic<bool> asks_for_rights{false};  ///< others may decide what lacks rights here
};

/// Requests that go to other members, and those that come from them: what rpc::PeerNetwork does for
/// the coordinator. Members are counted as in ForwardOptions::members, from 1. Callbacks come on
/// the main loop, once each, perhaps at once.
class MemberLinks {
 public:
  virtual ~MemberLinks() = default;
  virtual bool askable(std::size_t member) = 0;
  virtual void ask(std::size_t member, rpc::CheckItem item, Nanos patience,
                   std::function<void(Reply)> done) = 0;
  virtual void ask_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout, Nanos patience,
                           std::function<void(ReserveReply)> done) = 0;
  virtual void ask_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                          Nanos patience, std::function<void(SettleReply)> done) = 0;
};

/// The main loop's side of the service: what cannot be decided by a worker alone. Other members'
/// decisions (forwarder.h), what they ask here, and waiting for commits. For the main loop's
/// thread, but for state().
class Coordinator final : public ForwardDriver {
 public:
  /// `wall` reads the wall clock, from any thread. `soon` has pump() of the engine called at the
  /// end of the loop's turn. All outlive the coordinator.
  Coordinator(Engine& engine, ForwardOptions options, MemberLinks& links,
              std::function<Nanos()> wall, std::function<void()> soon);

  SharedState& state() { return state_; }
  /// Other rules are in force.
  void rules_changed(const RuleSet& rules);
  /// Every few milliseconds.
  void pump();

  /// Decides what some rule of is decided by another member, perhaps.
  void check(rpc::CheckItem item, std::function<void(Reply)> done);
  /// A worker denied it as `denied`, answered as `answer`: others may have the rights that are
  /// missing.
  void pass_on(const rpc::CheckItem& item, const Decision& denied, Reply answer,
               std::function<void(Reply)> done);
  void reserve(rpc::CheckItem item, Nanos timeout, TicketHolder holder,
               std::function<void(ReserveReply)> done);
  void lease(rpc::CheckItem item, LeaseTerms terms, std::function<void(LeaseReply)> done);
  /// Engine::when_durable, and soon.
  void when_durable(std::function<void(bool)> done, std::size_t requests);

  // What other members ask: by the rules that `item.rule_filter` names, and never sent on.

  void serve(const std::vector<rpc::CheckItem>& items,
             std::function<void(std::vector<Reply>)> done);
  void serve(const rpc::CheckItem& item, std::function<void(Reply)> done);
  void serve_reserve(const rpc::CheckItem& item, Nanos timeout,
                     std::function<void(ReserveReply)> done);
  void serve_settle(std::string_view ticket, std::uint64_t hits,
                    std::function<void(SettleReply)> done);

  /// Null: no rule needed it yet.
  const Forwarder* forwarder() const { return forwarder_.get(); }

 private:
  bool is_away(const Request& request);
  bool lacks_rights(const Decision& decision) const;
  void finish(const Decision& decision, const Request& request, std::function<void(Reply)> done);
  bool refused(const Request& request, Error& error);
  template <typename Answer>
  void once_durable(const Decision& decision, Answer answer, std::function<void(Answer)> done);

  Nanos wall() override { return wall_(); }
  bool reachable(std::size_t member) override { return links_.askable(member); }
  void forward(std::size_t member, rpc::CheckItem item, Nanos patience,
               std::function<void(Reply)> done) override;
  void forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout, Nanos patience,
                       std::function<void(ReserveReply)> done) override;
  void forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                      std::function<void(SettleReply)> done) override;
  void when_durable(std::function<void(bool)> done) override { when_durable(std::move(done), 1); }

  Engine& engine_;
  ForwardOptions options_;
  MemberLinks& links_;
  const std::function<Nanos()> wall_;
  const std::function<void()> soon_;
  SharedState state_;
  std::unique_ptr<Forwarder> forwarder_;
};

/// A commit that was promised cannot be kept: true if the rules' on_failure lets it pass all the
/// same.
bool open_on_failure(const Decision& decision, const RuleSet& rules);
/// What becomes of an answer whose commit failed.
void not_durable(Reply& reply, bool open);
/// By how much each rule may be over its limit, where the request asks for it.
void tell_bound(Engine& engine, const Decision& decision, Nanos wall, Reply& reply);

}  // namespace weir::node
