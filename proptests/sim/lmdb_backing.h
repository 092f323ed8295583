#pragma once

#include <memory>
#include <string>

#include <weir/proptests/sim/disk.h>

namespace weir::sim {

/// A real LMDB store in `path`, which is emptied first.
std::unique_ptr<Backing> make_lmdb_backing(const std::string& path, const crdt::Member& self);

}  // namespace weir::sim
