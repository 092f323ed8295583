#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/request.h>
#include <weir/node/access/network.h>

namespace weir::node {

/// What a gateway asks by forwarding the head of a request (nginx auth_request, Caddy forward_auth,
/// Traefik ForwardAuth, APISIX forward-auth, Envoy ext_authz over HTTP): any method on
/// /v1/auth/{domain}, or on a path behind that. docs/gateways.md says what each sends.
inline constexpr std::string_view kForwardAuthPath = "/v1/auth/";

struct ForwardAuthOptions {
  /// Who may say for whom it asks: connections from elsewhere ask for themselves, and the
  /// forwarding fields that they send count for nothing.
  std::vector<MatchCidr> trusted_proxies = loopback();
  /// Header fields, in lower case, and the entries that they become. Whoever sends them.
  std::vector<std::pair<std::string, std::string>> headers;
};

/// Reads such a request. It keeps its memory; not thread-safe.
class ForwardAuthReader {
 public:
  explicit ForwardAuthReader(ForwardAuthOptions options) : options_(std::move(options)) {}

  /// `head` is all of the request's head from its first line on, each line with CR LF; `path` and
  /// `query` are those of its target. `from` is the address of the connection, without a port.
  /// Returns the request with hits 1; none, with why in error(), if it is not a fit one. Views go
  /// into what was given, and into the reader; they are valid until it reads again.
  ///
  /// Entries: method, path (without the query), host, ip, and those of `headers`. From a trusted
  /// proxy the forwarding fields count: X-Forwarded-Method or X-Original-Method, X-Forwarded-Uri or
  /// X-Original-URI, X-Forwarded-Host, and as ip the last hop of X-Forwarded-For that is not
  /// trusted, or X-Real-IP. Without them, and from others: the request's own method, what follows
  /// the domain in its path, Host, and `from`.
  std::optional<Request> read(std::string_view head, std::string_view method, std::string_view path,
                              std::string_view from);
  const std::string& error() const { return error_; }

 private:
  struct Fields;
  std::string_view client_of(const Fields& fields, std::string_view from);
  bool add(std::string_view key, std::string_view value);

  const ForwardAuthOptions options_;
  std::vector<Entry> entries_;
  std::vector<std::string_view> hops_;  // values of X-Forwarded-For
  std::string error_;
};

/// What a query says of a denial's status, "deny=403", for gateways that know no 429; 0: nothing.
unsigned denial_status_of(std::string_view query);

}  // namespace weir::node
