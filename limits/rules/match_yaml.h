#pragma once

#include <string>
#include <vector>

#include <weir/limits/rules/match.h>
#include <weir/limits/yaml/reader.h>

namespace weir::internal {

/// Reads `match`: a map from entries to what they must be. False, and noted, if something is wrong.
bool read_match(yaml::Reader& read, const yaml::Value& value, std::vector<Match>& out);

/// Reads `key`: an entry, or a list of entries, each a name or a map from the name to how it is
/// counted. `forms` stays empty if all are plain.
bool read_key(yaml::Reader& read, const yaml::Value& value, std::vector<std::string>& names,
              std::vector<KeyForm>& forms);

/// Reads `true` or `false`.
bool read_bool(yaml::Reader& read, const yaml::Value& value, bool& out);

}  // namespace weir::internal
