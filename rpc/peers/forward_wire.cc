#include <weir/rpc/peers/forward_wire.h>

#include <kj/exception.h>

#include <utility>

#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using Texts = std::vector<std::pair<std::string, std::string>>;

/// Bytes of an error that another node tells.
constexpr std::size_t kMaxError = 4096;
/// What a request, and a status in its answer, take on the wire beside their texts.
constexpr std::size_t kRequestBytes = 128;
constexpr std::size_t kStatusBytes = 120;
/// Beside its characters a std::string takes so much at most, once they are on the heap.
constexpr std::size_t kStringBytes = sizeof(std::string) + 24;

capnp::uint count(std::size_t n) {
  return static_cast<capnp::uint>(n);
}

kj::StringPtr text(const std::string& s) {
  return kj::StringPtr(s.c_str(), s.size());
}

std::string copy(capnp::Text::Reader in) {
  return std::string(in.cStr(), in.size());
}

std::string longer(const char* what, std::size_t most) {
  return std::string(what) + " is longer than " + std::to_string(most) + " bytes";
}

std::string more(std::size_t most, const char* what) {
  return "more than " + std::to_string(most) + " " + what;
}

/// Why these entries of a descriptor are refused; empty: they are not.
std::string problem(const Texts& entries) {
  if (entries.size() > kMaxEntries) return more(kMaxEntries, "descriptor entries");
  for (const auto& [key, value] : entries) {
    if (key.size() > kMaxText || value.size() > kMaxText) {
      return longer("a descriptor entry", kMaxText);
    }
  }
  return {};
}

std::string problem(capnp::List<schema::Entry>::Reader entries) {
  if (entries.size() > kMaxEntries) return more(kMaxEntries, "descriptor entries");
  for (auto entry : entries) {
    if (entry.getKey().size() > kMaxText || entry.getValue().size() > kMaxText) {
      return longer("a descriptor entry", kMaxText);
    }
  }
  return {};
}

void encode(const Texts& entries, capnp::List<schema::Entry>::Builder out) {
  for (std::size_t i = 0; i < entries.size(); ++i) {
    out[count(i)].setKey(text(entries[i].first));
    out[count(i)].setValue(text(entries[i].second));
  }
}

Texts copy(capnp::List<schema::Entry>::Reader entries) {
  Texts out;
  out.reserve(entries.size());
  for (auto entry : entries) out.emplace_back(copy(entry.getKey()), copy(entry.getValue()));
  return out;
}

/// False if `body` says so, or throws.
template <typename Body>
bool guarded(Body&& body) {
  bool ok = false;
  auto exception = kj::runCatchingExceptions([&] { ok = body(); });
  return ok && exception == nullptr;
}

}  // namespace

std::string problem(const CheckItem& item) {
  if (item.domain.size() > kMaxText) return longer("domain", kMaxText);
  if (item.id.size() > kMaxRequestId) return longer("id", kMaxRequestId);
  if (item.more.size() >= kMaxDescriptors) return more(kMaxDescriptors, "descriptors");
  if (item.rule_filter.empty()) return "no rule is named";
  if (item.rule_filter.size() > kMaxRuleFilter) return more(kMaxRuleFilter, "rules are named");
  for (const std::string& rule : item.rule_filter) {
    if (rule.size() > kMaxText) return longer("a rule's name", kMaxText);
  }
  std::string wrong = problem(item.entries);
  for (std::size_t i = 0; wrong.empty() && i < item.more.size(); ++i) {
    wrong = problem(item.more[i].entries);
  }
  return wrong;
}

std::string problem(schema::ForwardedCheck::Reader in) {
  auto request = in.getRequest();
  if (request.getDomain().size() > kMaxText) return longer("domain", kMaxText);
  if (request.getId().size() > kMaxRequestId) return longer("id", kMaxRequestId);
  if (request.getRuleFilter().size() > 0) return "ruleFilter is not for requests between nodes";
  auto further = request.getMore();
  if (further.size() >= kMaxDescriptors) return more(kMaxDescriptors, "descriptors");
  auto rules = in.getRules();
  if (rules.size() == 0) return "no rule is named";
  if (rules.size() > kMaxRuleFilter) return more(kMaxRuleFilter, "rules are named");
  for (auto rule : rules) {
    if (rule.size() > kMaxText) return longer("a rule's name", kMaxText);
  }
  std::string wrong = problem(request.getEntries());
  for (capnp::uint i = 0; wrong.empty() && i < further.size(); ++i) {
    wrong = problem(further[i].getEntries());
  }
  return wrong;
}

std::size_t forwarded_bytes(const CheckItem& item) {
  std::size_t bytes = kRequestBytes + item.domain.size() + item.id.size();
  auto add = [&bytes](const Texts& entries) {
    for (const auto& [key, value] : entries) bytes += 32 + key.size() + value.size();
  };
  add(item.entries);
  for (const CheckDescriptor& each : item.more) {
    bytes += 32;
    add(each.entries);
  }
  const std::size_t descriptors = 1 + item.more.size();
  for (const std::string& rule : item.rule_filter) {
    bytes += 16 + rule.size() + descriptors * (kStatusBytes + rule.size());
  }
  return bytes;
}

std::size_t served_bytes(schema::ForwardedCheck::Reader in) {
  auto request = in.getRequest();
  std::size_t bytes =
      sizeof(CheckItem) + sizeof(Reply) + 48 + request.getDomain().size() + request.getId().size();
  auto add = [&bytes](capnp::List<schema::Entry>::Reader entries) {
    for (auto entry : entries) {
      bytes += 2 * kStringBytes + entry.getKey().size() + entry.getValue().size();
    }
  };
  add(request.getEntries());
  for (auto descriptor : request.getMore()) {
    bytes += sizeof(CheckDescriptor);
    add(descriptor.getEntries());
  }
  const std::size_t descriptors = 1 + request.getMore().size();
  for (auto rule : in.getRules()) {
    bytes += kStringBytes + rule.size() + descriptors * (sizeof(Status) + 24 + rule.size());
  }
  return bytes;
}

void encode(const CheckItem& item, schema::ForwardedCheck::Builder out) {
  auto request = out.initRequest();
  request.setDomain(text(item.domain));
  request.setHits(item.hits);
  if (!item.id.empty()) request.setId(text(item.id));
  request.setWantsBound(item.wants_bound);
  request.setKind(encode_kind(item.kind));
  if (item.limit.any()) {
    auto limit = request.initLimit();
    limit.setLimit(item.limit.limit);
    limit.setWindowNs(item.limit.window);
    limit.setBurst(item.limit.burst);
  }
  encode(item.entries, request.initEntries(count(item.entries.size())));
  if (!item.more.empty()) {
    auto further = request.initMore(count(item.more.size()));
    for (std::size_t i = 0; i < item.more.size(); ++i) {
      auto to = further[count(i)];
      to.setHits(item.more[i].hits);
      encode(item.more[i].entries, to.initEntries(count(item.more[i].entries.size())));
    }
  }
  auto rules = out.initRules(count(item.rule_filter.size()));
  for (std::size_t i = 0; i < item.rule_filter.size(); ++i)
    rules.set(count(i), text(item.rule_filter[i]));
}

CheckItem decode(schema::ForwardedCheck::Reader in) {
  auto request = in.getRequest();
  CheckItem out;
  out.domain = copy(request.getDomain());
  out.hits = request.getHits();
  out.id = copy(request.getId());
  out.wants_bound = request.getWantsBound();
  out.kind = decode_kind(request.getKind()).value_or(RequestKind::check);
  if (request.hasLimit()) {
    auto limit = request.getLimit();
    out.limit = {limit.getLimit(), limit.getWindowNs(), limit.getBurst()};
  }
  out.entries = copy(request.getEntries());
  out.more.reserve(request.getMore().size());
  for (auto descriptor : request.getMore()) {
    out.more.push_back({copy(descriptor.getEntries()), descriptor.getHits()});
  }
  out.rule_filter.reserve(in.getRules().size());
  for (auto rule : in.getRules()) out.rule_filter.push_back(copy(rule));
  return out;
}

std::size_t most_statuses(const CheckItem& item) {
  return item.rule_filter.size() * (1 + item.more.size());
}

bool decode_answer(schema::CheckResult::Reader in, std::size_t statuses, Reply& out) {
  return guarded([&] {
    if (in.getError().size() > kMaxError) return false;
    if (in.getStatuses().size() > statuses) return false;
    for (auto status : in.getStatuses()) {
      if (status.getRule().size() > kMaxText) return false;
    }
    return decode(in, out);
  });
}

bool decode_answer(schema::Link::ReserveResults::Reader in, std::size_t statuses,
                   ReserveReply& out) {
  return guarded([&] {
    if (in.getTicket().size() > kMaxTicket) return false;
    out.ticket = copy(in.getTicket());
    return decode_answer(in.getResult(), statuses, out.decision);
  });
}

void encode(const SettleReply& reply, schema::SettleResult::Builder out) {
  out.setErrorKind(encode_kind(reply.error.kind));
  if (!reply.error.empty()) out.setError(text(reply.error.detail));
  out.setSettled(reply.settled);
  out.setReserved(reply.reserved);
  out.setLapsed(reply.lapsed);
  out.setDegraded(reply.degraded);
}

bool decode_answer(schema::SettleResult::Reader in, SettleReply& out) {
  return guarded([&] {
    if (in.getError().size() > kMaxError) return false;
    out.error = decode_error(in.getErrorKind(), in.getError());
    out.settled = in.getSettled();
    out.reserved = in.getReserved();
    out.lapsed = in.getLapsed();
    out.degraded = in.getDegraded();
    return true;
  });
}

std::size_t answer_bytes(const Reply& reply) {
  std::size_t bytes = kRequestBytes + reply.error.detail.size();
  for (const Status& status : reply.statuses) {
    bytes += kStatusBytes + status.rule.size();
    if (!status.deny_message.empty()) bytes += 8 + status.deny_message.size();
  }
  return bytes;
}

}  // namespace weir::rpc
