#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include <weir/node/access/access.h>
#include <weir/node/config.h>
#include <weir/node/fronts/front.h>
#include <weir/node/service/service.h>
#include <weir/rpc/net/event_loop.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

/// What a front is made of.
struct FrontContext {
  rpc::EventLoop& loop;
  const NodeConfig& config;
  Service* service = nullptr;        ///< a worker's; of fronts that run on workers
  Operations* operations = nullptr;  ///< of fronts that run on the main loop
  std::function<Nanos()> wall;
  /// What the fronts of one address share, on all workers: made by the first of them.
  std::shared_ptr<void>& shared;
  std::shared_ptr<rpc::TlsContext> tls = nullptr;  ///< null: plain
  Access* access = nullptr;                        ///< null: nobody is known
};

enum class FrontPlace { worker, main_loop };

/// Where the front of that name (NodeConfig's kFronts) runs: on every worker, or beside them.
FrontPlace place_of(std::string_view name);
std::unique_ptr<Front> make_front(std::string_view name, const FrontContext& context);

}  // namespace weir::node
