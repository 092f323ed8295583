#include <weir/limits/algorithms/window.h>
#include <weir/limits/fallback.h>
#include <weir/limits/lease.h>
#include <weir/limits/rules/rules_text.h>
#include <weir/limits/rules/rules_yaml.h>
#include <weir/rpc/client/lease_book.h>

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <tuple>

#include "law.h"
#include "models.h"
#include "schedules.h"

/// What clients decide on their own: leases, and buckets when no node answers.
namespace weir::laws {
namespace {

using Way = LeaseBook::Way;

struct Ask {
  std::vector<Entry> entries;
  Request request;
  explicit Ask(std::string_view key, std::uint64_t hits = 1) : entries{{"key", key}} {
    request.domain = "api";
    request.descriptor = entries;
    request.hits = hits;
  }
};

/// What passed, by rule and key, against the limits as a plain reader of docs/rules.md takes them.
class Passed {
 public:
  Passed(const RuleSet& rules, const Limiter& limiter) : rules_(rules), limiter_(limiter) {}

  void add(const std::string& asked, std::uint64_t hits, Nanos now) {
    for (std::uint32_t i = 0; i < rules_.rules().size(); ++i) {
      const Rule& rule = rules_.rules()[i];
      const std::string key = rule.key.empty() ? "" : asked;
      std::uint64_t cost = hits * rule.default_cost;
      if (cost == 0) continue;
      std::deque<std::pair<Nanos, std::uint64_t>>& log = log_[{i, key}];
      log.emplace_back(now, cost);
      total_[{i, key}] += cost;
      if (rule.algorithm == Algorithm::token_bucket) {
        auto [bucket, fresh] = buckets_.try_emplace({i, key}, rule.limit, rule.window, rule.burst);
        RC_ASSERT(bucket->second.take(now, cost));
      } else if (rule.algorithm == Algorithm::sliding_window) {
        while (log.front().first + rule.window <= now) log.pop_front();
        std::uint64_t sum = 0;
        for (auto [at, units] : log) sum += units;
        RC_ASSERT(sum <= rule.limit);
      } else {
        WindowShape shape = window_shape(rule, limiter_.series_of(i, Ask(key).request));
        std::uint64_t& sum = windows_[{i, key, shape.index(now)}];
        sum += cost;
        RC_ASSERT(sum <= rule.limit);
      }
    }
  }
  std::uint64_t total(std::uint32_t rule, const std::string& key) { return total_[{rule, key}]; }

 private:
  using Series = std::pair<std::uint32_t, std::string>;
  const RuleSet& rules_;
  const Limiter& limiter_;
  std::map<Series, std::deque<std::pair<Nanos, std::uint64_t>>> log_;
  std::map<Series, std::uint64_t> total_;
  std::map<Series, ExactBucket> buckets_;
  std::map<std::tuple<std::uint32_t, std::string, std::int64_t>, std::uint64_t> windows_;
};

Rule leased_rule(std::string name) {
  Rule rule;
  rule.domain = "api";
  rule.name = std::move(name);
  if (*chance(70)) rule.key = {"key"};
  rule.algorithm = *one_of<Algorithm>(
      {Algorithm::fixed_window, Algorithm::sliding_window, Algorithm::token_bucket});
  rule.limit = *one_of<std::uint64_t>({10, 60, 300});
  rule.window = *one_of<Nanos>({2 * kSecond, 10 * kSecond, kHour});
  rule.default_cost = *rc::gen::weightedElement<std::uint64_t>({{6, 1}, {2, 3}, {1, 0}});
  if (rule.algorithm == Algorithm::sliding_window) {
    rule.slots = *one_of<std::uint32_t>({1, 4});
    rule.strict = true;
  }
  if (rule.algorithm == Algorithm::token_bucket) {
    rule.burst = *one_of<std::uint64_t>({0, 20, 100});
  }
  rule.phase = *one_of<Phase>({Phase::aligned, Phase::spread});
  return rule;
}

/// Clients with books of leases and one node, with a clock of their own each and messages that
/// travel between them or are lost.
class Clients {
 public:
  Clients(Limiter& limiter, Passed& passed, std::size_t count, LeaseOptions options)
      : limiter_(limiter), passed_(passed), term_(options.term) {
    for (std::size_t i = 0; i < count; ++i) {
      clients_.push_back({LeaseBook(options), *between<Nanos>(0, kHour), true, *chance(40)});
    }
    max_delay_ = *one_of<Nanos>({0, 2, 80}) * kMillisecond;
    loss_ = *one_of<int>({0, 0, 15});
  }

  void ask(std::size_t number, const std::string& key, std::uint64_t hits) {
    Client& client = clients_[number];
    if (!client.alive) return;
    LeaseBook::Answer answer = client.book.take(key, hits, local(client));
    reached("a denial that was remembered", answer.way == Way::denied);
    reached("one that waits", answer.way == Way::wait);
    if (answer.way == Way::spent) {
      reached("spent");
      passed_.add(key, hits, now_);
    } else if (answer.way == Way::lease) {
      lease(number, key, hits, answer.most, local(client));
    } else if (answer.way == Way::call) {
      call(number, key, hits);
    }
  }

  void advance(Nanos time) {
    const Nanos end = now_ + time;
    for (;;) {
      Nanos tick = now_ - now_ % kTick + kTick;
      Nanos next = std::min({end, tick, events_.empty() ? end : events_.begin()->first});
      now_ = next;
      while (!events_.empty() && events_.begin()->first <= now_) {
        auto run = std::move(events_.begin()->second);
        events_.erase(events_.begin());
        run();
      }
      if (now_ == tick) turn();
      if (now_ == end) return;
    }
  }

  void kill(std::size_t number) {
    lost_ |= clients_[number].alive && clients_[number].book.blocks() > 0;
    reached("a client that died with a block", lost_);
    clients_[number].alive = false;
  }

  /// Everything goes back, and what cannot is charged.
  void finish() {
    for (Client& client : clients_) {
      if (client.alive) client.book.close_all(local(client));
      lost_ |= client.lazy;  // its blocks may have been charged meanwhile
      client.lazy = false;
    }
    advance(2 * kSecond + 2 * (term_ + kGrace));
  }

  std::size_t size() const { return clients_.size(); }
  Nanos now() const { return now_; }
  /// Nothing was lost on the way, and nobody died: what is counted is what passed.
  bool exact() const { return !lost_; }

 private:
  static constexpr Nanos kTick = 10 * kMillisecond;
  static constexpr Nanos kGrace = 300 * kMillisecond;
  struct Client {
    LeaseBook book;
    Nanos offset;
    bool alive;
    bool lazy;  // takes nothing back before it goes
  };

  Nanos local(const Client& client) const { return now_ - kStart + client.offset; }

  void turn() {
    reached("charged in full", limiter_.settle_due(now_, 1000) > 0);
    for (Client& client : clients_) {
      if (!client.alive || client.lazy) continue;
      for (LeaseBook::Return& back : client.book.take_returns(local(client))) {
        Ticket ticket{std::stoull(back.ticket)};
        bool arrives = send([this, ticket, used = back.used] {
          Settled settled = limiter_.settle(ticket, used, now_);
          reached("returned unspent", settled.known && used < settled.hits);
        });
        if (!arrives) client.book.try_again(std::move(back));
      }
    }
  }

  /// False if it is lost.
  bool send(std::function<void()> arrive) {
    if (*chance(loss_)) {
      lost_ = true;
      return false;
    }
    events_.emplace(now_ + *between<Nanos>(0, max_delay_), std::move(arrive));
    return true;
  }

  void lease(std::size_t number, const std::string& key, std::uint64_t hits, std::uint64_t most,
             Nanos sent) {
    auto failed = [this, number, key] {
      clients_[number].book.refused(key, false, local(clients_[number]));
    };
    bool arrives = send([this, number, key, hits, most, sent, failed] {
      LeaseTerms terms{most, term_, kGrace, *one_of<std::uint64_t>({1, 4, 16})};
      Decision decision;
      Lease lease = grant_lease(limiter_, Ask(key, hits).request, terms, now_, now_, decision);
      if (decision.allowed) passed_.add(key, hits, now_);
      Nanos retry_after = decision.decider() == nullptr ? 0 : decision.decider()->retry_after;
      bool answered =
          send([this, number, key, hits, lease, sent, retry_after, allowed = decision.allowed] {
            Client& client = clients_[number];
            auto told = std::make_shared<Reply>();
            if (lease.ticket) {
              reached("a lease");
              LeaseBook::Grant grant{0, std::to_string(lease.ticket.number), lease.hits, lease.term,
                                     told};
              client.book.granted(key, hits, std::move(grant), sent, local(client));
            } else {
              client.book.refused(key, true, local(client));
              if (!allowed) client.book.denied(key, hits, told, retry_after, local(client));
            }
            if (!client.alive) lost_ |= static_cast<bool>(lease.ticket);
          });
      if (!answered) failed();
    });
    if (!arrives) failed();
  }

  void call(std::size_t number, const std::string& key, std::uint64_t hits) {
    send([this, number, key, hits] {
      Decision decision = limiter_.check(Ask(key, hits).request, now_);
      if (decision.allowed) {
        passed_.add(key, hits, now_);
        return;
      }
      reached("denied by the node");
      Client& client = clients_[number];
      client.book.denied(key, hits, std::make_shared<Reply>(), decision.decider()->retry_after,
                         local(client));
    });
  }

  Limiter& limiter_;
  Passed& passed_;
  const Nanos term_;
  std::vector<Client> clients_;
  Nanos now_ = kStart;
  Nanos max_delay_ = 0;
  int loss_ = 0;
  bool lost_ = false;
  std::multimap<Nanos, std::function<void()>> events_;
};

LAW(44, "on one node, what leases and calls let pass together stays within the limit", "spent",
    "a lease", "a denial that was remembered", "one that waits", "denied by the node",
    "returned unspent", "charged in full", "a client that died with a block", "a bucket", "a ring",
    "a fixed window", "several rules", "nothing lost") {
  std::vector<Rule> rules;
  for (std::size_t i = *between<std::size_t>(1, 3).as("rules"); i > 0; --i) {
    rules.push_back(leased_rule("r" + std::to_string(i)));
    reached("a bucket", rules.back().algorithm == Algorithm::token_bucket);
    reached("a ring", rules.back().algorithm == Algorithm::sliding_window);
    reached("a fixed window", rules.back().algorithm == Algorithm::fixed_window);
  }
  reached("several rules", rules.size() > 1);
  LimiterOptions options;
  options.replicated = *chance(50).as("replicated");
  options.incarnation = {1, 1};
  Limiter limiter(rule_set(rules), options);
  auto in_force = limiter.rules();
  Passed passed(*in_force, limiter);
  LeaseOptions leases;
  leases.hot = *one_of<unsigned>({1, 3});
  leases.first = *one_of<std::uint64_t>({2, 8, 50});
  leases.term = *one_of<Nanos>({kSecond, 5 * kSecond});
  leases.return_ahead = *one_of<Nanos>({0, 200 * kMillisecond});
  leases.max_keys = *one_of<std::size_t>({1, 100});
  Clients clients(limiter, passed, *between<std::size_t>(1, 3).as("clients"), leases);
  std::size_t count = clients.size();
  for (int step = *between(20, 150).as("steps"); step > 0; --step) {
    std::size_t client = *between<std::size_t>(0, count - 1);
    std::string key(*chance(80) ? "a" : "b");
    std::uint64_t hits = *rc::gen::weightedElement<std::uint64_t>({{8, 1}, {2, 3}});
    for (int i = *one_of<int>({1, 1, 10}); i > 0; --i) clients.ask(client, key, hits);
    clients.advance(*rc::gen::weightedElement<Nanos>(
        {{8, 0}, {8, 3 * kMillisecond}, {4, 120 * kMillisecond}, {1, 1900 * kMillisecond}}));
    if (*chance(1)) clients.kill(client);
  }
  clients.finish();
  RC_ASSERT(limiter.tickets().open == 0u);
  reached("nothing lost", clients.exact());
  // Nothing is forgotten, and nothing is counted twice.
  for (std::uint32_t i = 0; i < rules.size(); ++i) {
    if (rules[i].algorithm != Algorithm::fixed_window || rules[i].window != kHour) continue;
    if (rules[i].phase == Phase::spread) continue;
    for (const char* key : {"a", "b"}) {
      std::uint64_t spent = passed.total(i, rules[i].key.empty() ? "" : key);
      std::uint64_t counted = limiter.used(i, Ask(key).request, clients.now());
      RC_ASSERT(counted >= spent);
      if (clients.exact()) RC_ASSERT(counted == spent);
    }
  }
}

LAW(4, "rules that are written as YAML are read back as they were", "a calendar", "a bucket",
    "a ring", "costs by method", "an exemption", "limits from requests",
    "a key that is not counted as it is") {
  std::vector<Rule> rules;
  for (int i = *between(1, 4).as("rules"); i > 0; --i) {
    rules.push_back(*rules_named("r\"" + std::to_string(i)).as("rule"));
    Rule& rule = rules.back();
    rule.match = *one_of<std::vector<Match>>(
        {{},
         {{"plan", MatchAny{}}},
         {{"a b", MatchAbsent{}}, {"path", MatchPrefix{"/\\"}}},
         {{"ip", *parse_cidr("2001:db8::/33")}, {"any", MatchExact{"any"}}},
         {{"a", MatchIn{{"x", "any", "\""}}},
          {"a", MatchSuffix{".b"}},
          {"a", MatchExact{"any"}, true},
          {"a", MatchAbsent{}, true}},
         {{"ip", MatchCidrs{{*parse_cidr("10.0.0.0/8"), *parse_cidr("::/0")}}},
          {"path", MatchPath{"/a\\", true, true}},
          {"host", MatchGlob{"*.\\*"}, true}},
         {{"n", MatchNumber{5, kMax}},
          {"m", MatchNumber{0, 9}},
          {"p", MatchPath{"/", false, false}}}});
    if (*chance(30)) {
      rule.key = {"ip", "agent", "path", "user"};
      rule.key_forms = {{KeyForm::Kind::address, 24, 64, 0, false},
                        {KeyForm::Kind::lower, 32, 128, 0, false},
                        {KeyForm::Kind::path, 32, 128, 2, true},
                        {}};
    }
    if (*chance(30)) {
      rule.group = "g";
      rule.group_order = GroupOrder::exact;
    }
    if (rules.size() > 1 && *chance(30)) rule.replaces = {rules[0].name};
    if (!rule.replaces.empty() && *chance(30)) {
      Rule exempt;
      exempt.domain = rule.domain;
      exempt.name = rule.name;
      exempt.match = rule.match;
      exempt.group = rule.group;
      exempt.group_order = rule.group_order;
      exempt.replaces = rule.replaces;
      exempt.unlimited = true;
      rule = exempt;
    } else if (!rule.calendar && rule.limit > 0 && rule.slots == 1 && rule.max_debt <= 1 &&
               rule.algorithm != Algorithm::sliding_log && *chance(30)) {
      rule.limit_from_request = true;
    }
    if (*chance(30)) rule.labels = {{"team", "a\"b"}, {"plan", "x"}};
    if (!rule.unlimited && *chance(30)) {
      rule.hide_headers = true;
      rule.deny_status = *one_of<std::uint16_t>({503, 403, 429});
      rule.deny_message = *one_of<std::string>({"", "no: \"not now\""});
    }
    reached("an exemption", rule.unlimited);
    reached("limits from requests", rule.limit_from_request);
    reached("a key that is not counted as it is", !rule.key_forms.empty());
    if (rule.calendar) rule.window = kMinute;  // what a calendar has no use for
    reached("a calendar", rule.calendar.has_value());
    reached("a bucket", is_bucket(rule.algorithm));
    reached("a ring", rule.slots > 1);
    reached("costs by method", !rule.cost_by_method.empty());
  }
  auto set = rule_set(rules);
  const std::string text = rules_text(*set);
  LoadedRules back = parse_rules(text, "text");
  if (!back.errors.empty()) RC_FAIL(back.errors[0].to_string() + "\n" + text);
  RC_ASSERT(back.rules->rules() == set->rules());
}

LAW(17, "the bucket of an open rule when no node answers is an exact one of its share", "denied",
    "full again", "a bucket", "a window") {
  Rule rule = leased_rule("r");
  rule.key = {"key"};
  rule.default_cost = 1;
  unsigned parts = *between<unsigned>(1, 5).as("parts");
  reached("a bucket", is_bucket(rule.algorithm));
  reached("a window", !is_bucket(rule.algorithm));
  auto rules = rule_set({rule});
  Fallback fallback(rules, {parts, {}, 16});
  const Rule& made = rules->rules()[0];
  std::uint64_t burst = is_bucket(made.algorithm) ? made.burst : made.limit;
  ExactBucket model(made.limit * 6, made.window * 5 * parts,
                    std::max<std::uint64_t>(burst * 6 / (5 * parts), 1));
  Nanos now = kStart;
  for (int step = *between(1, 60).as("steps"); step > 0; --step) {
    now += *one_of<Nanos>({0, 0, kMillisecond, kSecond, kHour * 2});
    std::uint64_t hits = *between<std::uint64_t>(1, 30);
    bool allowed = fallback.decide(Ask("k", hits).request, now).allowed;
    reached("full again", allowed && hits > 20 && step < 5);
    reached("denied", !allowed);
    RC_ASSERT(allowed == model.take(now, hits));
  }
}

}  // namespace
}  // namespace weir::laws
