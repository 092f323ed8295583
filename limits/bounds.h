#pragma once

#include <cstddef>
#include <cstdint>

namespace weir {

/// How large what comes from outside may be: rules, and requests as every front takes them and the
/// clients send them. The library itself takes requests of any size.
inline constexpr std::size_t kMaxName = 256;        ///< bytes of a domain, or of a rule's name
inline constexpr std::size_t kMaxEntries = 64;      ///< of a descriptor, and of what a rule matches
inline constexpr std::size_t kMaxEntryText = 4096;  ///< bytes of an entry's key or value
inline constexpr std::size_t kMaxRequestId = 128;   ///< bytes
inline constexpr std::size_t kMaxTicket = 128;      ///< bytes
inline constexpr std::size_t kMaxDenyMessage = 1024;  ///< bytes of Rule::deny_message
inline constexpr std::uint16_t kDenyStatus =
    429;  ///< HTTP status of a denial, if no rule says another

}  // namespace weir
