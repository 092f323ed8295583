#pragma once

#include <string_view>

namespace weir::node {

/// The reason phrase of a status, which is also the title of a problem document of type about:blank
/// (RFC 9457, section 4.2.1).
std::string_view http_reason(unsigned status);

}  // namespace weir::node
