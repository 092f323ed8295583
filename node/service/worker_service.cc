#include <weir/node/service/worker_service.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <weir/limits/text/utf8.h>
#include <weir/node/access/access.h>

namespace weir::node {
namespace {

Error stopping() {
  return {ErrorKind::unavailable, "stopping"};
}

/// What a caller did that may not. A domain may be anything: it is told whole to nobody.
std::string checking(std::string_view domain) {
  constexpr std::size_t kShown = 64;
  return "check \"" + internal::printable(domain.substr(0, kShown)) + "\"";
}

/// The memory of a call of more requests is not kept for the next one.
constexpr std::size_t kKeptReplies = 256;

}  // namespace

struct WorkerService::Waiting final : Pending {
  struct Late {
    std::size_t index = 0;  // in the part
    bool open = false;      // on failure
  };
  std::size_t part = 0;
  std::vector<Reply> replies;
  std::vector<Late> uncommitted;
  std::size_t open = 0;  // answers that are still to come
  CallerBudgets::Hold hold;
  std::shared_ptr<CheckDone> done;
};

template <typename Answer>
struct WorkerService::Asked final : Pending {
  Done<Answer> done;
  CallerBudgets::Hold hold;
};

struct WorkerService::Uncommitted final : Pending {
  std::vector<AfterCommit> calls;
};

/// The way back from the main loop. Tasks there hold it, and it may outlive the service: then it
/// leads nowhere. For the main loop's thread, or while that waits.
struct WorkerService::Crossing {
  void send(std::function<void()> task) {
    if (home) home->send(std::move(task));
  }
  std::optional<rpc::Mailbox> home;
};

WorkerService::WorkerService(rpc::EventLoop& loop, rpc::EventLoop& main_loop, Engine& engine,
                             Coordinator& coordinator, CallerBudgets& budgets,
                             const MainLoopAnswers& answers, std::function<Nanos()> wall)
    : loop_(loop),
      engine_(engine),
      coordinator_(coordinator),
      budgets_(budgets),
      state_(coordinator.state()),
      answers_(answers),
      wall_(std::move(wall)),
      to_main_(loop, main_loop),
      crossing_(std::make_shared<Crossing>()) {
  crossing_->home.emplace(main_loop, loop);
}

WorkerService::~WorkerService() {
  if (!uncommitted_.empty()) loop_.forget(*this);
  crossing_->home.reset();
}

/// Gives it its number.
template <typename Kind>
Kind& WorkerService::keep(std::unique_ptr<Kind> pending) {
  Kind& kept = *pending;
  kept.number = ++numbers_;
  pending_.emplace(kept.number, std::move(pending));
  return kept;
}

/// Each answer comes once.
std::unique_ptr<WorkerService::Pending> WorkerService::take(std::uint64_t number) {
  return std::move(pending_.extract(number).mapped());
}

/// It is not decided now, or not for this caller, and why.
bool WorkerService::refused(const Request& request, const Caller& caller, Nanos wall,
                            Error& error) {
  if (!caller.may_check(request.domain)) [[unlikely]] {
    error = deny(caller, checking(request.domain));
  } else if (state_.stopping.load(std::memory_order_relaxed)) [[unlikely]] {
    error = stopping();
  } else if (engine_.overloaded(wall)) [[unlikely]] {
    error = engine_.shed(request, wall);
  } else {
    error.kind = ErrorKind::none;
  }
  if (budgets_.any_full() && error.empty()) [[unlikely]]
    error = over_budget(request, caller, wall);
  return !error.empty();
}

/// Why it should not be decided now: it may have to wait, and as many of its caller do as may.
Error WorkerService::over_budget(const Request& request, const Caller& caller, Nanos wall) {
  if (!budgets_.full(engine_.caller_of(caller.owner()))) return {};
  if (!may_be_away(request) && !engine_.may_wait_for_disk(request, wall)) return {};
  budgets_.refused();
  return {ErrorKind::overloaded,
          std::to_string(budgets_.most_waiting()) + " requests of this caller wait already"};
}

/// For a call that waits.
CallerBudgets::Hold WorkerService::hold_for(const Caller& caller, std::size_t requests) {
  CallerBudgets::Hold hold = budgets_.hold(engine_.caller_of(caller.owner()));
  for (std::size_t i = 0; i < requests; ++i) hold.add();
  return hold;
}

/// Another member may have to decide it, which the main loop finds out. Nearly always false, and
/// then cheap.
bool WorkerService::may_be_away(const Request& request) {
  if (!request.id.empty() && state_.asks_for_rights.load(std::memory_order_relaxed)) return true;
  if (!state_.has_home_rules.load(std::memory_order_relaxed)) [[likely]]
    return false;
  const std::shared_ptr<const RuleSet> rules = engine_.limiter().rules();
  std::vector<std::uint32_t> matched;
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    rules->match(request.part(i), matched);
    const bool home = std::any_of(matched.begin(), matched.end(), [&](std::uint32_t index) {
      return rules->rules()[index].enforcement == Enforcement::home;
    });
    if (home) return true;
  }
  return false;
}

/// Others may have what is missing here.
bool WorkerService::lacks_rights(const Decision& decision) const {
  return !decision.allowed && state_.asks_for_rights.load(std::memory_order_relaxed) &&
         std::any_of(decision.statuses.begin(), decision.statuses.end(),
                     [](const RuleStatus& status) { return status.exhausted_locally; });
}

/// Null: so many others came into force meanwhile that they are forgotten.
const RuleSet* WorkerService::rules_of(const Decision& decision) {
  if (decision.version != version_) [[unlikely]] {
    rules_ = engine_.limiter().rules(decision.version);
    version_ = rules_ == nullptr ? 0 : decision.version;
  }
  return rules_.get();
}

/// Walks through requests in order, and knows to which part each belongs.
class WorkerService::Walk {
 public:
  explicit Walk(std::span<const std::size_t> parts) : parts_(parts) {}
  /// Of the request at `index`, which is not before the one asked for last.
  Place at(std::size_t index) {
    while (index - begin_ >= parts_[part_]) begin_ += parts_[part_++];
    return {part_, index - begin_};
  }

 private:
  std::span<const std::size_t> parts_;
  std::size_t part_ = 0;
  std::size_t begin_ = 0;
};

void WorkerService::check(std::span<const Request> requests, std::span<const std::size_t> parts,
                          const Caller& caller, CheckDone done) {
  const Nanos wall = wall_();
  replies_.resize(requests.size());
  caller_ = &caller;
  parts_ = parts.size();
  const std::span<const Request> here = sort_out(requests, parts, caller, wall);
  if (decisions_.size() < here.size()) decisions_.resize(here.size());
  engine_.check(here, wall, std::span(decisions_.data(), here.size()));
  const bool all = here.size() == requests.size();
  Walk walk(parts);
  for (std::size_t k = 0; k < here.size(); ++k) {
    const std::size_t index = all ? k : where_[k];
    finish(here[k], decisions_[k], replies_[index], walk.at(index), wall);
  }
  tell_parts(parts, std::move(done));
  if (requests.size() > kKeptReplies) {
    replies_ = {};
    decisions_ = {};
  }
}

/// Tells the parts of which nothing waits; the others keep their replies so far.
void WorkerService::tell_parts(std::span<const std::size_t> parts, CheckDone done) {
  std::size_t begin = 0;
  const auto next = [&](std::size_t part) {
    return std::span(replies_).subspan(std::exchange(begin, begin + parts[part]), parts[part]);
  };
  if (waiting_.empty()) {
    for (std::size_t part = 0; part < parts.size(); ++part) done(part, next(part));
    return;
  }
  // Told parts may end what `done` belongs to, but not `done` while parts of it wait.
  auto shared = std::make_shared<CheckDone>(std::move(done));
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const auto replies = next(part);
    if (Waiting* waiting = waiting_[part]) {
      waiting->part = part;
      waiting->done = shared;
      waiting->replies.assign(std::make_move_iterator(replies.begin()),
                              std::make_move_iterator(replies.end()));
    } else {
      (*shared)(part, replies);
    }
  }
  waiting_.clear();
}

/// Which of a call's requests are decided here: nearly always all, as they are. Others are refused,
/// or go to the main loop.
std::span<const Request> WorkerService::sort_out(std::span<const Request> requests,
                                                 std::span<const std::size_t> parts,
                                                 const Caller& caller, Nanos wall) {
  bool all = true;
  Walk walk(parts);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const bool not_now = refused(requests[i], caller, wall, replies_[i].error);
    const bool away = !not_now && may_be_away(requests[i]);
    if (!not_now && !away) [[likely]] {
      if (!all) keep_here(requests[i], i);
      continue;
    }
    if (std::exchange(all, false)) {
      here_.clear();
      where_.clear();
      for (std::size_t k = 0; k < i; ++k) keep_here(requests[k], k);
    }
    if (not_now) {
      const Error why = std::move(replies_[i].error);
      replies_[i].fail(why.kind, why.detail);
    } else {
      coordinator_decides(requests[i], walk.at(i));
    }
  }
  return all ? requests : std::span<const Request>(here_);
}

void WorkerService::keep_here(const Request& request, std::size_t index) {
  here_.push_back(request);
  where_.push_back(index);
}

void WorkerService::coordinator_decides(const Request& request, Place place) {
  to_main_.send([&main = coordinator_, item = rpc::item_of(request), done = reply_to(place)] {
    main.check(item, done);
  });
}

/// What was decided here, as it is told; or who else has a say.
void WorkerService::finish(const Request& request, const Decision& decision, Reply& reply,
                           Place place, Nanos wall) {
  // Counts that are missing here are brought by the main loop.
  if (decision.version == 0) [[unlikely]]
    return coordinator_decides(request, place);
  const RuleSet* rules = rules_of(decision);
  if (rules == nullptr) [[unlikely]] {
    return reply.fail(ErrorKind::unknown, "the rules changed too often meanwhile");
  }
  tell(decision, *rules, reply);
  if (request.wants_bound) [[unlikely]]
    tell_bound(engine_, decision, wall, reply);
  if (request.kind == RequestKind::refund) [[unlikely]]
    reply.given_back = decision.given_back;
  if (lacks_rights(decision)) [[unlikely]] {
    to_main_.send([&main = coordinator_, item = rpc::item_of(request), decision, answer = reply,
                   done = reply_to(place)] { main.pass_on(item, decision, answer, done); });
  } else if (decision.wants_commit) {
    Waiting& waiting = waiting_for(place.part);
    if (waiting.uncommitted.empty()) {
      ++waiting.open;
      await_commit([this, part = &waiting](bool durable) { committed(*part, durable); });
    }
    ++uncommitted_requests_;
    waiting.hold.add();
    waiting.uncommitted.push_back({place.index, open_on_failure(decision, *rules)});
  }
}

WorkerService::Waiting& WorkerService::waiting_for(std::size_t part) {
  if (waiting_.empty()) waiting_.resize(parts_);
  if (waiting_[part] == nullptr) {
    waiting_[part] = &keep(std::make_unique<Waiting>());
    waiting_[part]->hold = hold_for(*caller_, 0);
  }
  return *waiting_[part];
}

/// One reply of a part will come from the main loop: what that calls there, once.
std::function<void(Reply)> WorkerService::reply_to(Place place) {
  Waiting& waiting = waiting_for(place.part);
  ++waiting.open;
  waiting.hold.add();
  return [this, index = place.index, number = waiting.number, way = crossing_](Reply reply) {
    way->send([this, index, number, reply = std::move(reply)]() mutable {
      auto& part = static_cast<Waiting&>(*pending_.at(number));
      part.replies[index] = std::move(reply);
      arrived(part);
    });
  };
}

void WorkerService::committed(Waiting& part, bool durable) {
  for (const Waiting::Late& one : part.uncommitted) {
    if (!durable) not_durable(part.replies[one.index], one.open);
  }
  arrived(part);
}

void WorkerService::arrived(Waiting& part) {
  if (--part.open > 0) return;
  const std::unique_ptr<Pending> last = take(part.number);
  (*part.done)(part.part, part.replies);
}

/// All that is decided in this turn waits for one commit.
void WorkerService::await_commit(AfterCommit done) {
  if (uncommitted_.empty()) loop_.flush_later(*this);
  uncommitted_.push_back(std::move(done));
}

void WorkerService::flush() noexcept {
  Uncommitted& batch = keep(std::make_unique<Uncommitted>());
  batch.calls.swap(uncommitted_);
  const std::size_t requests = std::exchange(uncommitted_requests_, 0);
  to_main_.send([this, &main = coordinator_, number = batch.number, requests, way = crossing_] {
    auto told = [this, number, way](bool durable) {
      way->send([this, number, durable] {
        const std::unique_ptr<Pending> pending = take(number);
        for (AfterCommit& call : static_cast<Uncommitted&>(*pending).calls) call(durable);
      });
    };
    main.when_durable(told, requests);
  });
}

/// What the main loop calls, once, with an answer that goes to `done` here.
template <typename Answer>
std::function<void(Answer)> WorkerService::back(const Caller& caller, Done<Answer> done) {
  Asked<Answer>& asked = keep(std::make_unique<Asked<Answer>>());
  asked.done = std::move(done);
  asked.hold = hold_for(caller, 1);
  return [this, number = asked.number, way = crossing_](Answer answer) {
    way->send([this, number, answer = std::move(answer)]() mutable {
      const std::unique_ptr<Pending> pending = take(number);
      static_cast<Asked<Answer>&>(*pending).done(answer);
    });
  };
}

void WorkerService::reserve(const Request& request, Nanos timeout, const Caller& caller,
                            Done<ReserveReply> done) {
  const Nanos wall = wall_();
  const TicketHolder holder{engine_.caller_of(caller.owner())};
  ReserveReply reply;
  if (refused(request, caller, wall, reply.decision.error)) return done(reply);
  Decision decision;
  Ticket ticket;
  const bool away = may_be_away(request);
  if (!away) ticket = engine_.reserve(request, wall, timeout, decision, holder);
  // Others decide it, or counts that are missing here are brought by the main loop.
  if (away || decision.version == 0) {
    to_main_.send([&main = coordinator_, item = rpc::item_of(request), timeout, holder,
                   tell_it = back(caller, std::move(done))] {
      main.reserve(item, timeout, holder, tell_it);
    });
    return;
  }
  const RuleSet* rules = rules_of(decision);
  if (rules == nullptr) {
    reply.decision.fail(ErrorKind::unknown, "the rules changed too often meanwhile");
    return done(reply);
  }
  tell(decision, *rules, reply.decision);
  if (request.wants_bound) tell_bound(engine_, decision, wall, reply.decision);
  reply.ticket = engine_.ticket_name(ticket);
  // What is held is not durable; without a ticket it was counted, as by a check.
  if (!decision.wants_commit) return done(reply);
  ++uncommitted_requests_;
  await_commit([reply = std::move(reply), done = std::move(done), hold = hold_for(caller, 1),
                open = open_on_failure(decision, *rules)](bool durable) mutable {
    if (!durable) not_durable(reply.decision, open);
    done(reply);
  });
}

void WorkerService::settle(std::string_view ticket, std::uint64_t hits, const Caller& caller,
                           Done<SettleReply> done) {
  SettleReply reply;
  if (!caller.may_check()) {
    reply.error = deny(caller, "settle");
    return done(reply);
  }
  if (state_.stopping.load(std::memory_order_relaxed)) {
    reply.error = stopping();
    return done(reply);
  }
  const Settled settled = engine_.settle(engine_.ticket_named(ticket), hits, wall_(),
                                         engine_.caller_of(caller.owner()));
  reply.settled = settled.known;
  reply.reserved = settled.hits;
  reply.lapsed = settled.lapsed;
  if (!settled.wants_commit) return done(reply);
  ++uncommitted_requests_;
  await_commit([reply, done = std::move(done), hold = hold_for(caller, 1)](bool durable) mutable {
    reply.degraded = !durable;
    done(reply);
  });
}

void WorkerService::lease(const Request& request, const LeaseTerms& asked, const Caller& caller,
                          Done<LeaseReply> done) {
  if (!caller.may_check(request.domain)) {
    LeaseReply reply;
    const Error error = deny(caller, checking(request.domain));
    reply.decision.fail(error.kind, error.detail);
    return done(reply);
  }
  if (budgets_.any_full()) [[unlikely]] {
    if (const Error error = over_budget(request, caller, wall_()); !error.empty()) {
      LeaseReply reply;
      reply.decision.fail(error.kind, error.detail);
      return done(reply);
    }
  }
  LeaseTerms terms = asked;
  terms.caller = engine_.caller_of(caller.owner());
  // Where no reload can come in between. One lease stands for many requests.
  to_main_.send([&main = coordinator_, item = rpc::item_of(request), terms,
                 tell_it = back(caller, std::move(done))] { main.lease(item, terms, tell_it); });
}

void WorkerService::rules(std::string_view known, const Caller& caller, Done<RulesReply> done) {
  if (!caller.may_read()) {
    RulesReply reply;
    reply.error = deny(caller, "read the rules");
    return done(reply);
  }
  to_main_.send([&main = answers_, known = std::string(known),
                 tell_it = back(caller, std::move(done))] { tell_it(main.rules(known)); });
}

void WorkerService::status(const Caller& caller, Done<StatusReply> done) {
  if (!caller.may_read()) {
    StatusReply reply;
    reply.error = deny(caller, "read the status");
    return done(reply);
  }
  if (!budgets_.take_report(engine_.caller_of(caller.owner()), wall_())) {
    StatusReply reply;
    reply.error = {ErrorKind::overloaded, std::to_string(budgets_.reports_per_second()) +
                                              " calls of this caller in this second already"};
    return done(reply);
  }
  to_main_.send([&main = answers_, tell_it = back(caller, std::move(done))] {
    main.status([tell_it](std::string json) { tell_it({{}, std::move(json)}); });
  });
}

}  // namespace weir::node
