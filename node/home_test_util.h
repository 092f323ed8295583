#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weir/node/home.h>

namespace weir::node::test {

/// Members with an engine and a desk each, in memory; what one forwards arrives at once, or as
/// `fault` says.
class HomeCluster {
 public:
  enum class Fault {
    none,
    not_sent,     ///< and known to be
    answer_lost,  ///< the other counted
  };

  HomeCluster(std::vector<crdt::Member> members, std::shared_ptr<const RuleSet> rules,
              std::map<std::string, unsigned> weights, Nanos start)
      : now(start), members_(std::move(members)) {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      nodes_.push_back(std::make_unique<Node>(*this, i, rules, weights));
    }
  }

  rpc::CheckReply check(std::size_t node, const rpc::CheckItem& item) {
    Node& at = *nodes_[node];
    AsRequest as(item);
    if (at.desk->concerns(as.request)) {
      rpc::CheckReply reply;
      reply.error = "never told";
      at.desk->decide(item, [&](rpc::CheckReply told) { reply = std::move(told); });
      return reply;
    }
    return at.alone(as.request);
  }

  Engine& engine(std::size_t node) { return *nodes_[node]->engine; }
  HomeDesk& desk(std::size_t node) { return *nodes_[node]->desk; }
  std::size_t size() const { return nodes_.size(); }
  std::uint64_t used(std::size_t node, std::uint32_t rule, const rpc::CheckItem& item) {
    AsRequest as(item);
    return engine(node).limiter().used(rule, as.request, now);
  }
  std::uint64_t used(std::uint32_t rule, const rpc::CheckItem& item) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < size(); ++i) sum += used(i, rule, item);
    return sum;
  }

  Nanos now;
  std::function<Fault(std::size_t from, std::size_t to)> fault = [](std::size_t, std::size_t) {
    return Fault::none;
  };

 private:
  struct AsRequest {
    explicit AsRequest(const rpc::CheckItem& item) {
      for (const auto& [key, value] : item.entries) entries.push_back({key, value});
      only.assign(item.only.begin(), item.only.end());
      request = {item.domain, entries, item.hits, item.id, item.wants_bound, only};
    }
    std::vector<Entry> entries;
    std::vector<std::string_view> only;
    Request request;
  };

  struct Node final : HomeDriver {
    Node(HomeCluster& all, std::size_t index, std::shared_ptr<const RuleSet> rules,
         const std::map<std::string, unsigned>& weights)
        : cluster(all), self(index) {
      EngineOptions options;
      options.rules = std::move(rules);
      options.fresh_incarnation = [index] { return crdt::Incarnation{1, index + 1}; };
      options.max_series = 1024;
      engine = std::make_unique<Engine>(std::move(options), nullptr, EngineEvents{});
      std::string error;
      engine->start(cluster.now, {}, error);
      HomeOptions home;
      for (std::size_t i = 0; i < cluster.members_.size(); ++i) {
        order.push_back(i == 0 ? self : i <= self ? i - 1 : i);
        home.members.push_back(cluster.members_[order.back()]);
      }
      home.weights = weights;
      desk = std::make_unique<HomeDesk>(*engine, std::move(home), *this);
    }

    rpc::CheckReply alone(const Request& request) {
      Decision decision;
      engine->check(request, cluster.now, decision);
      return reply_of(decision, *engine->limiter().rules());
    }

    Nanos wall() override { return cluster.now; }
    void forward(std::size_t member, rpc::CheckItem item,
                 std::function<void(rpc::CheckReply)> done) override {
      rpc::CheckReply reply;
      AsRequest as(item);
      send(member, reply.error, [&](Node& to) {
        reply.error = to.desk->refuse(as.request);
        if (reply.error.empty()) reply = to.alone(as.request);
      });
      done(reply);
    }
    void forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout,
                         std::function<void(rpc::ReserveReply)> done) override {
      rpc::ReserveReply reply;
      AsRequest as(item);
      send(member, reply.decision.error, [&](Node& to) {
        reply.decision.error = to.desk->refuse(as.request);
        if (!reply.decision.error.empty()) return;
        Decision decision;
        Ticket ticket = to.engine->reserve(as.request, cluster.now, timeout, decision);
        reply.decision = reply_of(decision, *to.engine->limiter().rules());
        reply.ticket = to.engine->ticket_name(ticket);
      });
      done(reply);
    }
    void forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                        std::function<void(rpc::SettleReply)> done) override {
      rpc::SettleReply reply;
      send(member, reply.error, [&](Node& to) {
        Settled settled = to.engine->settle(to.engine->ticket_named(ticket), hits, cluster.now);
        reply.settled = settled.known;
      });
      done(reply);
    }
    void when_durable(std::function<void(bool)> done) override { done(true); }

    template <typename Run>
    void send(std::size_t member, std::string& error, Run run) {
      std::size_t to = order[member];
      Fault fault = cluster.fault(self, to);
      if (fault == Fault::not_sent) {
        error = "unavailable: connection refused";
        return;
      }
      run(*cluster.nodes_[to]);
      if (fault == Fault::answer_lost) error = "unknown: connection lost";
    }

    HomeCluster& cluster;
    std::size_t self;
    std::vector<std::size_t> order;  // member index of the desk -> of the cluster
    std::unique_ptr<Engine> engine;
    std::unique_ptr<HomeDesk> desk;
  };

  std::vector<crdt::Member> members_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace weir::node::test
