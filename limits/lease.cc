#include <weir/limits/lease.h>

#include <algorithm>
#include <vector>

#include <weir/limits/algorithms/window.h>

namespace weir {
namespace {

bool can_be_leased(const Rule& rule) {
  return !rule.limit_from_request && rule.algorithm != Algorithm::sliding_log &&
         rule.algorithm != Algorithm::leaky_bucket && rule.durability == Durability::async &&
         rule.enforcement == Enforcement::merged && rule.phase != Phase::first_hit &&
         !rule.count_denied && !rule.candidate && rule.cost_by_entry.empty();
}

/// When what is taken now stops to count where it was taken.
Nanos cell_end(const Limiter& limiter, const Rule& rule, std::uint32_t index,
               const Request& request, Nanos now) {
  if (is_bucket(rule.algorithm)) return kNever;
  WindowShape shape = window_shape(rule, limiter.series_of(index, request));
  return shape.start(shape.index(now) + 1);
}

}  // namespace

Lease grant_lease(Limiter& limiter, const Request& request, const LeaseTerms& terms, Nanos now,
                  Nanos wall, Decision& out) {
  const Nanos newest = std::max(now, wall);
  Nanos end = newest + std::clamp<Nanos>(terms.term, 0, kMaxLeaseTerm);
  std::uint64_t hits = std::min(terms.most, kMaxLeaseHits);
  bool possible = request.id.empty() && request.more.empty() && request.hits > 0 &&
                  request.kind == RequestKind::check;
  bool counted = false;
  std::vector<std::uint32_t> matched;
  const std::shared_ptr<const RuleSet> rules = limiter.rules();
  if (possible) rules->match(request, matched);
  for (std::uint32_t index : matched) {
    const Rule& rule = rules->rules()[index];
    const std::uint64_t cost = rule.cost_of(request);
    if (cost == 0 || rule.unlimited) continue;
    counted = true;
    possible = possible && can_be_leased(rule);
    const std::uint64_t limit = is_bucket(rule.algorithm) ? rule.burst : rule.limit;
    const std::uint64_t left = limit - std::min(limit, limiter.used(index, request, now));
    hits = std::min(hits, left / cost / std::max<std::uint64_t>(terms.part, 1));
    hits = std::min(hits, limiter.may_lease(index, request, terms.caller) / cost);
    end = std::min(end, cell_end(limiter, rule, index, request, now));
  }
  // Reservations keep a quarter of the tickets.
  const TicketCounters tickets = limiter.tickets();
  possible = possible && tickets.open < tickets.most - tickets.most / 4;
  if (possible && counted && hits > request.hits && end > newest) {
    Lease lease;
    Request block = request;
    block.hits = hits;
    lease.hits = hits;
    lease.term = end - newest;
    lease.ticket = limiter.reserve(block, now, lease.term + std::max<Nanos>(terms.grace, 0), out,
                                   {terms.caller, true});
    if (lease.ticket) return lease;
    if (out.allowed) return {};  // without room for a ticket, an open rule has counted it
  }
  limiter.check(request, now, out);
  return {};
}

}  // namespace weir
