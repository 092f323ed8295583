#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/node/access/access.h>
#include <weir/node/config.h>
#include <weir/node/control/access_control.h>
#include <weir/node/control/certificates.h>
#include <weir/node/control/rules_control.h>
#include <weir/node/engine/engine.h>
#include <weir/node/report/clock_watch.h>
#include <weir/node/report/metrics.h>
#include <weir/node/service/caller_budgets.h>
#include <weir/node/service/coordinator.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/background.h>
#include <weir/rpc/net/turn_meter.h>
#include <weir/rpc/peers/peers.h>
#include <weir/storage/store.h>

namespace weir::node {

/// What a node says of itself, to operators. For the main loop's thread: it gathers there what is
/// the same for any number of rules, and the rest in the background.
class NodeReport final : public Operations {
 public:
  /// Everything that it reports on outlives it.
  struct Sources {
    const NodeConfig& config;
    Engine& engine;
    Coordinator& coordinator;
    const RulesControl& control;
    const storage::Store* store = nullptr;    ///< null: in memory only
    const rpc::PeerNetwork* peers = nullptr;  ///< null: there are none
    const ClockWatch& clock;
    std::function<Nanos()> wall;
    unsigned threads = 1;
    const rpc::TurnMeter& turns;                 ///< of the main loop
    rpc::Background& background;                 ///< of the main loop, too
    const Certificates* certificates = nullptr;  ///< null: no TLS
    const Access& access;
    const AccessControl& access_control;
    const CallerBudgets& budgets;
  };
  explicit NodeReport(Sources sources);

  void status_json(Text done) override;
  void metrics(Text done) override;
  std::vector<Condition> conditions() override;

 private:
  /// Reports of one kind. One is made at a time; who asks meanwhile waits for the next one, and all
  /// of these get the same.
  struct Kind {
    void (NodeReport::*make)(Text done);
    std::vector<Text> waiting = {};
    bool making = false;
  };

  void ask(Kind& kind, Text done);
  void make(Kind& kind);
  void make_status(Text done);
  void make_metrics(Text done);
  void make_text(std::function<std::string()> make, Text done);
  NodeMetrics collect();
  void collect_peers(NodeMetrics& out, Nanos now);
  void collect_rights(NodeMetrics& out);

  Sources from_;
  const Nanos started_at_;
  Kind status_{&NodeReport::make_status};
  Kind metrics_{&NodeReport::make_metrics};
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace weir::node
