#pragma once

#include <span>
#include <string>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::rpc {

/// A certificate with its private key, both PEM.
struct Certificate {
  std::string cert;
  std::string key;
};

struct CertificateRequest {
  std::string common_name;         ///< at most 64 bytes
  std::vector<std::string> names;  ///< what it is for: URIs (with "://"), addresses, DNS names
  Nanos from = 0;                  ///< wall clock
  Nanos until = 0;
};

/// A CA of its own, with an EC key (P-256). These throw std::runtime_error, with the reason.
Certificate make_ca(const CertificateRequest& request);
/// Signed by `ca`; good for a server and for a client.
Certificate issue(const Certificate& ca, const CertificateRequest& request);
/// The CA's list of revoked certificates (PEM), good until `until`. `former` is the list so far, or
/// empty; `revoked` are certificates of the CA.
std::string revoke(const Certificate& ca, const std::string& former,
                   std::span<const std::string> revoked, Nanos from, Nanos until);

/// What the certificate of a member is for where nothing else is said:
/// "weir://cluster/region/node".
std::string member_uri(const std::string& cluster, const std::string& region,
                       const std::string& node);

}  // namespace weir::rpc
