#pragma once

#include <string>

#include <weir/node/cli/replay.h>
#include <weir/node/cli/request_log.h>

namespace weir::node {

/// The report as JSON, in one line. The fields are in docs/replay.md; text that is not UTF-8 is
/// replaced.
std::string replay_json(const ReplayOptions& options, const RequestLog& log,
                        const ReplayReport& report);

/// The report for a person. `source` is what was read.
std::string replay_text(const ReplayOptions& options, const RequestLog& log,
                        const ReplayReport& report, const std::string& source);

}  // namespace weir::node
