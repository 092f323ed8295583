#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <weir/crdt/time.h>

struct ssl_ctx_st;

namespace weir::rpc {

/// Whether a server asks its clients for a certificate.
enum class ClientCertificate : std::uint8_t {
  none,      ///< it does not
  optional,  ///< whoever shows one must show a good one
  required,
};

/// What TLS connections are made with. Files are PEM, at most 1 MiB each.
struct TlsOptions {
  std::string cert;  ///< own certificate, then those between it and the CA; empty: none
  std::string key;   ///< its private key, not encrypted
  std::string ca;    ///< who vouches for the other side; empty: the system's CAs
  std::string crl;   ///< what these CAs have revoked, one list a CA; empty: nothing is looked up
  ClientCertificate client_certificate = ClientCertificate::none;  ///< of a server
  std::vector<std::string> alpn = {};  ///< protocols, the best first; empty: none is agreed on
  bool tls12 = false;                  ///< TLS 1.2 too, with forward-secret AEAD ciphers only
  /// Told of handshakes that failed: with whom, and why; printable, bounded, and at most
  /// kTlsReportsAtOnce in a row and one a second. On the thread of the connection. May be empty.
  std::function<void(const std::string& who, const std::string& why)> on_failure = {};
};

inline constexpr unsigned kTlsReportsAtOnce = 10;

/// A certificate file, as metrics and alarms see it.
struct TlsCertificate {
  std::string file;
  std::vector<std::string> names;  ///< of the first one: its subject alternative names
  Nanos expires = 0;               ///< wall clock: the earliest of those in the file
};

struct TlsCounters {
  std::uint64_t handshakes = 0;
  std::uint64_t resumed = 0;  ///< of them, without certificates, by a ticket
  std::uint64_t failed = 0;
};

/// Keys, certificates and CAs, read from files. Connections hold on to what they were made with; a
/// refresh() is for those that come. Thread-safe.
class TlsContext {
 public:
  /// Null, with the file and the reason, if they cannot be used.
  static std::shared_ptr<TlsContext> make(TlsOptions options, std::string& error);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  enum class Refreshed : std::uint8_t { unchanged, taken, refused };
  /// Reads the files again if one of them changed, or was refused before. What is refused, with the
  /// reason, leaves the former in force. Reads files, so not for a loop with much to do.
  Refreshed refresh(std::string& error);

  const TlsOptions& options() const { return options_; }
  /// The files in force: the own certificate and the CAs, where they are named.
  std::vector<TlsCertificate> certificates() const;
  TlsCounters counters() const;

  /// For TlsSession.
  std::shared_ptr<ssl_ctx_st> current() const;
  void succeeded(bool resumed);
  void failed(const std::string& who, const std::string& why);

 private:
  struct Loaded;
  explicit TlsContext(TlsOptions options);
  static std::shared_ptr<const Loaded> load(const TlsOptions& options, std::string& error);

  const TlsOptions options_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Loaded> loaded_;
  bool refused_ = false;
  double reports_ = kTlsReportsAtOnce;  // that may be made
  Nanos reports_at_ = 0;
  std::atomic<std::uint64_t> handshakes_{0}, resumed_{0}, failed_{0};
};

}  // namespace weir::rpc
