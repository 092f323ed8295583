#include <weir/limits/lease.h>
#include <weir/limits/replica_side.h>

#include <atomic>
#include <list>
#include <memory>
#include <thread>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// Requests that come again, and reservations.
namespace weir::laws {
namespace {

constexpr std::string_view kKeys[] = {"a", "b"};

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1, std::string_view id = {},
               std::string_view domain = "api")
      : entries{{"key", key}} {
    request = {domain, entries, hits, id};
  }
};

/// A rule that is kept small, so that requests are denied now and then.
Rule plain_rule(std::string name) {
  Rule rule = *rules_named(std::move(name)).as("rule");
  rule.cost_by_method.clear();
  return rule;
}

/// Two threads go on from here within nanoseconds of each other, if both have a core.
class Meeting {
 public:
  /// `times` is the caller's own count of its meetings.
  void wait(int& times) {
    ++arrived_;
    ++times;
    for (int spins = 0; arrived_ < 2 * times; ++spins) {
      if (spins > 2000) std::this_thread::yield();
    }
  }

 private:
  std::atomic<int> arrived_{0};
};

// Request ids.

void assert_same(const Decision& one, const Decision& other) {
  RC_ASSERT(one.allowed == other.allowed);
  RC_ASSERT(one.deciding == other.deciding);
  RC_ASSERT(one.wants_commit == other.wants_commit);
  RC_ASSERT(one.repeated == other.repeated);
  RC_ASSERT(one.statuses.size() == other.statuses.size());
  for (std::size_t i = 0; i < one.statuses.size(); ++i) {
    const RuleStatus& a = one.statuses[i];
    const RuleStatus& b = other.statuses[i];
    RC_ASSERT(a.rule == b.rule);
    RC_ASSERT(a.allowed == b.allowed);
    RC_ASSERT(a.shadow == b.shadow);
    RC_ASSERT(a.degraded == b.degraded);
    RC_ASSERT(a.limit == b.limit);
    RC_ASSERT(a.remaining == b.remaining);
    RC_ASSERT(a.reset == b.reset);
    RC_ASSERT(a.retry_after == b.retry_after);
    RC_ASSERT(a.delay == b.delay);
  }
}

LAW(43, "the same request id counts once", "a repeat", "a repeat with other hits",
    "a denied id that passed later", "an id of two domains", "after its time", "just before it",
    "forgotten for want of room", "a repeat within a batch", "a reservation again", "a peek") {
  std::vector<Rule> rules;
  for (const char* domain : {"api", "app"}) {
    for (std::size_t i = *between<std::size_t>(1, 2).as("rules"); i > 0; --i) {
      rules.push_back(plain_rule("r" + std::to_string(i)));
      rules.back().domain = domain;
      if (*chance(30)) rules.back().durability = Durability::commit;
    }
  }
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {1, 1};
  Limiter twin(rule_set(rules), options);  // is asked only what is new
  options.max_request_ids = *one_of<std::size_t>({2, 3, 5, 100}).as("room");
  options.request_id_ttl = *one_of<Nanos>({2 * kSecond, kMinute}).as("ttl");
  Limiter limiter(rule_set(rules), options);

  struct Known {
    std::string domain, id;
    Nanos until;
    Decision decision;
    Ticket ticket;
  };
  std::list<Known> known;  // oldest first
  std::set<std::pair<std::string, std::string>> denied, gone, evicted;
  Nanos now = kStart;
  struct One {
    std::string domain, id, key;
    std::uint64_t hits;
  };
  auto draw = [] {
    return One{*chance(30) ? "app" : "api",
               *chance(75) ? std::to_string(*between(0, 5)) : std::string(),
               std::string(kKeys[*choice(2)]),
               *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {2, 3}, {1, 0}})};
  };
  Ticket expected_ticket;
  auto expect = [&](const One& one, bool reserve) {
    std::pair<std::string, std::string> name{one.domain, one.id};
    auto is_this = [&](const Known& k) { return k.domain == one.domain && k.id == one.id; };
    auto found = std::find_if(known.begin(), known.end(), is_this);
    if (!one.id.empty() && found != known.end()) {
      reached("just before it", now == found->until - 1);
      if (now < found->until) {
        Decision again = found->decision;
        again.repeated = true;
        expected_ticket = found->ticket;
        reached("a repeat");
        reached("a peek", one.hits == 0);
        reached("a reservation again", reserve && static_cast<bool>(found->ticket));
        return again;
      }
      known.erase(found);
      gone.insert(name);
    }
    Decision decision;
    Ask ask(one.key, one.hits, {}, one.domain);
    expected_ticket = {};
    if (reserve) {
      expected_ticket = twin.reserve(ask.request, now, kDay, decision);
    } else {
      twin.check(ask.request, now, decision);
    }
    bool consumed = false;
    for (const RuleStatus& status : decision.statuses) {
      consumed |=
          decision.allowed && status.allowed && one.hits > 0 && rules[status.rule].default_cost > 0;
    }
    if (one.id.empty()) return decision;
    if (!decision.allowed) denied.insert(name);
    if (!consumed) return decision;
    reached("a denied id that passed later", denied.contains(name));
    reached("after its time", gone.contains(name));
    reached("forgotten for want of room", evicted.contains(name));
    reached("an id of two domains", std::any_of(known.begin(), known.end(), [&](const Known& k) {
              return k.id == one.id && k.domain != one.domain;
            }));
    if (known.size() == options.max_request_ids) {
      evicted.insert({known.front().domain, known.front().id});
      known.pop_front();
    }
    known.push_back({one.domain, one.id, now + options.request_id_ttl, decision, expected_ticket});
    return decision;
  };
  std::map<std::pair<std::string, std::string>, std::uint64_t> first_hits;
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    now += *rc::gen::weightedOneOf<Nanos>({{6, between<Nanos>(0, 100 * kMillisecond)},
                                           {2, between<Nanos>(0, 3 * kSecond)},
                                           {1, one_of<Nanos>({kMinute, kDay})}});
    // To the very end of an id's time.
    if (!known.empty() && *chance(20)) {
      now = std::max(now, known.front().until - *one_of<Nanos>({0, 1}));
    }
    if (*chance(20)) {
      std::vector<One> batch;
      for (int i = *between(2, 5); i > 0; --i) {
        batch.push_back(!batch.empty() && *chance(40) ? batch.back() : draw());
      }
      std::vector<Ask> asks;
      for (const One& one : batch) asks.emplace_back(one.key, one.hits, one.id, one.domain);
      std::vector<Request> requests;
      for (const Ask& ask : asks) {
        requests.push_back(ask.request);
        requests.back().descriptor = ask.entries;
      }
      std::vector<Decision> got(batch.size());
      limiter.check(requests, now, got);
      for (std::size_t i = 0; i < batch.size(); ++i) {
        Decision wanted = expect(batch[i], false);
        assert_same(got[i], wanted);
        reached("a repeat within a batch",
                wanted.repeated && i > 0 && batch[i].id == batch[i - 1].id);
      }
    } else {
      One one = draw();
      bool reserve = *chance(20);
      Decision got;
      Ticket ticket;
      Ask ask(one.key, one.hits, one.id, one.domain);
      if (reserve) {
        ticket = limiter.reserve(ask.request, now, kDay, got);
      } else {
        limiter.check(ask.request, now, got);
      }
      Decision wanted = expect(one, reserve);
      assert_same(got, wanted);
      if (reserve) RC_ASSERT(ticket == expected_ticket);
      auto [first, fresh] = first_hits.try_emplace({one.domain, one.id}, one.hits);
      reached("a repeat with other hits", wanted.repeated && first->second != one.hits);
    }
    if (*chance(10)) {
      limiter.sweep(now - kHour);
      twin.sweep(now - kHour);
    }
    // Nothing else was consumed, and nothing less.
    for (std::string_view domain : {"api", "app"}) {
      for (std::string_view key : kKeys) {
        assert_same(limiter.check(Ask(key, 0, {}, domain).request, now),
                    twin.check(Ask(key, 0, {}, domain).request, now));
      }
    }
    std::size_t alive = 0;
    for (const Known& each : known) alive += now < each.until;
    RC_ASSERT(limiter.request_ids().held >= alive);
    RC_ASSERT(limiter.request_ids().held <= options.max_request_ids);
  }
}

LAW(43, "the same request id counts once, also when threads send it at once", "both threads first",
    "denied at the limit", "all passed", "several rules") {
  constexpr int kIds = 300;
  std::vector<Rule> rules;
  for (std::size_t i = *between<std::size_t>(1, 2).as("rules"); i > 0; --i) {
    Rule rule;
    rule.domain = "api";
    rule.name = "r" + std::to_string(i);
    rule.key = i == 2 ? std::vector<std::string>{} : std::vector<std::string>{"key"};
    rule.limit = *one_of<std::uint64_t>({kIds / 2, 10'000}).as("limit");
    rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::token_bucket,
                                         Algorithm::sliding_log})
                          .as("algorithm");
    if (rule.algorithm == Algorithm::sliding_log)
      rule.limit = std::min<std::uint64_t>(rule.limit, 150);
    rules.push_back(rule);
  }
  Limiter limiter(rule_set(rules), {});
  std::vector<std::string> ids;
  for (int i = 0; i < kIds; ++i) ids.push_back("request " + std::to_string(i));
  std::vector<int> consumed[2] = {std::vector<int>(kIds), std::vector<int>(kIds)};
  std::vector<int> passed[2] = {std::vector<int>(kIds), std::vector<int>(kIds)};
  Meeting meeting;
  auto run = [&](std::size_t thread) {
    Decision decision;
    auto send = [&](std::size_t i) {
      limiter.check(Ask("k", 1, ids[i]).request, kStart, decision);
      passed[thread][i] |= decision.allowed;
      consumed[thread][i] += decision.allowed && !decision.repeated;
    };
    int meetings = 0;
    send(thread);  // each is the first with one
    for (std::size_t i = 0; i < kIds; ++i) {
      if (i % 8 == 0) meeting.wait(meetings);
      send(i);
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  std::uint64_t total = 0;
  int firsts[2] = {};
  for (std::size_t i = 0; i < kIds; ++i) {
    RC_ASSERT(consumed[0][i] + consumed[1][i] <= 1);
    if (passed[0][i] || passed[1][i]) RC_ASSERT(consumed[0][i] + consumed[1][i] == 1);
    for (int thread : {0, 1}) firsts[thread] += consumed[thread][i];
  }
  total = static_cast<std::uint64_t>(firsts[0] + firsts[1]);
  for (std::uint32_t r = 0; r < rules.size(); ++r) {
    RC_ASSERT(limiter.used(r, Ask("k").request, kStart) == total);
  }
  RC_ASSERT(limiter.request_ids().held == total);
  reached("both threads first", firsts[0] > 0 && firsts[1] > 0);
  reached("denied at the limit", total < kIds);
  reached("all passed", total == kIds);
  reached("several rules", rules.size() > 1);
}

// Reservations.

LAW(42,
    "a reservation holds all or nothing, is published when it is settled, and counts what was "
    "used",
    "denied", "settled for less", "settled for more", "given back", "beyond the limit", "timed out",
    "after its window", "in a window that is read still", "swept while held", "rebased while held",
    "drained while held", "a bucket", "a log", "a sliding window", "a calendar", "several rules",
    "settled twice", "not replicated", "charged in a later window", "cut to the limit") {
  std::vector<Rule> rules;
  for (std::size_t i = *between<std::size_t>(1, 3).as("rules"); i > 0; --i) {
    Rule rule = plain_rule("r" + std::to_string(i));
    if (*chance(60) && !rule.calendar) rule.window = kSecond * 10;
    if (is_bucket(rule.algorithm) && rule.limit > 0 && rule.limit < 1000) {
      rule.window = std::min(rule.window, kMinute);
    }
    reached("a bucket", is_bucket(rule.algorithm));
    reached("a log", rule.algorithm == Algorithm::sliding_log);
    reached("a sliding window", rule.algorithm == Algorithm::sliding_window);
    reached("a calendar", rule.calendar.has_value());
    rules.push_back(std::move(rule));
  }
  reached("several rules", rules.size() > 1);
  LimiterOptions options;
  options.replicated = *chance(80).as("replicated");
  options.incarnation = {1, 1};
  reached("not replicated", !options.replicated);
  Limiter limiter(rule_set(rules), options);
  std::vector<std::map<std::string, Nanos>> phases(rules.size());
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    for (std::string_view key : kKeys) {
      phases[i][std::string(key)] =
          window_shape(limiter.rules()->rules()[i], limiter.series_of(i, Ask(key).request)).phase;
    }
  }
  limiter.check(Ask("other", 0).request, kStart);
  PlainLimiter model(rules, phases, kStart);

  struct Open {
    Ticket ticket;
    int number;
    std::string key;
    std::uint64_t hits;
    Nanos deadline;
    bool drained = false, swept = false, rebased = false;
  };
  std::vector<Open> open;
  std::vector<Ticket> settled;
  int numbers = 0;
  // What was handed over, by incarnation, cell and birth: totals, of which the last counts.
  std::map<std::tuple<crdt::Incarnation, crdt::CellId, std::uint64_t>, std::uint64_t> published;
  auto drain = [&] {
    std::vector<crdt::OwnCount> out;
    limiter.replica_side().drain(out, 10'000);
    for (const crdt::OwnCount& count : out) {
      published[{options.incarnation, count.cell, count.birth}] = count.value;
    }
    Uint128 sum = 0;
    for (const auto& [slot, value] : published) sum += value;
    if (options.replicated) RC_ASSERT(sum == model.consumed());
    for (Open& each : open) each.drained = true;
  };
  auto agree = [&] {
    for (std::string_view key : kKeys) {
      Decision peek = limiter.check(Ask(key, 0).request, model.now());
      for (std::size_t i = 0; i < rules.size(); ++i) {
        RC_ASSERT(peek.statuses[i].remaining == model.left(i, std::string(key)));
      }
    }
  };
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    Nanos now = model.now() +
                *rc::gen::weightedOneOf<Nanos>({{6, between<Nanos>(0, 300 * kMillisecond)},
                                                {3, between<Nanos>(0, 6 * kSecond)},
                                                {1, one_of<Nanos>({kMinute, 6 * kHour, 40 * kDay})},
                                                {1, between<Nanos>(-kSecond, 0)}});
    if (*chance(15)) now += kSecond - now % kSecond;
    std::string key(kKeys[*choice(2)]);
    std::uint64_t hits = *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {3, 2}, {1, 0}, {1, 7}});
    switch (*choice(8)) {
      case 0: {
        PlainLimiter::Answer wanted = model.check(key, hits, false, now);
        Decision got = limiter.check(Ask(key, hits).request, now);
        RC_ASSERT(got.allowed == wanted.allowed);
        for (std::size_t i = 0; i < rules.size(); ++i) {
          RC_ASSERT(got.statuses[i].allowed == wanted.rules[i]);
          RC_ASSERT(got.statuses[i].remaining == wanted.remaining[i]);
        }
        break;
      }
      case 1:
      case 2:
      case 3: {
        Nanos timeout = *one_of<Nanos>({kSecond, 0, 10 * kSecond, kMinute, kDay});
        int number = ++numbers;
        PlainLimiter::Answer wanted = model.reserve(number, key, hits, now);
        Decision got;
        Ticket ticket = limiter.reserve(Ask(key, hits).request, now, timeout, got);
        RC_ASSERT(got.allowed == wanted.allowed);
        RC_ASSERT(!got.wants_commit);
        for (std::size_t i = 0; i < rules.size(); ++i) {
          RC_ASSERT(got.statuses[i].allowed == wanted.rules[i]);
          RC_ASSERT(got.statuses[i].remaining == wanted.remaining[i]);
        }
        RC_ASSERT(static_cast<bool>(ticket) == model.holds(number));
        if (ticket) open.push_back({ticket, number, key, hits, model.now() + timeout});
        reached("denied", !got.allowed);
        break;
      }
      case 4:
      case 5: {
        if (open.empty()) break;
        std::size_t which = *between<std::size_t>(0, open.size() - 1);
        Open one = open[which];
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
        std::uint64_t actual =
            *rc::gen::weightedOneOf<std::uint64_t>({{3, between<std::uint64_t>(0, one.hits)},
                                                    {2, between<std::uint64_t>(0, 3 * one.hits)},
                                                    {1, rc::gen::just<std::uint64_t>(0)},
                                                    {1, rc::gen::just<std::uint64_t>(200)}});
        bool counted = model.settle(one.number, actual, now);
        Settled got = limiter.settle(one.ticket, actual, now);
        RC_ASSERT(got.known);
        RC_ASSERT(got.hits == one.hits);
        RC_ASSERT(got.lapsed == !counted);
        settled.push_back(one.ticket);
        reached("settled for less", actual > 0 && actual < one.hits);
        reached("settled for more", actual > one.hits);
        reached("given back", actual == 0);
        reached("after its window", !counted);
        reached("charged in a later window", model.charged_late() > 0);
        reached("cut to the limit", model.cut() > 0);
        reached("in a window that is read still", counted && actual > 0);
        reached("swept while held", one.swept);
        reached("rebased while held", one.rebased);
        reached("drained while held", one.drained);
        for (std::size_t i = 0; i < rules.size(); ++i) {
          reached("beyond the limit",
                  actual > rules[i].limit && counted && model.left(i, one.key) == 0);
        }
        break;
      }
      case 6: {
        model.check(key, 0, false, now);
        std::size_t due = 0;
        std::erase_if(open, [&](const Open& one) {
          if (one.deadline > model.now()) return false;
          model.settle(one.number, one.hits, now);
          settled.push_back(one.ticket);
          ++due;
          return true;
        });
        RC_ASSERT(limiter.settle_due(now, 1000) == due);
        reached("timed out", due > 0);
        break;
      }
      default: {
        model.check(key, 0, false, now);
        limiter.check(Ask(key, 0).request, now);
        if (!settled.empty() && *chance(50)) {
          RC_ASSERT(!limiter.settle(settled.back(), 3, now).known);
          reached("settled twice");
        }
        if (*chance(50)) {
          limiter.sweep(model.now() - kSecond);
          for (Open& one : open) one.swept = true;
        }
        if (options.replicated && *chance(30)) {
          drain();
          crdt::Incarnation old = options.incarnation;
          options.incarnation.lo += 1;
          limiter.replica_side().rebase(options.incarnation,
                                        [&](const crdt::CellId& cell, const crdt::SlotId& slot) {
                                          RC_ASSERT(slot.writer == old);
                                          auto held = published.find({old, cell, slot.birth});
                                          return held == published.end() ? 0 : held->second;
                                        });
          for (Open& one : open) one.rebased = true;
        }
      }
    }
    RC_ASSERT(limiter.tickets().open == open.size());
    if (*chance(50)) drain();
    agree();
  }
  for (const Open& one : open) {
    std::uint64_t actual = *between<std::uint64_t>(0, 2 * one.hits);
    model.settle(one.number, actual, model.now());
    limiter.settle(one.ticket, actual, model.now());
  }
  drain();
  agree();
}

LAW(42, "reservations never exceed the limit together, also under concurrency", "a full rule",
    "denied", "a bucket", "a window", "tickets that both settle") {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm = *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::sliding_window,
                                       Algorithm::token_bucket, Algorithm::sliding_log})
                        .as("algorithm");
  rule.limit = *between<std::uint64_t>(5, 400).as("limit");
  rule.window = kHour;
  reached("a bucket", is_bucket(rule.algorithm));
  reached("a window", !is_bucket(rule.algorithm));
  Limiter limiter(rule_set({rule}), {});
  // Some tickets are settled by both threads: by whoever comes first.
  std::vector<Ticket> shared;
  Decision decision;
  for (int i = 0; i < 200; ++i) {
    Ticket ticket = limiter.reserve(Ask("shared", 1).request, kStart, kMinute, decision);
    if (ticket) shared.push_back(ticket);
  }
  std::atomic<std::uint64_t> counted{0};
  std::atomic<std::uint64_t> settlements{0};
  std::atomic<int> denials{0};
  Meeting meeting;
  std::atomic<bool> exceeded{false};
  int firsts[2] = {};
  auto run = [&](std::uint64_t thread) {
    auto settle = [&](Ticket ticket) {
      if (!limiter.settle(ticket, 2 + thread, kStart).known) return;
      ++firsts[thread];
      settlements += 2 + thread;
    };
    int meetings = 0;
    settle(shared[thread]);  // each is the first with one
    for (std::size_t i = 0; i < shared.size(); ++i) {
      if (i % 16 == 0) meeting.wait(meetings);
      settle(shared[i]);
    }
    Decision decided;
    std::vector<std::pair<Ticket, std::uint64_t>> open;
    for (std::uint64_t i = 0; i < 100; ++i) {
      std::uint64_t hits = 1 + (i + thread) % 5;
      Ticket ticket = limiter.reserve(Ask("k", hits).request, kStart, kMinute, decided);
      if (limiter.used(0, Ask("k").request, kStart) > rule.limit) exceeded = true;
      denials += !ticket;
      if (ticket) open.emplace_back(ticket, hits - i % 2);
      if (i % 3 == 0 || open.empty()) continue;
      auto [oldest, actual] = open.front();
      open.erase(open.begin());
      limiter.settle(oldest, actual, kStart);
      counted += actual;
    }
    for (auto [ticket, actual] : open) {
      limiter.settle(ticket, actual, kStart);
      counted += actual;
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  RC_ASSERT(!exceeded);
  RC_ASSERT(limiter.tickets().open == 0u);
  RC_ASSERT(limiter.used(0, Ask("k").request, kStart) == counted.load());
  RC_ASSERT(firsts[0] + firsts[1] == static_cast<int>(shared.size()));
  if (!is_bucket(rule.algorithm)) {  // a bucket's debt is cut
    RC_ASSERT(limiter.used(0, Ask("shared").request, kStart) == settlements.load());
  }
  reached("a full rule", counted == rule.limit);
  reached("denied", denials > 0);
  reached("tickets that both settle", firsts[0] > 0 && firsts[1] > 0);
}

/// Callers that hold tickets, and what they may hold.
struct Callers {
  struct Open {
    Ticket ticket;
    std::uint64_t caller, leased;
    std::string key;
    Nanos until;
  };
  Rule rule;
  LimiterOptions options;
  std::unique_ptr<Limiter> limiter;
  std::vector<Open> open;
  Nanos now = kStart;

  Callers() {
    rule.domain = "api";
    rule.name = "r";
    rule.key = {"key"};
    rule.algorithm = *one_of<Algorithm>(
        {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket});
    rule.limit = *one_of<std::uint64_t>({1, 10, 100, 5000}).as("limit");
    rule.window = kHour;
    rule.default_cost = *between<std::uint64_t>(1, 3);
    rule.on_failure = OnFailure::closed;
    options.max_tickets = *one_of<std::size_t>({1, 4, 20, 100}).as("tickets");
    options.caller_percent = *one_of<unsigned>({1, 25, 50, 100}).as("percent");
    limiter = std::make_unique<Limiter>(rule_set({rule}), options);
    reached("a bucket", is_bucket(rule.algorithm));
    reached("a window", !is_bucket(rule.algorithm));
  }
  std::uint64_t part_of(std::uint64_t all) const {
    return std::max<std::uint64_t>(1, all * options.caller_percent / 100);
  }
  std::size_t tickets_of(std::uint64_t caller) const {
    return static_cast<std::size_t>(std::count_if(
        open.begin(), open.end(), [&](const Open& one) { return one.caller == caller; }));
  }
  std::uint64_t leased_by(std::uint64_t caller, const std::string& key) const {
    std::uint64_t units = 0;
    for (const Open& one : open) units += one.caller == caller && one.key == key ? one.leased : 0;
    return units;
  }
  void reserve(std::uint64_t caller, const std::string& key) {
    const bool room = open.size() < options.max_tickets &&
                      (caller == 0 || tickets_of(caller) < part_of(options.max_tickets));
    Decision decision;
    Ticket ticket = limiter->reserve(Ask(key, 1).request, now, kMinute, decision, {caller, false});
    RC_ASSERT(static_cast<bool>(ticket) == (room && decision.allowed));
    if (!room) RC_ASSERT(!decision.allowed);
    if (ticket) open.push_back({ticket, caller, 0, key, now + kMinute});
  }
  void lease(std::uint64_t caller, const std::string& key) {
    LeaseTerms terms;
    terms.most = 1000;
    terms.part = *one_of<std::uint64_t>({1, 2, 16});
    terms.caller = caller;
    terms.term = kMinute;
    terms.grace = 0;
    Decision decision;
    Lease lease = grant_lease(*limiter, Ask(key, 1).request, terms, now, now, decision);
    if (!lease.ticket) return;
    reached("a lease");
    open.push_back({lease.ticket, caller, lease.hits * rule.default_cost, key, now + lease.term});
  }
  void settle() {
    now += *one_of<Nanos>({0, kSecond, 30 * kSecond});
    if (open.empty()) return;
    std::swap(open[*between<std::size_t>(0, open.size() - 1)], open.back());
    const Open& one = open.back();
    RC_ASSERT(limiter->settle(one.ticket, *between<std::uint64_t>(0, 1), now, one.caller).known);
    open.pop_back();
    reached("settled");
  }
  /// What remains of a key.
  std::uint64_t left(const std::string& key) const {
    const Decision decision = limiter->check(Ask(key, 0).request, now);
    return decision.statuses.empty() ? 0 : decision.statuses[0].remaining;
  }
  /// Somebody tries to settle what is another's: nothing changes.
  void meddle(std::uint64_t meddler) {
    if (open.empty()) return;
    const Open& one = open[*between<std::size_t>(0, open.size() - 1)];
    if (one.caller == meddler) return;
    const Settled got = limiter->settle(one.ticket, *between<std::uint64_t>(0, 9), now, meddler);
    RC_ASSERT(!got.known);
    RC_ASSERT(got.hits == 0u);
    RC_ASSERT(!got.wants_commit);
    reached(one.leased > 0 ? "another's lease" : "another's reservation");
    reached("by nobody in particular", meddler == 0);
    reached("of nobody in particular", one.caller == 0);
  }
  void time_out() {
    const std::size_t due = limiter->settle_due(now, 1000);
    RC_ASSERT(due == std::erase_if(open, [&](const Open& one) { return one.until <= now; }));
    reached("timed out", due > 0);
  }
  void within_its_part(std::uint64_t caller) const {
    const bool bound = options.caller_percent < 100;
    const std::uint64_t most = part_of(options.max_tickets);
    RC_ASSERT(tickets_of(caller) <= most);
    reached("a caller at its part of the tickets", bound && tickets_of(caller) == most);
    for (const char* key : {"a", "b"}) {
      const std::uint64_t part = part_of(rule.limit);
      const std::uint64_t units = leased_by(caller, key);
      RC_ASSERT(units <= part);
      RC_ASSERT(limiter->may_lease(0, Ask(key).request, caller) == part - units);
      reached("a caller at its part of the limit",
              bound && units > 0 && units + rule.default_cost > part);
    }
  }
};

LAW(53,
    "of the tickets and, by leases, of a limit one caller holds its part at most, and another "
    "finds "
    "room for as much while there is any",
    "a caller at its part of the tickets", "a caller at its part of the limit", "all tickets open",
    "a bucket", "a window", "settled", "timed out", "nobody in particular", "a lease") {
  Callers callers;
  for (int step = *between(1, 120).as("steps"); step > 0; --step) {
    const std::uint64_t caller = *between<std::uint64_t>(0, 3);
    const std::string key(*chance(70) ? "a" : "b");
    reached("nobody in particular", caller == 0);
    switch (*choice(5)) {
      case 0:
      case 1:
        callers.reserve(caller, key);
        break;
      case 2:
      case 3:
        callers.lease(caller, key);
        break;
      default:
        callers.settle();
    }
    callers.time_out();
    RC_ASSERT(callers.limiter->tickets().open == callers.open.size());
    reached("all tickets open", callers.open.size() == callers.options.max_tickets);
    for (std::uint64_t who : {1, 2, 3}) callers.within_its_part(who);
  }
}

LAW(59, "a ticket is settled by the caller that it was given to, and by nobody else",
    "another's lease", "another's reservation", "by nobody in particular",
    "of nobody in particular", "a lease", "a bucket", "a window", "settled", "timed out") {
  Callers callers;
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    const std::uint64_t caller = *between<std::uint64_t>(0, 3);
    const std::string key(*chance(70) ? "a" : "b");
    *chance(50) ? callers.reserve(caller, key) : callers.lease(caller, key);
    const TicketCounters before = callers.limiter->tickets();
    const std::uint64_t left = callers.left(key);
    callers.meddle(*between<std::uint64_t>(0, 3));
    RC_ASSERT(callers.limiter->tickets().open == before.open);
    RC_ASSERT(callers.left(key) == left);
    if (*chance(40)) callers.settle();
    callers.time_out();
  }
}

}  // namespace
}  // namespace weir::laws
