#include <weir/rpc/client/client.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include <weir/limits/fallback.h>
#include <weir/limits/rendezvous.h>
#include <weir/limits/rules/rules_yaml.h>

namespace weir {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kShards = 16;
/// Requests that wait for one block; further ones ask for themselves.
constexpr std::size_t kMaxWaiting = 4096;
constexpr auto kHousekeeping = std::chrono::milliseconds(10);
/// Nobody waits for the return of a lease.
constexpr auto kReturnDeadline = std::chrono::milliseconds(250);
/// How much later than the connection a waiting caller gives up: that one knows better what went
/// wrong.
constexpr auto kSlack = std::chrono::milliseconds(1);
constexpr const char* kLimiterUnavailable = "limiter_unavailable";

Error client_closed() {
  return {ErrorKind::unavailable, "client closed"};
}

Error out_of_time() {
  return {ErrorKind::deadline, "no answer in time"};
}

Nanos nanos(Clock::time_point when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count();
}

/// Of a fixed length in front: no two lists of texts read the same.
void append(std::string& out, std::string_view text) {
  auto size = static_cast<std::uint32_t>(text.size());
  out.append(reinterpret_cast<const char*>(&size), sizeof size);
  out.append(text);
}

std::string key_of(const CheckItem& item) {
  std::string key;
  append(key, item.domain);
  for (const auto& [name, value] : item.entries) {
    append(key, name);
    append(key, value);
  }
  return key;
}

using rpc::AsRequest;

bool is_degraded(const Reply& reply) {
  return std::any_of(reply.statuses.begin(), reply.statuses.end(),
                     [](const Status& status) { return status.degraded; });
}

/// What was told a while ago, as it is now.
ClientReply aged(const Reply& given, Nanos age, Source source) {
  ClientReply reply;
  static_cast<Reply&>(reply) = given;
  for (Status& status : reply.statuses) {
    status.reset = std::max<Nanos>(status.reset - age, 0);
    if (status.retry_after != kNever)
      status.retry_after = std::max<Nanos>(status.retry_after - age, 0);
  }
  reply.source = source;
  reply.degraded = is_degraded(given);
  return reply;
}

Nanos retry_after_of(const Reply& reply) {
  const Status* decider = reply.decider();
  return decider == nullptr ? 0 : decider->retry_after;
}

/// One request on its way. Used by one thread at a time.
struct Pending {
  CheckItem item;
  std::string key;  // in the book of leases; empty: it has nothing to do with that
  Clock::time_point deadline;
  std::vector<std::size_t> order;  // of nodes
  std::size_t attempt = 0;         // index into order
  bool uncertain = false;          // some node may have counted it
  bool retried = false;
  std::atomic<bool> finished{false};
  Client::Done done;
};
using PendingPtr = std::shared_ptr<Pending>;

/// A value that one thread waits for.
template <typename T>
struct Waited {
  void set(T value) {
    std::lock_guard lock(mutex);
    answer = std::move(value);
    ready.notify_one();
  }
  bool wait(Clock::time_point until) {
    std::unique_lock lock(mutex);
    return ready.wait_until(lock, until, [this] { return answer.has_value(); });
  }
  std::mutex mutex;
  std::condition_variable ready;
  std::optional<T> answer;
};

}  // namespace

struct Client::Impl {
  struct Shard {
    std::mutex mutex;
    std::optional<LeaseBook> book;
    std::unordered_map<std::string, std::vector<PendingPtr>> waiting;  // for a block, by key
  };

  explicit Impl(ClientOptions given);
  ~Impl();

  Shard& shard_of(const std::string& key) { return shards[stable_hash(key) % kShards]; }
  bool leasable(const CheckItem& item) const {
    return options.leases.enabled && item.id.empty() && item.hits > 0 && item.more.empty() &&
           item.kind == RequestKind::check && !item.limit.any();
  }
  std::vector<std::size_t> order_of(const CheckItem& item) const;
  bool is_slow(const CheckItem& item) const;
  Clock::time_point deadline() const {
    return Clock::now() + std::chrono::nanoseconds(options.deadline);
  }
  PendingPtr pend(CheckItem item, Done done);

  LeaseBook::Answer take(const std::string& key, const CheckItem& item);
  std::optional<ClientReply> decided_here(const LeaseBook::Answer& answer);
  void start(PendingPtr pending);
  void go(PendingPtr pending, const LeaseBook::Answer& answer);
  void ask(PendingPtr pending);
  void ask_lease(PendingPtr pending, std::uint64_t most);
  void leased(const PendingPtr& pending, std::size_t node, Clock::time_point sent,
              LeaseReply reply);
  void answered(const PendingPtr& pending, Reply reply);
  bool next_attempt(Pending& pending, const Error& error);
  std::size_t choose(Pending& pending);
  void finish(const PendingPtr& pending, Reply reply);
  void give_up(const PendingPtr& pending, const Error& cause);
  ClientReply fall_back(const CheckItem& item, const Error& cause);
  void tell(Pending& pending, ClientReply reply);

  struct Reserving;
  void reserve(std::shared_ptr<Reserving> call);
  void settle(std::string ticket, std::uint64_t hits, Clock::time_point until, bool again,
              std::function<void(SettleReply)> done);

  void keep_house();
  void return_leases();

  std::shared_ptr<Fallback> policy() const {
    std::lock_guard lock(policy_mutex);
    return fallback;
  }
  void set_policy(std::shared_ptr<const RuleSet> rules);
  bool learns() const { return !options.rules && options.rules_interval > 0; }
  void learn_rules();

  const ClientOptions options;
  mutable std::mutex policy_mutex;
  std::shared_ptr<Fallback> fallback;  // null: no rules are known
  std::atomic<bool> has_slow_rules{false};

  std::mutex told_mutex;
  std::optional<RulesReply> told_rules;  // by a node, not looked at yet
  Clock::time_point next_rules{};        // for the housekeeper alone, as what follows
  std::string known_yaml;
  std::size_t rules_node = 0;
  bool asking_rules = false;
  std::array<Shard, kShards> shards;

  std::atomic<std::uint64_t> by_source[4] = {};
  std::atomic<std::uint64_t> degraded{0};
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> failovers{0};
  std::atomic<std::uint64_t> retries{0};
  std::atomic<std::size_t> returning{0};

  std::mutex house_mutex;
  std::condition_variable house;
  bool house_closed = false;
  std::thread housekeeper;

  /// Held (shared) by calls to `nodes` from the nodes' own threads; alone to close.
  std::shared_mutex closing_mutex;
  bool closing = false;
  std::vector<std::unique_ptr<rpc::NodeClient>> nodes;
};

Client::Impl::Impl(ClientOptions given) : options(std::move(given)) {
  if (options.nodes.empty()) throw std::invalid_argument("weir::Client: no nodes are given");
  if (options.rules) set_policy(options.rules);
  for (const std::string& address : options.nodes) {
    rpc::NodeClientOptions node = options.connection;
    node.address = address;
    node.deadline = options.deadline;
    nodes.push_back(std::make_unique<rpc::NodeClient>(std::move(node)));
  }
  LeaseOptions each = options.leases;
  each.max_keys = std::max<std::size_t>(each.max_keys / kShards, 1);
  for (Shard& shard : shards) {
    if (each.enabled) shard.book.emplace(each);
  }
  if (!each.enabled && !learns()) return;
  housekeeper = std::thread([this] { keep_house(); });
}

Client::Impl::~Impl() {
  if (housekeeper.joinable()) {
    {
      std::lock_guard lock(house_mutex);
      house_closed = true;
    }
    house.notify_one();
    housekeeper.join();
    for (Shard& shard : shards) {
      std::lock_guard lock(shard.mutex);
      if (shard.book) shard.book->close_all(nanos(Clock::now()));
    }
    return_leases();
    for (auto until = Clock::now() + kReturnDeadline; returning > 0 && Clock::now() < until;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  {
    std::unique_lock lock(closing_mutex);
    closing = true;
  }
  nodes.clear();
  for (Shard& shard : shards) {
    for (auto& [key, waiting] : shard.waiting) {
      for (const PendingPtr& pending : waiting) give_up(pending, client_closed());
    }
  }
}

PendingPtr Client::Impl::pend(CheckItem item, Done done) {
  auto pending = std::make_shared<Pending>();
  pending->deadline = deadline();
  pending->item = std::move(item);
  pending->done = std::move(done);
  if (leasable(pending->item)) pending->key = key_of(pending->item);
  return pending;
}

/// Nodes, the first choice first.
std::vector<std::size_t> Client::Impl::order_of(const CheckItem& item) const {
  if (options.nodes.size() == 1) return {0};
  std::string key;
  AsRequest as(item);
  std::string counted;
  auto add = [&](const std::vector<std::string>& names, const Rule* rule) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::string_view* value = as.request.find(names[i]);
      counted.clear();
      const KeyForm form = rule == nullptr ? KeyForm{} : rule->key_form(i);
      if (value != nullptr) append_key_value(form, *value, counted);
      append(key, counted);
    }
  };
  if (!options.route_by.empty()) {
    add(options.route_by, nullptr);
  } else {
    std::vector<std::uint32_t> matched;
    std::shared_ptr<Fallback> known = policy();
    if (known) known->rules().match(as.request, matched);
    if (matched.empty()) {
      key = key_of(item);
    } else {
      const Rule& rule = known->rules().rules()[matched[0]];
      add(rule.key, &rule);
    }
  }
  return rendezvous_order(options.nodes, stable_hash(key));
}

/// Some rule, as far as known, makes its answer wait for a disk or another region.
bool Client::Impl::is_slow(const CheckItem& item) const {
  std::shared_ptr<Fallback> known = policy();
  if (!known || !has_slow_rules) return false;
  AsRequest as(item);
  std::vector<std::uint32_t> matched;
  known->rules().match(as.request, matched);
  return std::any_of(matched.begin(), matched.end(), [&](std::uint32_t index) {
    return known->rules().rules()[index].durability != Durability::async;
  });
}

// ---- Decisions ----

LeaseBook::Answer Client::Impl::take(const std::string& key, const CheckItem& item) {
  Shard& shard = shard_of(key);
  std::lock_guard lock(shard.mutex);
  return shard.book->take(key, item.hits, nanos(Clock::now()));
}

std::optional<ClientReply> Client::Impl::decided_here(const LeaseBook::Answer& answer) {
  if (answer.way == LeaseBook::Way::spent) return aged(*answer.reply, answer.age, Source::lease);
  if (answer.way == LeaseBook::Way::denied) {
    return aged(*answer.reply, answer.age, Source::remembered);
  }
  return std::nullopt;
}

void Client::Impl::start(PendingPtr pending) {
  if (pending->key.empty()) return ask(std::move(pending));
  LeaseBook::Answer answer = take(pending->key, pending->item);
  go(std::move(pending), answer);
}

void Client::Impl::go(PendingPtr pending, const LeaseBook::Answer& answer) {
  if (std::optional<ClientReply> reply = decided_here(answer))
    return tell(*pending, std::move(*reply));
  if (answer.way == LeaseBook::Way::lease) return ask_lease(std::move(pending), answer.most);
  if (answer.way == LeaseBook::Way::wait) {
    Shard& shard = shard_of(pending->key);
    {
      std::lock_guard lock(shard.mutex);
      auto asked = shard.waiting.find(pending->key);
      if (asked != shard.waiting.end() && asked->second.size() < kMaxWaiting) {
        asked->second.push_back(std::move(pending));
        return;
      }
    }
    // The block came in between, or too many wait for it.
    return ask(std::move(pending));
  }
  ask(std::move(pending));
}

void Client::Impl::ask(PendingPtr pending) {
  std::shared_lock lock(closing_mutex);
  if (closing) {
    lock.unlock();
    return give_up(pending, client_closed());
  }
  std::size_t node = choose(*pending);
  pending->item.isolated = is_slow(pending->item);
  nodes[node]->check_async(
      {pending->item},
      [this, pending](std::vector<Reply> replies) {
        answered(pending, std::move(replies.front()));
      },
      pending->deadline);
}

/// The node to ask: passes over those that are known to be down, while there is another one.
std::size_t Client::Impl::choose(Pending& pending) {
  if (pending.order.empty()) pending.order = order_of(pending.item);
  std::size_t next = pending.attempt;
  while (next < pending.order.size() && !nodes[pending.order[next]]->usable()) ++next;
  if (next < pending.order.size() && next > pending.attempt && !pending.uncertain) {
    pending.attempt = next;
    ++failovers;
  }
  ++calls;
  return pending.order[pending.attempt];
}

/// True if the request may and should be sent once more, to pending.order[pending.attempt].
bool Client::Impl::next_attempt(Pending& pending, const Error& error) {
  const bool refused = error.surely_not_counted();
  pending.uncertain |= !refused;
  if (Clock::now() >= pending.deadline) return false;
  if (refused && !pending.uncertain && pending.attempt + 1 < pending.order.size()) {
    ++pending.attempt;
    ++failovers;
    return true;
  }
  if (!pending.item.id.empty() && error.may_have_counted() && !pending.retried) {
    pending.retried = true;
    ++retries;
    return true;
  }
  return false;
}

void Client::Impl::answered(const PendingPtr& pending, Reply reply) {
  if (reply.error.empty()) return finish(pending, std::move(reply));
  if (reply.error.kind == ErrorKind::closed) {
    ClientReply denied;
    denied.degraded = true;
    denied.reason = kLimiterUnavailable;
    denied.cause = reply.error;
    return tell(*pending, std::move(denied));
  }
  if (!reply.error.surely_not_counted() && !reply.error.may_have_counted()) {
    return finish(pending, std::move(reply));  // something is wrong with the request
  }
  if (next_attempt(*pending, reply.error)) return ask(pending);
  give_up(pending, reply.error);
}

void Client::Impl::finish(const PendingPtr& pending, Reply decision) {
  if (!pending->key.empty() && !decision.allowed && decision.error.empty()) {
    Shard& shard = shard_of(pending->key);
    std::lock_guard lock(shard.mutex);
    shard.book->denied(pending->key, pending->item.hits, std::make_shared<Reply>(decision),
                       retry_after_of(decision), nanos(Clock::now()));
  }
  ClientReply reply;
  static_cast<Reply&>(reply) = std::move(decision);
  reply.degraded = is_degraded(reply);
  tell(*pending, std::move(reply));
}

void Client::Impl::give_up(const PendingPtr& pending, const Error& cause) {
  if (pending->finished.load()) return;
  tell(*pending, fall_back(pending->item, cause));
}

ClientReply Client::Impl::fall_back(const CheckItem& item, const Error& cause) {
  ClientReply reply;
  reply.source = Source::fallback;
  reply.degraded = true;
  reply.cause = cause;
  std::shared_ptr<Fallback> known = policy();
  if (!known) {
    reply.error = cause;
    return reply;
  }
  AsRequest as(item);
  Fallback::Answer answer = known->decide(as.request, nanos(Clock::now()));
  weir::tell(answer.decision, known->rules(), reply);
  reply.allowed = answer.allowed;
  if (answer.closed) reply.reason = kLimiterUnavailable;
  for (Status& status : reply.statuses) status.degraded = true;
  return reply;
}

void Client::Impl::tell(Pending& pending, ClientReply reply) {
  if (pending.finished.exchange(true)) return;
  ++by_source[static_cast<std::size_t>(reply.source)];
  if (reply.degraded) ++degraded;
  pending.done(std::move(reply));
}

// ---- Leases ----

void Client::Impl::ask_lease(PendingPtr pending, std::uint64_t most) {
  Shard& shard = shard_of(pending->key);
  {
    std::lock_guard lock(shard.mutex);
    shard.waiting.try_emplace(pending->key);
  }
  auto sent = Clock::now();
  std::shared_lock lock(closing_mutex);
  if (closing) {
    lock.unlock();
    return give_up(pending, client_closed());
  }
  std::size_t node = choose(*pending);
  nodes[node]->lease_async(
      pending->item, most, options.leases.term,
      [this, pending, most, node, sent](LeaseReply reply) {
        const Error& error = reply.decision.error;
        if (error.surely_not_counted() && next_attempt(*pending, error)) {
          return ask_lease(pending, most);
        }
        leased(pending, node, sent, std::move(reply));
      },
      pending->deadline,
      [this, pending, node](const LeaseReply& late) {
        Shard& late_shard = shard_of(pending->key);
        std::lock_guard late_lock(late_shard.mutex);
        late_shard.book->give_back({node, late.ticket, pending->item.hits, 0});
      });
}

void Client::Impl::leased(const PendingPtr& pending, std::size_t node, Clock::time_point sent,
                          LeaseReply reply) {
  Shard& shard = shard_of(pending->key);
  const Reply& decision = reply.decision;
  const bool has_answer = decision.error.empty();
  const std::uint64_t hits = pending->item.hits;
  std::vector<PendingPtr> waiting;
  {
    std::lock_guard lock(shard.mutex);
    Nanos now = nanos(Clock::now());
    if (has_answer && decision.allowed && !reply.ticket.empty()) {
      shard.book->granted(
          pending->key, hits,
          {node, reply.ticket, reply.hits, reply.term, std::make_shared<Reply>(decision)},
          nanos(sent), now);
    } else {
      shard.book->refused(pending->key, has_answer && !decision.allowed, now);
      if (has_answer && !decision.allowed) {
        shard.book->denied(pending->key, hits, std::make_shared<Reply>(decision),
                           retry_after_of(decision), now);
      }
    }
    auto asked = shard.waiting.find(pending->key);
    if (asked != shard.waiting.end()) {
      waiting = std::move(asked->second);
      shard.waiting.erase(asked);
    }
  }
  // Where nobody grants a lease it goes its way as a plain request.
  if (!has_answer && decision.error.surely_not_counted() && !pending->uncertain) {
    pending->attempt = 0;
    ask(pending);
  } else {
    answered(pending, std::move(reply.decision));
  }
  for (const PendingPtr& each : waiting) {
    if (!each->finished) start(each);
  }
}

void Client::Impl::return_leases() {
  if (!options.leases.enabled) return;
  for (std::size_t i = 0; i < kShards; ++i) {
    std::vector<LeaseBook::Return> returns;
    {
      std::lock_guard lock(shards[i].mutex);
      returns = shards[i].book->take_returns(nanos(Clock::now()));
    }
    for (LeaseBook::Return& each : returns) {
      ++returning;
      ++calls;
      std::string ticket = each.ticket;
      rpc::NodeClient& node = *nodes[each.node];
      node.settle_async(
          std::move(ticket), each.used,
          [this, i, each](const SettleReply& reply) {
            if (!reply.error.empty()) {
              std::lock_guard lock(shards[i].mutex);
              shards[i].book->try_again(each);
            }
            --returning;
          },
          Clock::now() + kReturnDeadline);
    }
  }
}

void Client::Impl::keep_house() {
  std::unique_lock lock(house_mutex);
  while (!house.wait_for(lock, kHousekeeping, [this] { return house_closed; })) {
    lock.unlock();
    return_leases();
    if (learns()) learn_rules();
    lock.lock();
  }
}

// ---- Rules ----

void Client::Impl::set_policy(std::shared_ptr<const RuleSet> rules) {
  FallbackOptions local;
  local.parts = options.fallback_parts != 0 ? options.fallback_parts
                                            : static_cast<unsigned>(options.nodes.size());
  local.allowlist = options.allowlist;
  has_slow_rules = std::any_of(rules->rules().begin(), rules->rules().end(), [](const Rule& rule) {
    return rule.durability != Durability::async;
  });
  auto made = std::make_shared<Fallback>(std::move(rules), std::move(local));
  std::lock_guard lock(policy_mutex);
  fallback = std::move(made);
}

/// On the housekeeper's thread: takes in what a node told, or asks the next one.
void Client::Impl::learn_rules() {
  std::optional<RulesReply> answer;
  {
    std::lock_guard lock(told_mutex);
    answer = std::exchange(told_rules, std::nullopt);
  }
  const auto now = Clock::now();
  if (answer) {
    asking_rules = false;
    // The same rules again must not fill buckets anew. Other nodes may tell better ones.
    const bool fresh = answer->error.empty() && answer->yaml != known_yaml;
    LoadedRules loaded;
    if (fresh) loaded = parse_rules(answer->yaml, options.nodes[rules_node]);
    if (loaded.rules) {
      known_yaml = std::move(answer->yaml);
      set_policy(std::move(loaded.rules));
    }
    const bool known = policy() != nullptr;
    next_rules = now + (known ? std::chrono::nanoseconds(options.rules_interval)
                              : std::chrono::nanoseconds(kSecond));
  }
  if (asking_rules || now < next_rules) return;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    rules_node = (rules_node + 1) % nodes.size();
    if (!nodes[rules_node]->usable()) continue;
    asking_rules = true;
    nodes[rules_node]->rules_async(
        [this](RulesReply reply) {
          std::lock_guard lock(told_mutex);
          told_rules = std::move(reply);
        },
        now + std::chrono::nanoseconds(kSecond));
    return;
  }
}

// ---- Reservations ----

struct Client::Impl::Reserving {
  Pending pending;
  Nanos timeout = 0;
  std::function<void(Reservation)> done;
};

void Client::Impl::reserve(std::shared_ptr<Reserving> call) {
  std::shared_lock lock(closing_mutex);
  if (closing) {
    lock.unlock();
    return call->done({fall_back(call->pending.item, client_closed()), {}});
  }
  std::size_t node = choose(call->pending);
  nodes[node]->reserve_async(
      call->pending.item, call->timeout,
      [this, call, node](ReserveReply reply) {
        const Error& error = reply.decision.error;
        Reservation out;
        bool no_answer = error.surely_not_counted() || error.may_have_counted();
        if (no_answer && next_attempt(call->pending, error)) return reserve(call);
        if (no_answer) {
          out.decision = fall_back(call->pending.item, error);
        } else if (error.kind == ErrorKind::closed) {
          out.decision.degraded = true;
          out.decision.reason = kLimiterUnavailable;
          out.decision.cause = error;
        } else {
          static_cast<Reply&>(out.decision) = std::move(reply.decision);
          out.decision.degraded = is_degraded(out.decision);
          if (!reply.ticket.empty()) out.ticket = reply.ticket + "@" + options.nodes[node];
        }
        ++by_source[static_cast<std::size_t>(out.decision.source)];
        if (out.decision.degraded) ++degraded;
        call->done(std::move(out));
      },
      call->pending.deadline);
}

void Client::Impl::settle(std::string ticket, std::uint64_t hits, Clock::time_point until,
                          bool again, std::function<void(SettleReply)> done) {
  auto at = ticket.rfind('@');
  auto node = at == std::string::npos
                  ? options.nodes.end()
                  : std::find(options.nodes.begin(), options.nodes.end(), ticket.substr(at + 1));
  SettleReply reply;
  std::shared_lock lock(closing_mutex);
  if (node == options.nodes.end()) {
    reply.error = {ErrorKind::invalid, "the ticket names none of this client's nodes"};
  } else if (closing) {
    reply.error = client_closed();
  }
  if (!reply.error.empty()) {
    lock.unlock();
    return done(reply);
  }
  ++calls;
  // It settles once, so to send it again does no harm.
  nodes[static_cast<std::size_t>(node - options.nodes.begin())]->settle_async(
      ticket.substr(0, at), hits,
      [this, ticket, hits, until, again, done = std::move(done)](SettleReply got) mutable {
        if (again && got.error.kind == ErrorKind::unknown && Clock::now() < until) {
          ++retries;
          return settle(std::move(ticket), hits, until, false, std::move(done));
        }
        done(std::move(got));
      },
      until);
}

// ---- The client ----

Client::Client(ClientOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Client::~Client() = default;

ClientReply Client::check(const CheckItem& item) {
  std::string key;
  LeaseBook::Answer answer;
  if (impl_->leasable(item)) {
    key = key_of(item);
    answer = impl_->take(key, item);
    if (std::optional<ClientReply> reply = impl_->decided_here(answer)) {
      ++impl_->by_source[static_cast<std::size_t>(reply->source)];
      if (reply->degraded) ++impl_->degraded;
      return std::move(*reply);
    }
  }
  auto waited = std::make_shared<Waited<ClientReply>>();
  auto pending = std::make_shared<Pending>();
  pending->item = item;
  pending->key = std::move(key);
  pending->deadline = impl_->deadline();
  pending->done = [waited](ClientReply reply) { waited->set(std::move(reply)); };
  impl_->go(pending, answer);
  // The connection keeps the deadline too; it is not relied on.
  if (!waited->wait(pending->deadline + kSlack)) {
    impl_->give_up(pending, out_of_time());
    waited->wait(Clock::now() + std::chrono::hours(1));  // whoever was first is telling
  }
  return std::move(*waited->answer);
}

std::vector<ClientReply> Client::check(std::span<const CheckItem> items) {
  std::vector<std::shared_ptr<Waited<ClientReply>>> waited;
  std::vector<PendingPtr> pending;
  for (const CheckItem& item : items) {
    auto one = waited.emplace_back(std::make_shared<Waited<ClientReply>>());
    pending.push_back(impl_->pend(item, [one](ClientReply reply) { one->set(std::move(reply)); }));
    impl_->start(pending.back());
  }
  std::vector<ClientReply> replies;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!waited[i]->wait(pending[i]->deadline + kSlack)) {
      impl_->give_up(pending[i], out_of_time());
      waited[i]->wait(Clock::now() + std::chrono::hours(1));
    }
    replies.push_back(std::move(*waited[i]->answer));
  }
  return replies;
}

void Client::check_async(CheckItem item, Done done) {
  impl_->start(impl_->pend(std::move(item), std::move(done)));
}

std::future<ClientReply> Client::check_async(CheckItem item) {
  auto promise = std::make_shared<std::promise<ClientReply>>();
  auto future = promise->get_future();
  check_async(std::move(item),
              [promise](ClientReply reply) { promise->set_value(std::move(reply)); });
  return future;
}

void Client::reserve_async(CheckItem item, Nanos timeout, std::function<void(Reservation)> done) {
  auto call = std::make_shared<Impl::Reserving>();
  call->pending.order = impl_->order_of(item);
  call->pending.item = std::move(item);
  call->pending.deadline = impl_->deadline();
  call->timeout = timeout;
  call->done = std::move(done);
  impl_->reserve(std::move(call));
}

Reservation Client::reserve(const CheckItem& item, Nanos timeout) {
  auto waited = std::make_shared<Waited<Reservation>>();
  auto until = impl_->deadline() + kSlack;
  reserve_async(item, timeout, [waited](Reservation got) { waited->set(std::move(got)); });
  if (waited->wait(until)) return std::move(*waited->answer);
  return {impl_->fall_back(item, out_of_time()), {}};
}

void Client::settle_async(std::string ticket, std::uint64_t hits,
                          std::function<void(SettleReply)> done) {
  impl_->settle(std::move(ticket), hits, impl_->deadline(), true, std::move(done));
}

SettleReply Client::settle(const std::string& ticket, std::uint64_t hits) {
  auto waited = std::make_shared<Waited<SettleReply>>();
  auto until = impl_->deadline() + kSlack;
  settle_async(ticket, hits, [waited](SettleReply got) { waited->set(std::move(got)); });
  if (waited->wait(until)) return std::move(*waited->answer);
  SettleReply late;
  late.error = out_of_time();
  return late;
}

bool Client::rules_known() const {
  return impl_->policy() != nullptr;
}

ClientCounters Client::counters() const {
  ClientCounters out;
  out.by_node = impl_->by_source[static_cast<std::size_t>(Source::node)];
  out.by_lease = impl_->by_source[static_cast<std::size_t>(Source::lease)];
  out.remembered = impl_->by_source[static_cast<std::size_t>(Source::remembered)];
  out.by_fallback = impl_->by_source[static_cast<std::size_t>(Source::fallback)];
  out.degraded = impl_->degraded;
  out.calls = impl_->calls;
  out.failovers = impl_->failovers;
  out.retries = impl_->retries;
  for (Impl::Shard& shard : impl_->shards) {
    std::lock_guard lock(shard.mutex);
    if (shard.book) out.leased_blocks += shard.book->blocks();
  }
  return out;
}

std::size_t Client::connected() const {
  return static_cast<std::size_t>(
      std::count_if(impl_->nodes.begin(), impl_->nodes.end(),
                    [](const auto& node) { return node->connected(); }));
}

}  // namespace weir
