#include <weir/node/fronts/grpc/weir_api.h>

#include <fmt/format.h>

#include <weir/limits/limiter.h>
#include <weir/rpc/check.h>

namespace weir::node {
namespace {

using google::protobuf::Duration;

/// False if it is not within 0 and `most`.
bool read_duration(const Duration& in, Nanos most, Nanos& out) {
  if (in.seconds() < 0 || in.seconds() > most / kSecond || in.nanos() < 0 ||
      in.nanos() >= kSecond) {
    return false;
  }
  out = in.seconds() * kSecond + in.nanos();
  return out <= most;
}

void write_duration(Nanos length, Duration& out) {
  out.set_seconds(length / kSecond);
  out.set_nanos(static_cast<std::int32_t>(length % kSecond));
}

GrpcError read_descriptor(const v1::Descriptor& in, std::size_t index,
                          google::protobuf::Arena& arena, Descriptor& out) {
  if (in.has_hits()) out.hits = in.hits();
  const std::span<Entry> entries =
      arena_array<Entry>(arena, static_cast<std::size_t>(in.entries_size()));
  for (int i = 0; i < in.entries_size(); ++i) {
    entries[static_cast<std::size_t>(i)] = {in.entries(i).key(), in.entries(i).value()};
  }
  out.entries = entries;
  return check_entries(entries, index);
}

void write_status(const Status& status, v1::Status& out) {
  out.set_rule(status.rule);
  out.set_allowed(status.allowed);
  out.set_limit(status.limit);
  out.set_remaining(status.remaining);
  if (status.reset != kNever) write_duration(status.reset, *out.mutable_reset());
  if (!status.allowed && status.retry_after != kNever) {
    write_duration(status.retry_after, *out.mutable_retry_after());
  }
  if (status.delay > 0) write_duration(status.delay, *out.mutable_delay());
  out.set_shadow(status.shadow);
  out.set_degraded(status.degraded);
  out.set_exhausted_locally(status.exhausted_locally);
  out.set_descriptor(status.descriptor);
  if (status.over_admission) out.set_over_admission(*status.over_admission);
  out.set_quota(status.quota);
  if (status.window > 0) write_duration(status.window, *out.mutable_window());
}

}  // namespace

GrpcError read_check(const v1::CheckRequest& in, google::protobuf::Arena& arena, Request& out) {
  if (GrpcError error = check_domain(in.domain()); !error.empty()) return error;
  if (in.request_id().size() > rpc::kMaxRequestId) {
    return invalid(fmt::format("request_id: expected at most {} bytes, got {}", rpc::kMaxRequestId,
                               in.request_id().size()));
  }
  const auto count = static_cast<std::size_t>(in.descriptors_size());
  if (count == 0 || count > kMaxDescriptors) {
    return invalid(fmt::format("descriptors: expected 1 to {}, got {}", kMaxDescriptors, count));
  }
  const std::span<Descriptor> all = arena_array<Descriptor>(arena, count);
  for (std::size_t i = 0; i < count; ++i) {
    GrpcError error = read_descriptor(in.descriptors(static_cast<int>(i)), i, arena, all[i]);
    if (!error.empty()) return error;
  }
  out = {};
  out.domain = in.domain();
  out.id = in.request_id();
  out.wants_bound = in.over_admission();
  out.descriptor = all[0].entries;
  out.hits = all[0].hits;
  out.more = all.subspan(1);
  return {};
}

GrpcError read_reserve(const v1::ReserveRequest& in, google::protobuf::Arena& arena, Request& out,
                       Nanos& timeout) {
  if (GrpcError error = read_check(in.request(), arena, out); !error.empty()) return error;
  if (!out.more.empty()) return invalid("request.descriptors: a reservation takes one");
  timeout = kMinute;
  if (in.has_timeout() && !read_duration(in.timeout(), Limiter::kMaxHold, timeout)) {
    return invalid("timeout: expected 0 to a day");
  }
  return {};
}

GrpcError read_settle(const v1::SettleRequest& in) {
  if (!in.ticket().empty() && in.ticket().size() <= rpc::kMaxTicket) return {};
  return invalid(
      fmt::format("ticket: expected 1 to {} bytes, got {}", rpc::kMaxTicket, in.ticket().size()));
}

GrpcError read_lease(const v1::LeaseRequest& in, google::protobuf::Arena& arena, Request& out,
                     LeaseTerms& terms) {
  if (GrpcError error = read_check(in.request(), arena, out); !error.empty()) return error;
  terms.most = in.most();
  if (in.has_term() && !read_duration(in.term(), kMaxLeaseTerm, terms.term)) {
    return invalid("term: expected 0 to a minute");
  }
  return {};
}

void write_check(const Reply& reply, v1::CheckResponse& out) {
  if (!reply.error.empty()) return write_error(reply.error.kind, reply.error.detail, out);
  out.set_allowed(reply.allowed);
  out.set_seen_before(reply.repeated);
  if (reply.deciding >= 0) out.set_deciding(static_cast<std::uint32_t>(reply.deciding));
  for (const Status& status : reply.statuses) write_status(status, *out.add_statuses());
}

void write_error(ErrorKind kind, std::string_view detail, v1::CheckResponse& out) {
  out.mutable_error()->set_kind(static_cast<v1::ErrorKind>(kind));
  out.mutable_error()->set_detail(std::string(detail));
}

void write_reserve(const ReserveReply& reply, v1::ReserveResponse& out) {
  write_check(reply.decision, *out.mutable_decision());
  out.set_ticket(reply.ticket);
}

void write_settle(const SettleReply& reply, v1::SettleResponse& out) {
  out.set_reserved(reply.reserved);
  out.set_lapsed(reply.lapsed);
  out.set_degraded(reply.degraded);
}

void write_lease(const LeaseReply& reply, v1::LeaseResponse& out) {
  write_check(reply.decision, *out.mutable_decision());
  out.set_ticket(reply.ticket);
  out.set_hits(reply.hits);
  if (!reply.ticket.empty()) write_duration(reply.term, *out.mutable_term());
}

}  // namespace weir::node
