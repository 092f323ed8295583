#pragma once

#include <cstdint>

#include <weir/limits/limiter.h>

namespace weir {

/// What a client that asks for a lease wants.
struct LeaseTerms {
  std::uint64_t most = 0;   ///< hits at most, those of the request itself included
  Nanos term = kSecond;     ///< for how long at most
  Nanos grace = kSecond;    ///< so long after the term it is charged in full if nobody settled it
  std::uint64_t part = 16;  ///< of what remains in each rule at most 1/part is given away
  /// TicketHolder::caller, who holds at most LimiterOptions::caller_percent of each limit.
  std::uint64_t caller = 0;
};

/// A block of hits that a client may let pass on its own, for requests with the same descriptor.
struct Lease {
  Ticket ticket;           ///< to settle with what was used; none: there is no lease
  std::uint64_t hits = 0;  ///< held, those of the request included
  Nanos term = 0;          ///< from the request's sending on; what is not spent then must not be
};

inline constexpr std::uint64_t kMaxLeaseHits = 1u << 20;
inline constexpr Nanos kMaxLeaseTerm = kMinute;

/// Decides `request`, and holds more hits of the same kind with it (Limiter::reserve) if every rule
/// that counts it can be leased. Then a hit that is spent within the term counts as if the limiter
/// had been asked for it: in the same window, and in a bucket not earlier than it came. Otherwise
/// decides as check() does.
///
/// Can be leased: fixed and sliding windows, until the window or sub-window ends; token buckets.
/// Not: sliding logs, which count by instants; leaky buckets, which give each request a delay;
/// rules that promise that what passed is on the disk; requests with an id, and those of several
/// descriptors.
///
/// `now` as in Limiter::check. `wall` is the newest time known, where that is ahead of `now`: the
/// window ends by it. Thread-safe; not during a Limiter::reload.
Lease grant_lease(Limiter& limiter, const Request& request, const LeaseTerms& terms, Nanos now,
                  Nanos wall, Decision& out);

}  // namespace weir
