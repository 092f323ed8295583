#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weir/node/service/forwarder.h>

namespace weir::node::test {

/// Members with an engine and a forwarder each, in memory; what one forwards arrives at once, or as
/// `fault` says. What they tell each other as peers arrives in exchange().
class HomeCluster {
 public:
  enum class Fault {
    none,
    not_sent,     ///< and known to be
    answer_lost,  ///< the other counted
  };

  HomeCluster(std::vector<crdt::Member> members, std::shared_ptr<const RuleSet> rules,
              std::map<std::string, unsigned> weights, Nanos start,
              Nanos deadline = ForwardOptions{}.deadline)
      : now(start), deadline_(deadline), members_(std::move(members)) {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      nodes_.push_back(std::make_unique<Node>(*this, i, rules, weights));
    }
  }

  Reply check(std::size_t node, const rpc::CheckItem& item) {
    Node& at = *nodes_[node];
    AsRequest as(item);
    std::optional<Reply> reply;
    auto told = [&](Reply answer) { reply = std::move(answer); };
    if (at.forwarder->concerns(as.request) || at.forwarder->knows(as.request)) {
      at.forwarder->decide(item, told);
    } else {
      Decision decision;
      at.engine->check(as.request, now, decision);
      if (!at.forwarder->pass_on(as.request, decision, told)) {
        return reply_of(decision, *at.engine->limiter().rules());
      }
    }
    for (int i = 0; !reply && i < 100; ++i) exchange(10 * kMillisecond);
    if (!reply) {
      reply.emplace();
      reply->error = {ErrorKind::unknown, "never told"};
    }
    return *std::move(reply);
  }

  /// Sessions of all with all.
  void connect() {
    for (auto& node : nodes_) {
      for (crdt::PeerIndex peer = 0; peer + 1 < size(); ++peer) {
        node->engine->peer_up(peer, incarnation_of(node->order[peer + 1]), now);
      }
    }
  }
  /// Rights of escrow rules: without disks nodes have shares of windows that begin once they know
  /// each other. Windows begin with the hour.
  void give_shares() {
    connect();
    exchange(2 * kSecond);
    now += kHour - now % kHour;
    exchange(40 * kMillisecond);
  }
  /// Lets time pass in steps of 10 ms; what was sent in one arrives in the next, unless `fault`
  /// says not_sent.
  void exchange(Nanos time) {
    for (const Nanos end = now + time; now < end;) {
      now = std::min(end, now + 10 * kMillisecond);
      for (Sent& one : std::exchange(sent_, {})) {
        if (fault(one.from, one.to) == Fault::not_sent) continue;
        Node& to = *nodes_[one.to];
        auto from = std::find(to.order.begin() + 1, to.order.end(), one.from);
        to.engine->receive(static_cast<crdt::PeerIndex>(from - to.order.begin() - 1),
                           incarnation_of(one.from), one.message, now);
      }
      for (auto& node : nodes_) {
        node->engine->pump(now);
        node->forwarder->pump();
      }
    }
  }

  Engine& engine(std::size_t node) { return *nodes_[node]->engine; }
  Forwarder& forwarder(std::size_t node) { return *nodes_[node]->forwarder; }
  std::size_t size() const { return nodes_.size(); }
  std::uint64_t used(std::size_t node, std::uint32_t rule, const rpc::CheckItem& item) {
    AsRequest as(item);
    return engine(node).limiter().used(rule, as.request, now);
  }
  /// Of an escrow rule: by all members, as this node's replica has it.
  std::uint64_t used_rows(std::size_t node, std::uint32_t rule, const rpc::CheckItem& item) {
    AsRequest as(item);
    const crdt::CellId id = engine(node).escrow_window(rule, as.request, now).cell;
    const std::optional<crdt::Cell> cell = engine(node).replica().find(id);
    std::uint64_t sum = 0;
    if (!cell) return sum;
    for (const crdt::Slot& slot : cell->slots)
      sum += slot.id.birth == crdt::kUsedRow ? slot.value : 0;
    return sum;
  }
  std::uint64_t used(std::uint32_t rule, const rpc::CheckItem& item) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < size(); ++i) sum += used(i, rule, item);
    return sum;
  }

  Nanos now;
  Nanos answer_time = 0;  ///< which passes until a member has decided what it is asked
  std::function<Fault(std::size_t from, std::size_t to)> fault = [](std::size_t, std::size_t) {
    return Fault::none;
  };

 private:
  struct AsRequest {
    explicit AsRequest(const rpc::CheckItem& item) {
      for (const auto& [key, value] : item.entries) entries.push_back({key, value});
      rule_filter.assign(item.rule_filter.begin(), item.rule_filter.end());
      request = {item.domain,      entries,     item.hits,           item.id,
                 item.wants_bound, rule_filter, !rule_filter.empty()};
      for (const rpc::CheckDescriptor& from : item.more) {
        std::vector<Entry>& to = further.emplace_back();
        for (const auto& [key, value] : from.entries) to.push_back({key, value});
      }
      for (std::size_t i = 0; i < further.size(); ++i) {
        more.push_back({further[i], item.more[i].hits});
      }
      request.more = more;
      request.kind = item.kind;
    }
    std::vector<Entry> entries;
    std::vector<std::string_view> rule_filter;
    std::vector<std::vector<Entry>> further;
    std::vector<Descriptor> more;
    Request request;
  };

  static Reply reply_of(const Decision& decision, const RuleSet& rules) {
    Reply reply;
    tell(decision, rules, reply);
    return reply;
  }

  struct Node final : ForwardDriver {
    Node(HomeCluster& all, std::size_t index, std::shared_ptr<const RuleSet> rules,
         const std::map<std::string, unsigned>& weights)
        : cluster(all), self(index) {
      ForwardOptions home;
      for (std::size_t i = 0; i < cluster.members_.size(); ++i) {
        order.push_back(i == 0 ? self : i <= self ? i - 1 : i);
        home.members.push_back(cluster.members_[order.back()]);
      }
      EngineOptions options;
      options.rules = std::move(rules);
      options.fresh_incarnation = [index] { return incarnation_of(index); };
      options.max_series = 1024;
      options.replica.self = home.members.front();
      options.replica.peers.assign(home.members.begin() + 1, home.members.end());
      EngineEvents events;
      events.send = [this](crdt::PeerIndex peer, const crdt::Message& message) {
        cluster.sent_.push_back({self, order[peer + 1], message});
      };
      events.log = [](const std::string&, const std::string&) {};
      engine = std::make_unique<Engine>(std::move(options), nullptr, std::move(events));
      std::string error;
      engine->start(cluster.now, {}, error);
      home.weights = weights;
      home.deadline = cluster.deadline_;
      forwarder = std::make_unique<Forwarder>(*engine, std::move(home), *this);
    }

    Reply alone(const Request& request) {
      Decision decision;
      engine->check(request, cluster.now, decision);
      return reply_of(decision, *engine->limiter().rules());
    }

    Nanos wall() override { return cluster.now; }
    bool reachable(std::size_t) override { return true; }
    void forward(std::size_t member, rpc::CheckItem item, Nanos,
                 std::function<void(Reply)> done) override {
      Reply reply;
      AsRequest as(item);
      cluster.pass(cluster.answer_time);
      send(member, reply.error, [&](Node& to) {
        reply.error = to.forwarder->refuse(as.request);
        if (reply.error.empty()) reply = to.alone(as.request);
      });
      done(reply);
    }
    void forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout, Nanos,
                         std::function<void(ReserveReply)> done) override {
      ReserveReply reply;
      AsRequest as(item);
      cluster.pass(cluster.answer_time);
      send(member, reply.decision.error, [&](Node& to) {
        reply.decision.error = to.forwarder->refuse(as.request);
        if (!reply.decision.error.empty()) return;
        Decision decision;
        Ticket ticket = to.engine->reserve(as.request, cluster.now, timeout, decision);
        reply.decision = reply_of(decision, *to.engine->limiter().rules());
        reply.ticket = to.engine->ticket_name(ticket);
      });
      done(reply);
    }
    void forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                        std::function<void(SettleReply)> done) override {
      SettleReply reply;
      send(member, reply.error, [&](Node& to) {
        Settled settled = to.engine->settle(to.engine->ticket_named(ticket), hits, cluster.now);
        reply.settled = settled.known;
      });
      done(reply);
    }
    void when_durable(std::function<void(bool)> done) override { done(true); }

    template <typename Run>
    void send(std::size_t member, Error& error, Run run) {
      std::size_t to = order[member];
      Fault fault = cluster.fault(self, to);
      if (fault == Fault::not_sent) {
        error = {ErrorKind::unavailable, "connection refused"};
        return;
      }
      run(*cluster.nodes_[to]);
      if (fault == Fault::answer_lost) error = {ErrorKind::unknown, "connection lost"};
    }

    HomeCluster& cluster;
    std::size_t self;
    std::vector<std::size_t> order;  // member index of the forwarder -> of the cluster
    std::unique_ptr<Engine> engine;
    std::unique_ptr<Forwarder> forwarder;
  };

  static crdt::Incarnation incarnation_of(std::size_t node) { return {1, node + 1}; }

  struct Sent {
    std::size_t from = 0;
    std::size_t to = 0;
    crdt::Message message;
  };
  /// While somebody waits for an answer.
  void pass(Nanos time) {
    if (time == 0) return;
    now += time;
    for (auto& node : nodes_) node->engine->pump(now);
  }

  Nanos deadline_;
  std::vector<crdt::Member> members_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Sent> sent_;
};

}  // namespace weir::node::test
