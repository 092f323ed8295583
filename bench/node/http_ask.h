#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weir::bench {

/// One request over a connection of its own to 127.0.0.1:`port`, and the body of its answer,
/// whatever the status. Throws std::runtime_error if nobody listens there, or no whole answer came
/// within a minute.
std::string http_get(std::uint16_t port, std::string_view path);
std::string http_post(std::uint16_t port, std::string_view path, std::string_view json);

}  // namespace weir::bench
