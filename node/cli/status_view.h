#pragma once

#include <span>
#include <string>

namespace weir::node {

/// What one node answered when asked for its status.
struct NodeAnswer {
  std::string address;
  std::string json;   ///< empty if it did not answer
  std::string error;  ///< why not
};

/// For a person: a row per node, then a row per rule and node, and per peer and node. A field that
/// is missing, or not what it should be, shows as "-"; an answer that is no JSON object as an
/// error.
std::string status_text(std::span<const NodeAnswer> answers);

/// For a program, one line: of one node its status as it is, of several
/// {"nodes":[{"address":…,"status":{…}}]}, with "error" instead of "status" where there is none.
std::string status_json(std::span<const NodeAnswer> answers);

}  // namespace weir::node
