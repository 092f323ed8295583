#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <weir/node/access/caller.h>
#include <weir/node/engine/engine.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/service/worker_service.h>
#include <weir/rpc/check.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/test_util.h>
#include <weir/storage/store.h>

namespace weir::node::test {

/// A caller of no name, who may do all.
inline const Caller kAnyone{.grant = &Grant::everything()};

/// A disk that commits when it is told to, on the main thread.
class ModelDisk final : public storage::Store {
 public:
  bool open(const crdt::Incarnation&, Nanos now, storage::StoreEvents events,
            storage::Recovered& out, std::string&) override {
    events_ = std::move(events);
    // It is no new disk: an earlier boot knew all that its member had counted.
    const crdt::Incarnation earlier{0xD15C, 1};
    out.incarnations = {earlier};
    crdt::Cell registry;
    registry.id = crdt::registry_cell({"eu", "eu-1"}, now);
    registry.raise({earlier, crdt::kCountsRow}, 1);
    out.state.cells = {registry};
    return true;
  }
  bool adopt(const crdt::Incarnation&, Nanos, std::string&) override { return true; }
  void reopen(const crdt::Incarnation&, Nanos) override {}
  void append(crdt::Write write) override { queue_.push_back(std::move(write)); }
  void expire(Nanos) override {}
  void reserve_time(Nanos to) override { events_.reserved(to); }
  std::uint64_t backlog() const override { return queue_.size(); }
  void close(Nanos) override { commit(); }
  storage::StoreCounters counters() const override { return {}; }

  /// The last write that is durable now; 0 if there was none.
  crdt::WriteId commit() {
    crdt::WriteId last = 0;
    for (crdt::Write& write : queue_) {
      last = write.id;
      for (const crdt::Cell& cell : write.delta.cells) crdt::join(cells_[cell.id], cell);
    }
    queue_.clear();
    std::uint64_t sum = 0;
    for (const auto& [id, cell] : cells_) sum += cell.total();
    units_ = sum;
    return last;
  }
  /// Units in all cells that are durable. Any thread.
  std::uint64_t units() const { return units_; }

 private:
  storage::StoreEvents events_;
  std::vector<crdt::Write> queue_;
  std::map<crdt::CellId, crdt::Cell> cells_;
  std::atomic<std::uint64_t> units_{0};
};

/// Other members, who answer when the test says so.
class ModelLinks final : public MemberLinks {
 public:
  struct Asked {
    std::size_t member = 0;
    rpc::CheckItem item;
    std::function<void(Reply)> done;
  };

  bool askable(std::size_t) override { return reachable; }
  void ask(std::size_t member, rpc::CheckItem item, Nanos,
           std::function<void(Reply)> done) override {
    asked.push_back({member, std::move(item), std::move(done)});
  }
  void ask_reserve(std::size_t, rpc::CheckItem, Nanos, Nanos,
                   std::function<void(ReserveReply)> done) override {
    ReserveReply reply;
    reply.decision.fail(ErrorKind::unavailable, "no such link");
    done(std::move(reply));
  }
  void ask_settle(std::size_t, std::string, std::uint64_t, Nanos,
                  std::function<void(SettleReply)> done) override {
    done({{ErrorKind::unavailable, "no such link"}, false, 0, false, false});
  }

  bool reachable = true;
  std::vector<Asked> asked;
};

struct ServiceNodeOptions {
  std::shared_ptr<const RuleSet> rules;
  std::vector<crdt::Member> peers;
  bool durable = true;              ///< with a disk: the model, or
  storage::Store* store = nullptr;  ///< this one
  std::uint64_t boot = 0;           ///< no incarnation is used twice
  std::size_t workers = 2;
  std::size_t max_waiting = 1000;
  std::size_t max_waiting_of_caller = 1000;
  Nanos start = 0;
};

/// The service of a node without its fronts and sockets: the main loop on the test's thread, and
/// workers with loops on threads of their own.
class ServiceNode final : private rpc::Flushable {
 public:
  class Worker;

  explicit ServiceNode(ServiceNodeOptions options)
      : now(options.start), budgets(options.max_waiting_of_caller, 10) {
    EngineOptions engine_options;
    ForwardOptions home;
    engine_options.replica.self = {"eu", "eu-1"};
    engine_options.replica.peers = options.peers;
    home.members = options.peers;
    home.members.insert(home.members.begin(), engine_options.replica.self);
    engine_options.rules = options.rules;
    engine_options.max_series = 4096;
    engine_options.max_waiting = options.max_waiting;
    engine_options.fresh_incarnation = [this, boot = options.boot] {
      return crdt::Incarnation{boot + 1, ++lives_};
    };
    EngineEvents events;
    events.send = [this](crdt::PeerIndex to, const crdt::Message& message) {
      if (send) send(to, message);
    };
    events.reincarnated = [](const crdt::Incarnation&) {};
    events.log = [](const std::string&, const std::string&) {};
    storage::Store* store = options.store != nullptr ? options.store : &disk;
    engine = std::make_unique<Engine>(std::move(engine_options), options.durable ? store : nullptr,
                                      std::move(events));
    storage::StoreEvents told;
    told.committed = [this](crdt::WriteId upto) {
      loop.post([this, upto] {
        if (!stopped_) engine->committed(upto, now);
      });
    };
    std::string error;
    EXPECT_TRUE(engine->start(now, std::move(told), error)) << error;
    coordinator = std::make_unique<Coordinator>(
        *engine, std::move(home), links, [this] { return now.load(); },
        [this] {
          ++commits_wanted;
          if (!std::exchange(pump_soon_, true)) loop.flush_later(*this);
        });
    coordinator->rules_changed(*options.rules);
    for (std::size_t i = 0; i < options.workers; ++i) {
      workers.push_back(std::make_unique<Worker>(*this));
    }
  }
  ~ServiceNode() {
    workers.clear();
    if (pump_soon_) loop.forget(*this);
  }
  ServiceNode(const ServiceNode&) = delete;
  ServiceNode& operator=(const ServiceNode&) = delete;

  void pump() {
    if (stopped_) return;
    engine->pump(now);
    coordinator->pump();
    if (commits_at_once) commit();
  }
  void commit() {
    if (const crdt::WriteId upto = disk.commit()) engine->committed(upto, now);
  }
  /// The engine commits its last; what comes later finds it closed.
  void stop() {
    engine->stop(now);
    stopped_ = true;
  }
  void reload(std::shared_ptr<const RuleSet> rules) {
    engine->reload(rules);
    coordinator->rules_changed(*rules);
  }
  /// Turns the main loop until it is so. False if it never is.
  bool eventually(const std::function<bool()>& condition) {
    return rpc::test::eventually(loop, condition);
  }
  /// Turns the main loop until all that workers sent so far has come and been pumped.
  void arrive();

  rpc::EventLoop loop;
  std::atomic<Nanos> now;
  ModelDisk disk;
  ModelLinks links;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Coordinator> coordinator;
  CallerBudgets budgets;
  MainLoopAnswers answers;
  std::function<void(crdt::PeerIndex, const crdt::Message&)> send;
  int commits_wanted = 0;  // how often somebody asked for one
  bool commits_at_once = false;
  std::vector<std::unique_ptr<Worker>> workers;

 private:
  void flush() noexcept override {
    pump_soon_ = false;
    pump();
  }
  std::uint64_t lives_ = 0;
  bool pump_soon_ = false;
  bool stopped_ = false;
};

/// A thread with a loop and a service, as node/worker.h makes it. For the main thread.
class ServiceNode::Worker {
 public:
  explicit Worker(ServiceNode& node) {
    std::promise<void> ready;
    thread_ = std::thread([&] {
      rpc::EventLoop loop;
      WorkerService service(loop, node.loop, *node.engine, *node.coordinator, node.budgets,
                            node.answers, [&node] { return node.now.load(); });
      loop_ = &loop;
      service_ = &service;
      ready.set_value();
      loop.run();
    });
    ready.get_future().wait();
  }
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void stop() {
    if (!thread_.joinable()) return;
    loop_->stop();
    thread_.join();
  }
  /// Runs it there, in a turn of its own or together with what is posted meanwhile.
  void post(std::function<void(WorkerService&)> what) {
    loop_->post([this, what = std::move(what)] { what(*service_); });
  }
  /// The same, and waits for it; the main loop does not turn meanwhile.
  void run(const std::function<void(WorkerService&)>& what) {
    std::promise<void> done;
    post([&](WorkerService& service) {
      what(service);
      done.set_value();
    });
    done.get_future().wait();
  }
  std::thread::id id() const { return thread_.get_id(); }

 private:
  std::thread thread_;
  rpc::EventLoop* loop_ = nullptr;    // on the thread's stack
  WorkerService* service_ = nullptr;  // too
};

/// What became of one call. For the worker's thread until `told`.
template <typename Answer>
struct Call {
  Answer answer;
  std::atomic<int> told{0};  ///< how often
  bool at_once = false;      ///< before the call returned
  std::thread::id on;        ///< the thread that told
};
template <typename Answer>
using CallPtr = std::shared_ptr<Call<Answer>>;

/// Asks `worker` by `ask(service, done)`, and waits until it is asked.
template <typename Answer, typename Ask>
CallPtr<Answer> call_on(ServiceNode::Worker& worker, Ask ask) {
  auto call = std::make_shared<Call<Answer>>();
  worker.run([&](WorkerService& service) {
    ask(service, [call](Answer& answer) {
      call->answer = std::move(answer);
      call->on = std::this_thread::get_id();
      ++call->told;
    });
    call->at_once = call->told > 0;
  });
  return call;
}

using Replies = std::vector<Reply>;

/// One call of Service::check: what becomes of each of its parts.
inline std::vector<CallPtr<Replies>> check_parts_on(
    ServiceNode::Worker& worker, const std::vector<std::vector<rpc::CheckItem>>& parts,
    const Caller& caller = kAnyone) {
  std::vector<CallPtr<Replies>> calls;
  for (std::size_t i = 0; i < parts.size(); ++i) calls.push_back(std::make_shared<Call<Replies>>());
  worker.run([&](WorkerService& service) {
    std::vector<std::unique_ptr<rpc::AsRequest>> kept;
    std::vector<Request> requests;
    std::vector<std::size_t> sizes;
    for (const auto& part : parts) {
      sizes.push_back(part.size());
      for (const rpc::CheckItem& item : part) {
        kept.push_back(std::make_unique<rpc::AsRequest>(item));
        requests.push_back(kept.back()->request);
      }
    }
    service.check(requests, sizes, caller, [calls](std::size_t part, std::span<Reply> replies) {
      Call<Replies>& call = *calls.at(part);
      call.answer.assign(replies.begin(), replies.end());
      call.on = std::this_thread::get_id();
      ++call.told;
    });
    for (const auto& call : calls) call->at_once = call->told > 0;
  });
  return calls;
}

/// The same of one part.
inline CallPtr<Replies> check_on(ServiceNode::Worker& worker, std::vector<rpc::CheckItem> items,
                                 const Caller& caller = kAnyone) {
  return check_parts_on(worker, {std::move(items)}, caller)[0];
}

inline void ServiceNode::arrive() {
  for (const auto& worker : workers) {
    std::atomic<bool> here{false};
    // Behind what the worker has sent: a turn's batch leaves when it ends.
    worker->run([](WorkerService&) {});
    worker->post([&](WorkerService&) { loop.post([&] { here = true; }); });
    EXPECT_TRUE(eventually([&] { return here.load(); }));
  }
  rpc::test::turn(loop, 1);
}

}  // namespace weir::node::test
