#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/ids.h>
#include <weir/limits/fallback.h>
#include <weir/node/engine/engine.h>
#include <weir/node/service/rights_negative_cache.h>
#include <weir/rpc/check.h>

namespace weir::node {

/// Which member is the home of a key: first its region, by rendezvous over the regions, each as
/// often as its weight says; then the member, by rendezvous over those of the region. Pure, and the
/// same on all nodes whose configurations name the same members and weights.
class HomeMap {
 public:
  /// `weights` by region; 1 where none is named, 0: never a home.
  HomeMap(std::vector<crdt::Member> members, const std::map<std::string, unsigned>& weights);

  /// Indices of the home region's members, the home first. Empty if all weights are 0.
  std::vector<std::size_t> order(std::uint64_t key) const;
  /// The key of a request in a rule: the rule's key entries, so that all rules of a domain with the
  /// same ones have the same home.
  static std::uint64_t key_of(const Rule& rule, const Request& request);
  const std::vector<crdt::Member>& members() const { return members_; }

 private:
  struct Region {
    std::string name;
    unsigned weight = 1;
    std::vector<std::size_t> members;
  };
  std::vector<crdt::Member> members_;
  std::vector<Region> regions_;
};

/// What a Forwarder needs of its node. All calls and callbacks are on the driver's thread;
/// callbacks may come at once.
class ForwardDriver {
 public:
  virtual ~ForwardDriver() = default;
  virtual Nanos wall() = 0;
  /// False: the member would not answer now.
  virtual bool reachable(std::size_t member) = 0;
  /// Sends it to another member, which has `patience` to answer. Error::surely_not_counted must be
  /// right.
  virtual void forward(std::size_t member, rpc::CheckItem item, Nanos patience,
                       std::function<void(Reply)> done) = 0;
  virtual void forward_reserve(std::size_t member, rpc::CheckItem item, Nanos timeout,
                               Nanos patience, std::function<void(ReserveReply)> done) = 0;
  virtual void forward_settle(std::size_t member, std::string ticket, std::uint64_t hits,
                              std::function<void(SettleReply)> done) = 0;
  /// Engine::when_durable, and what makes it come soon.
  virtual void when_durable(std::function<void(bool)> done) = 0;
};

struct ForwardOptions {
  std::vector<crdt::Member> members;  ///< of the cluster; the first is this node
  std::map<std::string, unsigned> weights;
  Nanos deadline = 500 * kMillisecond;  ///< for a home's answer; for those of all holders together
  Nanos request_id_ttl = kMinute;       ///< for how long it is known who was asked
};

struct HomeCounters {
  std::uint64_t forwarded = 0;  ///< requests that another member decided, or was asked to
  std::uint64_t served = 0;     ///< requests of other members that were decided here
  std::uint64_t refused = 0;    ///< those that this node is not the home of
  std::uint64_t degraded = 0;   ///< requests whose home did not answer: on_failure decided
};

/// Requests that were denied for want of rights of scarce escrow rules.
struct PassedOnCounters {
  std::uint64_t requests = 0;    ///< that others were asked to decide
  std::uint64_t asked = 0;       ///< others, one after the other
  std::uint64_t admitted = 0;    ///< requests that passed then
  std::uint64_t failed = 0;      ///< requests of which nobody knows whether they were counted
  std::uint64_t suppressed = 0;  ///< requests that nobody was asked about: RightsNegativeCache
  std::uint64_t served = 0;      ///< questions of others that were answered here
};

/// Decides requests that meet rules whose home is elsewhere (docs/home.md), and those that lack
/// rights of an escrow rule which others may have (docs/escrow.md).
///
/// What this node decides itself is reserved, then the homes are asked, then the reservation is
/// settled: in full if all allow, else with nothing. With several homes, all but the last are asked
/// to reserve, too. So a request consumes from all of its rules or from none, but for a home that
/// counted and whose answer was lost. With a request id, sending it again then counts once (where
/// there are several homes: at the last one; the others may count it again).
///
/// Rights: the likeliest holder is asked as a home would be, then the next, kMostHolders at most
/// and within one deadline. What this node has asked for itself may be on its way from them: it is
/// waited for, for a moment (pump()). If nothing of that lets the request pass, or someone may have
/// counted it and did not say, it is denied as it was here.
///
/// A forwarded request names the rules it is about (CheckItem::rule_filter) and is decided where it
/// arrives, or refused; never sent on. One thread drives it.
class Forwarder {
 public:
  Forwarder(Engine& engine, ForwardOptions options, ForwardDriver& driver);

  static constexpr unsigned kMostHolders = 3;

  /// Some rule of the request is decided elsewhere: decide() it. (False: by the engine alone.)
  bool concerns(const Request& request);
  /// It has come before, and others were asked for rights: decide() it.
  bool knows(const Request& request);
  /// `done` is called once, perhaps at once.
  void decide(rpc::CheckItem item, std::function<void(Reply)> done);
  /// The engine denied the request, perhaps only for want of rights that others may have: then they
  /// are asked, and `done` is called once, perhaps at once. False: `denied` stands, and `done` is
  /// not called.
  bool pass_on(const Request& request, const Decision& denied, std::function<void(Reply)> done);
  /// Looks after requests that wait for rights. Every few milliseconds.
  void pump();
  /// Of a request with `rule_filter`, from another member: why this node does not decide it, or
  /// empty.
  Error refuse(const Request& request);
  /// Why a rule of the request cannot be decided here, though this is its home: it is on_failure:
  /// closed, and this node may have counted more than it knows (Engine::knows_counts). Or empty.
  std::string unsure(const Request& request);
  /// The home of the first rule that is decided elsewhere, and that rule, for messages.
  std::string remote_home(const Request& request);

  const HomeCounters& counters() const { return counters_; }
  const PassedOnCounters& passed_on() const { return passed_on_; }

 private:
  struct Remote {
    std::size_t member = 0;
    std::vector<std::size_t> others;  // that may decide too: of its region, or with rights
    std::vector<std::string> rules;
    std::string ticket;
    // Rights of one escrow rule:
    bool rights = false;
    crdt::CellId cell;
    std::uint64_t cost = 0;
    std::uint64_t limit = 0;
    unsigned asked = 0;
    bool bound = false;     // `member` may have counted the request when it came before
    bool in_cache = false;  // RightsNegativeCache::begin
    bool used_up = false;   // says who was asked last
  };
  struct Job;
  struct Routing {
    std::vector<std::string_view> local;
    std::vector<Remote> remotes;
    std::string conflict;  // why it cannot be one request; empty: it can
  };

  Routing route(const Request& request);
  static void add(const Rule& rule, std::vector<std::size_t> order, Routing& routing);
  std::string not_here(std::string_view name, const Request& request, bool& rights);
  std::shared_ptr<Job> make_job(rpc::CheckItem item, std::function<void(Reply)> done);
  bool reserve_here(Job& job, std::span<const std::string_view> rule_filter, bool demand_counted,
                    Decision& decision);
  bool recall(Job& job, const Request& request, Routing& routing);
  bool pass_on(Job& job, Routing& routing, std::vector<Remote> rights);
  std::vector<Remote> lacking(const Request& request, const Decision& denied);
  Remote rights_of(std::uint32_t rule, const Request& request);
  std::vector<std::size_t> holders(const Remote& remote);
  void drop(std::vector<Remote>& remotes);
  void holder_answered(std::shared_ptr<Job> job, const Reply& reply);
  void wait_for_rights(std::shared_ptr<Job> job);
  bool came_meanwhile(Job& job);
  void deny(std::shared_ptr<Job> job);
  void ask(std::shared_ptr<Job> job);
  void answered(std::shared_ptr<Job> job, Reply reply);
  void unanswered(std::shared_ptr<Job> job, const Error& error);
  void conclude(std::shared_ptr<Job> job, bool allowed);
  void tell(const std::shared_ptr<Job>& job);
  void finish(const std::shared_ptr<Job>& job);
  Nanos hold_for(const Job& job) const;
  void merge(std::string_view domain, Reply& reply) const;

  Engine& engine_;
  const HomeMap map_;
  ForwardDriver& driver_;
  std::shared_ptr<const RuleSet> rules_;  // what the fallback was made from
  std::unique_ptr<Fallback> fallback_;
  HomeCounters counters_;
  const Nanos deadline_;
  RightsNegativeCache negative_cache_;
  AskedMembers asked_;
  PassedOnCounters passed_on_;
  /// Who sent a request again while others are asked about it: is told the same. By id.
  std::map<std::string, std::vector<std::function<void(Reply)>>> same_;
  std::vector<std::shared_ptr<Job>> waiting_;  // for rights; RightsNegativeCache bounds them
};

}  // namespace weir::node
