#include <weir/node/fronts/http/forward_auth.h>

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include <weir/limits/text/utf8.h>
#include <weir/rpc/check.h>

namespace weir::node {
namespace {

constexpr std::string_view kSpace = " \t";

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

bool same_name(std::string_view lower, std::string_view any) {
  return std::equal(lower.begin(), lower.end(), any.begin(), any.end(), [](char a, char b) {
    return a == (b >= 'A' && b <= 'Z' ? static_cast<char>(b - 'A' + 'a') : b);
  });
}

/// Calls `take(name, value)` for each field, in order.
template <typename Take>
void each_field(std::string_view head, Take take) {
  std::size_t at = head.find("\r\n");
  while (at != std::string_view::npos) {
    at += 2;
    const std::size_t end = head.find("\r\n", at);
    const std::string_view line = head.substr(at, end - at);
    const std::size_t colon = line.find(':');
    if (colon != std::string_view::npos)
      take(line.substr(0, colon), trimmed(line.substr(colon + 1)));
    at = end;
  }
}

/// An address as a hop is written: "192.0.2.1", "192.0.2.1:4711", "2001:db8::1",
/// "[2001:db8::1]:4711". Without brackets and port; empty if it is none.
std::string_view host_of_hop(std::string_view hop) {
  if (!hop.empty() && hop[0] == '[') {
    hop = hop.substr(1, hop.find(']') - 1);
  } else if (std::count(hop.begin(), hop.end(), ':') == 1) {
    hop = hop.substr(0, hop.find(':'));
  }
  return hop.find('/') == std::string_view::npos && parse_cidr(hop) ? hop : std::string_view{};
}

/// A target or a URI up to its query; of an absolute one the path.
std::string_view path_of(std::string_view uri) {
  const std::size_t scheme = uri.find("://");
  if (!uri.empty() && uri[0] != '/' && scheme != std::string_view::npos) {
    const std::size_t slash = uri.find('/', scheme + 3);
    uri = slash == std::string_view::npos ? std::string_view("/") : uri.substr(slash);
  }
  return uri.substr(0, uri.find_first_of("?#"));
}

}  // namespace

/// Of the fields that a gateway may send, the first of each name.
struct ForwardAuthReader::Fields {
  std::string_view method, uri, host, real_ip, forwarded_host;
  std::string_view original_method, original_uri;

  void take(std::string_view name, std::string_view value) {
    const std::array<std::pair<std::string_view, std::string_view*>, 7> known = {
        {{"x-forwarded-method", &method},
         {"x-original-method", &original_method},
         {"x-forwarded-uri", &uri},
         {"x-original-uri", &original_uri},
         {"x-forwarded-host", &forwarded_host},
         {"x-real-ip", &real_ip},
         {"host", &host}}};
    for (const auto& [lower, to] : known) {
      if (to->data() == nullptr && same_name(lower, name)) *to = value;
    }
  }
};

/// The last hop that is no trusted proxy: each hop is told by the one behind it, so what stands
/// before an untrusted one is that one's word.
std::string_view ForwardAuthReader::client_of(const Fields& fields, std::string_view from) {
  std::string_view client = from;
  for (std::size_t i = hops_.size(); i-- > 0;) {
    for (std::string_view left = hops_[i]; left.data() != nullptr;) {
      const std::size_t comma = left.rfind(',');
      const bool last = comma == std::string_view::npos;
      const std::string_view hop = host_of_hop(trimmed(last ? left : left.substr(comma + 1)));
      if (hop.empty()) return client;
      client = hop;
      if (!holds(options_.trusted_proxies, parse_cidr(hop)->network)) return client;
      left = last ? std::string_view{} : left.substr(0, comma);
    }
  }
  const std::string_view real = hops_.empty() ? host_of_hop(fields.real_ip) : std::string_view{};
  return real.empty() ? client : real;
}

bool ForwardAuthReader::add(std::string_view key, std::string_view value) {
  if (value.size() > rpc::kMaxText || !internal::is_clean_text(value)) {
    error_ = fmt::format("{}: expected at most {} bytes of text", key, rpc::kMaxText);
    return false;
  }
  if (!value.empty()) entries_.push_back({key, value});
  return true;
}

std::optional<Request> ForwardAuthReader::read(std::string_view head, std::string_view method,
                                               std::string_view path, std::string_view from) {
  entries_.clear();
  hops_.clear();
  error_.clear();
  std::string_view rest = path.substr(std::min(path.size(), kForwardAuthPath.size()));
  const std::string_view domain = rest.substr(0, rest.find('/'));
  rest.remove_prefix(domain.size());
  if (domain.empty() || domain.size() > rpc::kMaxText ||
      domain.find('%') != std::string_view::npos) {
    error_ = "expected /v1/auth/ and a domain, without escapes";
    return std::nullopt;
  }
  const auto own = parse_cidr(from);
  const bool trusted = own && holds(options_.trusted_proxies, own->network);
  Fields fields;
  bool good = true;
  each_field(head, [&](std::string_view name, std::string_view value) {
    fields.take(name, value);
    if (same_name("x-forwarded-for", name)) hops_.push_back(value);
    for (const auto& [field, entry] : options_.headers) {
      const bool there = std::any_of(entries_.begin(), entries_.end(),
                                     [&](const Entry& one) { return one.key == entry; });
      if (!there && same_name(field, name)) good = good && add(entry, value);
    }
  });
  const auto first = [](std::initializer_list<std::string_view> some) {
    for (std::string_view one : some) {
      if (!one.empty()) return one;
    }
    return std::string_view{};
  };
  if (!trusted) {
    good = good && add("method", method) && add("path", rest.empty() ? "/" : rest) &&
           add("host", fields.host) && add("ip", from);
  } else {
    good = good && add("method", first({fields.method, fields.original_method, method})) &&
           add("path", first({path_of(fields.uri), path_of(fields.original_uri), rest, "/"})) &&
           add("host", first({fields.forwarded_host, fields.host})) &&
           add("ip", client_of(fields, from));
  }
  if (!good) return std::nullopt;
  Request request;
  request.domain = domain;
  request.descriptor = entries_;
  return request;
}

unsigned denial_status_of(std::string_view query) {
  for (std::size_t at = 0; at != std::string_view::npos;) {
    const std::size_t end = query.find('&', at);
    const std::string_view one = query.substr(at, end - at);
    if (one == "deny=403") return 403;
    if (one == "deny=429") return 429;
    if (one == "deny=503") return 503;
    at = end == std::string_view::npos ? end : end + 1;
  }
  return 0;
}

}  // namespace weir::node
