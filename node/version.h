#pragma once

#include <string_view>

namespace weir::node {

inline constexpr std::string_view kVersion = WEIR_VERSION;  // set by the build, from project()

}  // namespace weir::node
