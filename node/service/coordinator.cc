#include <weir/node/service/coordinator.h>

#include <algorithm>
#include <utility>

namespace weir::node {
namespace {

using rpc::AsRequest;

Error stopping() {
  return {ErrorKind::unavailable, "stopping"};
}

Reply& decision_of(Reply& reply) {
  return reply;
}
template <typename Answer>
Reply& decision_of(Answer& answer) {
  return answer.decision;
}

}  // namespace

bool open_on_failure(const Decision& decision, const RuleSet& rules) {
  return std::none_of(decision.statuses.begin(), decision.statuses.end(),
                      [&](const RuleStatus& status) {
                        const Rule& rule = rules.rules()[status.rule];
                        return !status.shadow && rule.durability != Durability::async &&
                               rule.on_failure == OnFailure::closed;
                      });
}

void not_durable(Reply& reply, bool open) {
  if (!open) {
    return reply.fail(ErrorKind::closed, "storage has failed and the rule is on_failure: closed");
  }
  for (Status& status : reply.statuses) status.degraded = true;
}

void tell_bound(Engine& engine, const Decision& decision, Nanos wall, Reply& reply) {
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    reply.statuses[i].over_admission = engine.over_admission(decision.statuses[i].rule, wall);
  }
}

Coordinator::Coordinator(Engine& engine, ForwardOptions options, MemberLinks& links,
                         std::function<Nanos()> wall, std::function<void()> soon)
    : engine_(engine),
      options_(std::move(options)),
      links_(links),
      wall_(std::move(wall)),
      soon_(std::move(soon)) {}

void Coordinator::rules_changed(const RuleSet& rules) {
  bool has_homes = false;
  bool has_scarce = false;
  for (const Rule& rule : rules.rules()) {
    has_homes |= rule.enforcement == Enforcement::home;
    has_scarce |= rule.enforcement == Enforcement::escrow && engine_.escrow().scarce(rule);
  }
  // What was made once stays: requests may be on their way.
  if ((has_homes || has_scarce) && !forwarder_) {
    forwarder_ = std::make_unique<Forwarder>(engine_, options_, *this);
  }
  state_.has_home_rules = has_homes;
  state_.asks_for_rights = forwarder_ != nullptr;
}

void Coordinator::pump() {
  if (forwarder_) forwarder_->pump();
}

/// Some of its rules are decided by another member, or it came before and others were asked.
bool Coordinator::is_away(const Request& request) {
  if (!forwarder_) return false;
  return (state_.has_home_rules && forwarder_->concerns(request)) || forwarder_->knows(request);
}

/// Others may have what is missing here.
bool Coordinator::lacks_rights(const Decision& decision) const {
  return forwarder_ && !decision.allowed &&
         std::any_of(decision.statuses.begin(), decision.statuses.end(),
                     [](const RuleStatus& status) { return status.exhausted_locally; });
}

/// It is not decided now, and why.
bool Coordinator::refused(const Request& request, Error& error) {
  error = state_.stopping ? stopping() : engine_.shed(request, wall_());
  if (!error.empty() || !state_.has_home_rules) return !error.empty();
  if (std::string why = forwarder_->unsure(request); !why.empty()) {
    // Whoever asks for another node is to fall back on what its rules say.
    const bool served = !request.rule_filter.empty();
    error = {served ? ErrorKind::unavailable : ErrorKind::closed, std::move(why)};
  }
  return !error.empty();
}

/// Tells `answer` once what it says is durable, if the decision promises that.
template <typename Answer>
void Coordinator::once_durable(const Decision& decision, Answer answer,
                               std::function<void(Answer)> done) {
  if (!decision.wants_commit) return done(std::move(answer));
  const bool open = open_on_failure(decision, *engine_.limiter().rules(decision.version));
  when_durable(
      [answer = std::move(answer), open, done = std::move(done)](bool durable) mutable {
        if (!durable) not_durable(decision_of(answer), open);
        done(std::move(answer));
      },
      1);
}

void Coordinator::finish(const Decision& decision, const Request& request,
                         std::function<void(Reply)> done) {
  Reply reply;
  tell(decision, *engine_.limiter().rules(decision.version), reply);
  if (request.wants_bound) tell_bound(engine_, decision, wall_(), reply);
  if (request.kind == RequestKind::refund) reply.given_back = decision.given_back;
  once_durable(decision, std::move(reply), std::move(done));
}

void Coordinator::check(rpc::CheckItem item, std::function<void(Reply)> done) {
  AsRequest as(item);
  Reply reply;
  if (refused(as.request, reply.error)) return done(std::move(reply));
  const bool refund = as.request.kind == RequestKind::refund;
  if (refund && forwarder_) {
    // An older home would take it for a check.
    if (std::string where = forwarder_->remote_home(as.request); !where.empty()) {
      reply.fail(ErrorKind::unsupported, where + ": give back there");
      return done(std::move(reply));
    }
  }
  if (!refund && is_away(as.request)) return forwarder_->decide(std::move(item), std::move(done));
  Decision decision;
  engine_.warm(as.request, wall_());
  engine_.check(as.request, wall_(), decision);
  if (lacks_rights(decision) && forwarder_->pass_on(as.request, decision, done)) return;
  finish(decision, as.request, std::move(done));
}

void Coordinator::pass_on(const rpc::CheckItem& item, const Decision& denied, Reply answer,
                          std::function<void(Reply)> done) {
  AsRequest as(item);
  Limiter& limiter = engine_.limiter();
  // By the rules that denied it, or not at all: their numbers may mean others by now.
  const bool same_rules = limiter.rules(denied.version) == limiter.rules();
  const bool may = !state_.stopping && forwarder_ && same_rules;
  if (may && forwarder_->pass_on(as.request, denied, done)) return;
  done(std::move(answer));
}

void Coordinator::reserve(rpc::CheckItem item, Nanos timeout, TicketHolder holder,
                          std::function<void(ReserveReply)> done) {
  AsRequest as(item);
  ReserveReply reply;
  if (refused(as.request, reply.decision.error)) return done(std::move(reply));
  if (std::string where = forwarder_ ? forwarder_->remote_home(as.request) : std::string();
      !where.empty()) {
    reply.decision.fail(ErrorKind::unsupported, where + ": reserve there");
    return done(std::move(reply));
  }
  Decision decision;
  engine_.warm(as.request, wall_());
  Ticket ticket = engine_.reserve(as.request, wall_(), timeout, decision, holder);
  tell(decision, *engine_.limiter().rules(decision.version), reply.decision);
  reply.ticket = engine_.ticket_name(ticket);
  // What is held is not durable; without a ticket it was counted, as by a check.
  once_durable(decision, std::move(reply), std::move(done));
}

void Coordinator::lease(rpc::CheckItem item, LeaseTerms terms,
                        std::function<void(LeaseReply)> done) {
  AsRequest as(item);
  LeaseReply reply;
  if (refused(as.request, reply.decision.error)) return done(std::move(reply));
  // What others decide is not leased.
  auto decided = [done](Reply decision) {
    LeaseReply out;
    out.decision = std::move(decision);
    done(std::move(out));
  };
  if (is_away(as.request)) return forwarder_->decide(std::move(item), decided);
  Decision decision;
  engine_.warm(as.request, wall_());
  Lease lease = engine_.lease(as.request, terms, wall_(), decision);
  if (lacks_rights(decision) && forwarder_->pass_on(as.request, decision, decided)) return;
  tell(decision, *engine_.limiter().rules(decision.version), reply.decision);
  reply.ticket = engine_.ticket_name(lease.ticket);
  reply.hits = lease.hits;
  reply.term = lease.term;
  once_durable(decision, std::move(reply), std::move(done));
}

void Coordinator::when_durable(std::function<void(bool)> done, std::size_t requests) {
  engine_.when_durable(std::move(done), requests);
  soon_();
}

// What other members ask.

void Coordinator::serve(const std::vector<rpc::CheckItem>& items,
                        std::function<void(std::vector<Reply>)> done) {
  struct Call {
    std::vector<Reply> replies;
    std::size_t open = 0;
    std::function<void(std::vector<Reply>)> done;
  };
  auto call = std::make_shared<Call>();
  call->replies.resize(items.size());
  call->open = items.size();
  call->done = std::move(done);
  if (items.empty()) return call->done({});
  for (std::size_t i = 0; i < items.size(); ++i) {
    serve(items[i], [call, i](Reply reply) {
      call->replies[i] = std::move(reply);
      if (--call->open == 0) call->done(std::move(call->replies));
    });
  }
}

void Coordinator::serve(const rpc::CheckItem& item, std::function<void(Reply)> done) {
  AsRequest as(item);
  const std::vector<std::string_view> rule_filter(item.rule_filter.begin(), item.rule_filter.end());
  as.request.rule_filter = rule_filter;
  as.request.demand_counted = true;
  Reply reply;
  if (refused(as.request, reply.error)) return done(std::move(reply));
  reply.error = forwarder_
                    ? forwarder_->refuse(as.request)
                    : Error{ErrorKind::unavailable, "no rule is decided for other nodes here"};
  if (!reply.error.empty()) return done(std::move(reply));
  Decision decision;
  engine_.warm(as.request, wall_());
  engine_.check(as.request, wall_(), decision);
  finish(decision, as.request, std::move(done));
}

void Coordinator::serve_reserve(const rpc::CheckItem& item, Nanos timeout,
                                std::function<void(ReserveReply)> done) {
  AsRequest as(item);
  const std::vector<std::string_view> rule_filter(item.rule_filter.begin(), item.rule_filter.end());
  as.request.rule_filter = rule_filter;
  as.request.demand_counted = true;
  ReserveReply reply;
  if (refused(as.request, reply.decision.error)) return done(std::move(reply));
  reply.decision.error =
      forwarder_ ? forwarder_->refuse(as.request)
                 : Error{ErrorKind::unavailable, "no rule is decided for other nodes here"};
  if (!reply.decision.error.empty()) return done(std::move(reply));
  Decision decision;
  engine_.warm(as.request, wall_());
  Ticket ticket = engine_.reserve(as.request, wall_(), timeout, decision);
  tell(decision, *engine_.limiter().rules(decision.version), reply.decision);
  reply.ticket = engine_.ticket_name(ticket);
  once_durable(decision, std::move(reply), std::move(done));
}

void Coordinator::serve_settle(std::string_view ticket, std::uint64_t hits,
                               std::function<void(SettleReply)> done) {
  SettleReply reply;
  if (state_.stopping) {
    reply.error = stopping();
    return done(std::move(reply));
  }
  Settled settled = engine_.settle(engine_.ticket_named(ticket), hits, wall_());
  reply.settled = settled.known;
  reply.reserved = settled.hits;
  reply.lapsed = settled.lapsed;
  if (!settled.wants_commit) return done(std::move(reply));
  when_durable(
      [reply, done = std::move(done)](bool durable) mutable {
        reply.degraded = !durable;
        done(std::move(reply));
      },
      1);
}

// What this node asks others. An answer that comes when the node stops is nobody's any more.

void Coordinator::forward(std::size_t member, rpc::CheckItem item, Nanos patience,
                          std::function<void(Reply)> done) {
  links_.ask(member, std::move(item), patience, [this, done = std::move(done)](Reply reply) {
    if (!state_.stopping) done(std::move(reply));
  });
}

void Coordinator::forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout,
                                  Nanos patience, std::function<void(ReserveReply)> done) {
  links_.ask_reserve(member, std::move(item), timeout, patience,
                     [this, done = std::move(done)](ReserveReply reply) {
                       if (!state_.stopping) done(std::move(reply));
                     });
}

void Coordinator::forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                                 std::function<void(SettleReply)> done) {
  links_.ask_settle(member, std::move(ticket), hits, options_.deadline,
                    [this, done = std::move(done)](SettleReply reply) {
                      if (!state_.stopping) done(std::move(reply));
                    });
}

}  // namespace weir::node
