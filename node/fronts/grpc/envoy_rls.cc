#include <weir/node/fronts/grpc/envoy_rls.h>

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>

namespace weir::node {
namespace {

namespace v3 = envoy::service::ratelimit::v3;
using RateLimit = v3::RateLimitResponse::RateLimit;

GrpcError read_descriptor(const envoy::extensions::common::ratelimit::v3::RateLimitDescriptor& in,
                          std::size_t index, std::uint32_t hits_of_all,
                          google::protobuf::Arena& arena, Descriptor& out) {
  out.hits = in.has_hits_addend() ? in.hits_addend().value() : std::max(hits_of_all, 1u);
  const std::span<Entry> entries =
      arena_array<Entry>(arena, static_cast<std::size_t>(in.entries_size()));
  for (int i = 0; i < in.entries_size(); ++i) {
    entries[static_cast<std::size_t>(i)] = {in.entries(i).key(), in.entries(i).value()};
  }
  out.entries = entries;
  return check_entries(entries, index);
}

Nanos window_of(envoy::type::v3::RateLimitUnit unit) {
  switch (unit) {
    case envoy::type::v3::SECOND:
      return kSecond;
    case envoy::type::v3::MINUTE:
      return kMinute;
    case envoy::type::v3::HOUR:
      return kHour;
    case envoy::type::v3::DAY:
      return kDay;
    case envoy::type::v3::WEEK:
      return 7 * kDay;
    case envoy::type::v3::MONTH:
      return 30 * kDay;
    case envoy::type::v3::YEAR:
      return 365 * kDay;
    default:
      return 0;
  }
}

/// What descriptors say one by one, and a request once: it must be the same of all.
GrpcError read_common(const v3::RateLimitRequest& in, Request& out) {
  const auto& first = in.descriptors(0);
  if (first.is_negative_hits()) out.kind = RequestKind::refund;
  if (first.has_limit()) {
    out.limit.limit = first.limit().requests_per_unit();
    out.limit.window = window_of(first.limit().unit());
    if (out.limit.limit == 0 || out.limit.window == 0) {
      return invalid("descriptors[0].limit: expected requests_per_unit above 0, and a unit");
    }
  }
  for (int i = 1; i < in.descriptors_size(); ++i) {
    const auto& one = in.descriptors(i);
    if (one.is_negative_hits() != first.is_negative_hits()) {
      return {GrpcCode::unimplemented,
              fmt::format("descriptors[{}].is_negative_hits: expected the same of all", i)};
    }
    if (one.has_limit() != first.has_limit() ||
        one.limit().requests_per_unit() != first.limit().requests_per_unit() ||
        one.limit().unit() != first.limit().unit()) {
      return {GrpcCode::unimplemented,
              fmt::format("descriptors[{}].limit: expected the same of all", i)};
    }
  }
  return {};
}

RateLimit::Unit unit_of(Nanos window) {
  switch (window) {
    case kSecond:
      return RateLimit::SECOND;
    case kMinute:
      return RateLimit::MINUTE;
    case kHour:
      return RateLimit::HOUR;
    case kDay:
      return RateLimit::DAY;
    case 7 * kDay:
      return RateLimit::WEEK;
    case 30 * kDay:
      return RateLimit::MONTH;
    case 365 * kDay:
      return RateLimit::YEAR;
    default:
      return RateLimit::UNKNOWN;
  }
}

std::uint32_t narrowed(std::uint64_t value) {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(value, std::numeric_limits<std::uint32_t>::max()));
}

/// Says more of its descriptor than the other.
bool rather(const Status& one, const Status& other) {
  if (one.allowed != other.allowed) return !one.allowed;
  return one.allowed ? one.remaining < other.remaining : one.retry_after > other.retry_after;
}

void write_status(const Status& status, v3::RateLimitResponse::DescriptorStatus& out) {
  out.set_code(status.allowed ? v3::RateLimitResponse::OK : v3::RateLimitResponse::OVER_LIMIT);
  out.set_limit_remaining(narrowed(status.remaining));
  const Nanos wait = status.allowed ? status.reset : status.retry_after;
  // Envoy cuts off what is below a second.
  if (wait != kNever) {
    out.mutable_duration_until_reset()->set_seconds(
        static_cast<std::int64_t>(seconds_rounded_up(wait)));
  }
  RateLimit& limit = *out.mutable_current_limit();
  limit.set_name(status.rule);
  limit.set_unit(unit_of(status.window));
  limit.set_requests_per_unit(
      narrowed(limit.unit() == RateLimit::UNKNOWN ? status.limit : status.quota));
}

}  // namespace

GrpcError read_rls(const v3::RateLimitRequest& in, google::protobuf::Arena& arena, Request& out) {
  if (GrpcError error = check_domain(in.domain()); !error.empty()) return error;
  const auto count = static_cast<std::size_t>(in.descriptors_size());
  if (count == 0 || count > kMaxDescriptors) {
    return invalid(fmt::format("descriptors: expected 1 to {}, got {}", kMaxDescriptors, count));
  }
  const std::span<Descriptor> all = arena_array<Descriptor>(arena, count);
  for (std::size_t i = 0; i < count; ++i) {
    GrpcError error =
        read_descriptor(in.descriptors(static_cast<int>(i)), i, in.hits_addend(), arena, all[i]);
    if (!error.empty()) return error;
  }
  out = {};
  out.domain = in.domain();
  out.descriptor = all[0].entries;
  out.hits = all[0].hits;
  out.more = all.subspan(1);
  return read_common(in, out);
}

void write_rls(const Reply& reply, std::size_t descriptors, Nanos now, v3::RateLimitResponse& out) {
  const bool passes = reply.error.empty() && reply.allowed;
  std::array<const Status*, kMaxDescriptors> told{};
  for (const Status& status : reply.statuses) {
    if (status.shadow || status.descriptor >= descriptors) continue;
    const Status*& best = told[status.descriptor];
    if (best == nullptr || rather(status, *best)) best = &status;
  }
  out.set_overall_code(passes ? v3::RateLimitResponse::OK : v3::RateLimitResponse::OVER_LIMIT);
  for (std::size_t i = 0; i < descriptors; ++i) {
    auto& to = *out.add_statuses();
    to.set_code(v3::RateLimitResponse::OK);
    if (told[i] != nullptr) write_status(*told[i], to);
  }
  if (reply.decider() != nullptr || !reply.error.empty()) {
    set_metadata(reply, *out.mutable_dynamic_metadata());
  }
  if (passes) return;
  const auto add = [&](std::string_view name, std::string_view value) {
    auto& header = *out.add_response_headers_to_add();
    header.set_key(std::string(name));
    header.set_value(std::string(value));
  };
  // Envoy writes X-RateLimit-* itself where it is told to.
  each_header(reply, now, [&](std::string_view name, std::string_view value) {
    if (!name.starts_with("X-")) add(name, value);
  });
  add("Content-Type", "application/problem+json");
  out.set_raw_body(denial_body(reply));
}

}  // namespace weir::node
