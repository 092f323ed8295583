#pragma once

#include <memory>

#include <weir/node/config.h>
#include <weir/node/engine/engine.h>
#include <weir/node/service/forwarder.h>
#include <weir/storage/store.h>

namespace weir::node {

// What a configuration means for each room.

EngineOptions engine_options(const NodeConfig& config, std::shared_ptr<const RuleSet> rules);
ForwardOptions home_options(const NodeConfig& config);
/// Of a configuration with a storage.
storage::LmdbOptions lmdb_options(const NodeConfig& config);

/// Cores that this process may run on, which a container may have fewer of than the machine.
unsigned usable_cores();

}  // namespace weir::node
