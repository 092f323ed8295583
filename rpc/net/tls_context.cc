#include <weir/rpc/net/tls_context.h>

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include <weir/limits/yaml/read_file.h>
#include <weir/rpc/net/tls_openssl.h>

namespace weir::rpc {
namespace {

constexpr std::size_t kMaxFile = 1u << 20;
/// Bytes of certificates that the other side may send.
constexpr long kMaxChain = 32 << 10;
/// How long a ticket is good: in that time a certificate that expires may come back by it.
constexpr long kTicketSeconds = 600;

using Looks = std::array<internal::FileLook, 4>;

Looks look_at(const TlsOptions& options) {
  return {internal::look_at_file(options.cert), internal::look_at_file(options.key),
          internal::look_at_file(options.ca), internal::look_at_file(options.crl)};
}

Nanos monotonic() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool read(const std::string& path, std::string& bytes, std::string& error) {
  const int failure = internal::read_file(path, kMaxFile, bytes);
  if (failure != 0)
    error = path + ": " + (failure == EFBIG ? "larger than 1MiB" : std::strerror(failure));
  return failure == 0;
}

/// All certificates of a file, at least one.
bool read_certificates(const std::string& path, std::vector<X509Ptr>& out, std::string& error) {
  std::string bytes;
  if (!read(path, bytes, error)) return false;
  BioPtr bio(BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr))
    out.emplace_back(one);
  const unsigned long last = ERR_peek_last_error();
  ERR_clear_error();
  if (ERR_GET_REASON(last) == PEM_R_NO_START_LINE && !out.empty()) return true;
  error = path + ": expected PEM certificates" +
          (out.empty() ? std::string()
                       : ", but the one after " + std::to_string(out.size()) + " is none");
  return false;
}

Nanos earliest_end(const std::vector<X509Ptr>& certificates) {
  Nanos first = kMaxTime;
  for (const X509Ptr& one : certificates) {
    std::tm at{};
    if (ASN1_TIME_to_tm(X509_get0_notAfter(one.get()), &at) != 1) continue;
    const std::time_t end = ::timegm(&at);
    first =
        std::min(first, end >= kMaxTime / kSecond ? kMaxTime : static_cast<Nanos>(end) * kSecond);
  }
  return first;
}

/// The wire form of ALPN: each name with its length in front.
std::string alpn_wire(const std::vector<std::string>& names) {
  std::string wire;
  for (const std::string& name : names) {
    wire.push_back(static_cast<char>(name.size()));
    wire += name;
  }
  return wire;
}

/// Of the server's list the first that the client offers. A client that offers others only is
/// refused: it would speak another protocol.
int select_alpn(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
                unsigned in_size, void* wire) {
  const auto& own = *static_cast<const std::string*>(wire);
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_size, reinterpret_cast<const unsigned char*>(own.data()),
                            static_cast<unsigned>(own.size()), in,
                            in_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

void set_up(SSL_CTX* context, const TlsOptions& options) {
  SSL_CTX_set_min_proto_version(context, options.tls12 ? TLS1_2_VERSION : TLS1_3_VERSION);
  SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20");
  SSL_CTX_set_options(
      context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_max_cert_list(context, kMaxChain);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_timeout(context, kTicketSeconds);
  if (options.client_certificate == ClientCertificate::none) return;
  // Whoever is who a certificate says shows it each time: a ticket would outlive a revocation.
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
}

/// The own certificate and its key, if they are named.
bool load_identity(SSL_CTX* context, const TlsOptions& options, std::vector<TlsCertificate>& told,
                   std::string& error) {
  if (options.cert.empty()) return true;
  std::vector<X509Ptr> chain;
  std::string bytes;
  if (!read_certificates(options.cert, chain, error) || !read(options.key, bytes, error)) {
    return false;
  }
  BioPtr bio(BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
  PkeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  OPENSSL_cleanse(bytes.data(), bytes.size());
  if (key == nullptr) {
    error = options.key + ": expected a PEM private key that is not encrypted";
    return false;
  }
  if (X509_check_private_key(chain[0].get(), key.get()) != 1) {
    error = options.key + ": is not the key of the certificate in " + options.cert;
    return false;
  }
  if (SSL_CTX_use_certificate(context, chain[0].get()) != 1 ||
      SSL_CTX_use_PrivateKey(context, key.get()) != 1) {
    error = options.cert + ": cannot be used: " + openssl_error();
    return false;
  }
  for (std::size_t i = 1; i < chain.size(); ++i) SSL_CTX_add1_chain_cert(context, chain[i].get());
  told.push_back({options.cert, alternative_names(chain[0].get()), earliest_end(chain)});
  return true;
}

bool load_authorities(SSL_CTX* context, const TlsOptions& options,
                      std::vector<TlsCertificate>& told, std::string& error) {
  if (options.ca.empty()) {
    SSL_CTX_set_default_verify_paths(context);
    return true;
  }
  std::vector<X509Ptr> authorities;
  if (!read_certificates(options.ca, authorities, error)) return false;
  for (const X509Ptr& one : authorities) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one.get());
    SSL_CTX_add_client_CA(context, one.get());
  }
  told.push_back({options.ca, alternative_names(authorities[0].get()), earliest_end(authorities)});
  return true;
}

bool load_revoked(SSL_CTX* context, const TlsOptions& options, std::string& error) {
  if (options.crl.empty()) return true;
  std::string bytes;
  if (!read(options.crl, bytes, error)) return false;
  X509_STORE* store = SSL_CTX_get_cert_store(context);
  BioPtr bio(BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
  int lists = 0;
  for (;; ++lists) {
    CrlPtr list(PEM_read_bio_X509_CRL(bio.get(), nullptr, no_password, nullptr));
    if (list == nullptr) break;
    X509_STORE_add_crl(store, list.get());
  }
  if (lists == 0 || ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) {
    error = options.crl + ": expected PEM certificate revocation lists";
    return false;
  }
  X509_STORE_set_flags(store, X509_V_FLAG_CRL_CHECK);
  return true;
}

}  // namespace

struct TlsContext::Loaded {
  std::string alpn;  // outlives `context`, which points to it
  std::shared_ptr<ssl_ctx_st> context;
  Looks looks{};
  std::vector<TlsCertificate> certificates;
};

std::shared_ptr<const TlsContext::Loaded> TlsContext::load(const TlsOptions& options,
                                                           std::string& error) {
  ERR_clear_error();
  auto loaded = std::make_shared<Loaded>();
  // Before they are read: a change in between shows at the next look.
  loaded->looks = look_at(options);
  SslCtxPtr made(SSL_CTX_new(TLS_method()));
  SSL_CTX* context = made.get();
  if (context == nullptr) {
    error = "OpenSSL cannot start: " + openssl_error();
    return nullptr;
  }
  set_up(context, options);
  loaded->alpn = alpn_wire(options.alpn);
  if (!loaded->alpn.empty()) {
    SSL_CTX_set_alpn_protos(context, reinterpret_cast<const unsigned char*>(loaded->alpn.data()),
                            static_cast<unsigned>(loaded->alpn.size()));
    SSL_CTX_set_alpn_select_cb(context, select_alpn, &loaded->alpn);
  }
  const bool good = load_identity(context, options, loaded->certificates, error) &&
                    load_authorities(context, options, loaded->certificates, error) &&
                    load_revoked(context, options, error);
  ERR_clear_error();
  if (!good) return nullptr;
  loaded->context = std::shared_ptr<ssl_ctx_st>(made.release(), SSL_CTX_free);
  return loaded;
}

TlsContext::TlsContext(TlsOptions options) : options_(std::move(options)) {}

TlsContext::~TlsContext() = default;

std::shared_ptr<TlsContext> TlsContext::make(TlsOptions options, std::string& error) {
  std::shared_ptr<const Loaded> loaded = load(options, error);
  if (loaded == nullptr) return nullptr;
  std::shared_ptr<TlsContext> made(new TlsContext(std::move(options)));
  made->loaded_ = std::move(loaded);
  return made;
}

TlsContext::Refreshed TlsContext::refresh(std::string& error) {
  const Looks looks = look_at(options_);
  {
    std::lock_guard lock(mutex_);
    if (!refused_ && looks == loaded_->looks) return Refreshed::unchanged;
  }
  std::shared_ptr<const Loaded> loaded = load(options_, error);
  std::lock_guard lock(mutex_);
  refused_ = loaded == nullptr;
  if (refused_) return Refreshed::refused;
  loaded_ = std::move(loaded);
  return Refreshed::taken;
}

std::vector<TlsCertificate> TlsContext::certificates() const {
  std::lock_guard lock(mutex_);
  return loaded_->certificates;
}

TlsCounters TlsContext::counters() const {
  return {handshakes_, resumed_, failed_};
}

std::shared_ptr<ssl_ctx_st> TlsContext::current() const {
  std::lock_guard lock(mutex_);
  // Keeps all of it: the context points into it.
  return {loaded_, loaded_->context.get()};
}

void TlsContext::succeeded(bool resumed) {
  ++handshakes_;
  if (resumed) ++resumed_;
}

void TlsContext::failed(const std::string& who, const std::string& why) {
  ++failed_;
  if (!options_.on_failure) return;
  {
    std::lock_guard lock(mutex_);
    const Nanos now = monotonic();
    const double more = reports_at_ == 0 ? 0 : static_cast<double>(now - reports_at_) / kSecond;
    reports_ = std::min<double>(kTlsReportsAtOnce, reports_ + more);
    reports_at_ = now;
    if (reports_ < 1) return;
    reports_ -= 1;
  }
  options_.on_failure(who, why);
}

}  // namespace weir::rpc
