#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/node/access/access.h>
#include <weir/node/config.h>

namespace weir::node {

struct LoadedAccess {
  std::shared_ptr<const AccessTable> table;  ///< null if there were errors
  std::vector<ConfigError> errors;           ///< all that were found, in document order
};

/// Reads an access file (docs/configuration.md). `file` is for messages.
LoadedAccess parse_access(std::string_view text, const std::string& file);

/// The same from a file of at most 1 MiB.
LoadedAccess load_access(const std::string& path);

}  // namespace weir::node
