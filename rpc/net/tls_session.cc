#include <weir/rpc/net/tls_session.h>

#include <openssl/sslerr.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <utility>

#include <weir/rpc/net/address.h>
#include <weir/rpc/net/tls_openssl.h>

namespace weir::rpc {
namespace {

constexpr std::size_t kMaxNames = 64;
/// Input that was taken: its memory is kept up to so many bytes.
constexpr std::size_t kKeepInput = 16u << 10;
/// A handshake is no longer; what a stranger sends beyond is not read.
constexpr std::size_t kMaxHandshake = 128u << 10;
/// The alert that OpenSSL 3.0 has no words for.
constexpr int kCertificateRequired = 116;

std::string printable(std::string text) {
  if (text.size() > 256) text.resize(256);
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

std::string one_line(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) {
    if (out.size() > 256) return out + ", …";
    out.append(out.empty() ? "" : ", ").append(printable(name));
  }
  return out.empty() ? "nobody" : out;
}

bool literal_address(const std::string& name) {
  std::string error;
  return parse_address(name + ":1", error) || parse_address("[" + name + "]:1", error);
}

/// What is wrong with the other side's certificate.
std::string certificate_flaw(int code, X509* certificate) {
  const std::string whose =
      certificate == nullptr ? std::string() : " of " + one_line(alternative_names(certificate));
  switch (code) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return "its certificate" + whose + " has expired";
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "its certificate" + whose + " is not valid yet";
    case X509_V_ERR_CERT_REVOKED:
      return "its certificate" + whose + " is revoked";
    case X509_V_ERR_CRL_HAS_EXPIRED:
      return "the list of revoked certificates has expired";
    case X509_V_ERR_UNABLE_TO_GET_CRL:
      return "there is no list of revoked certificates of the CA of its certificate" + whose;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return "its certificate" + whose + " is of a CA that is unknown here";
    default:
      return "its certificate" + whose + " is refused: " + X509_verify_cert_error_string(code);
  }
}

}  // namespace

std::string openssl_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* text = code == 0 ? nullptr : ERR_reason_error_string(code);
  return text == nullptr ? "unknown error" : text;
}

std::vector<std::string> alternative_names(X509* certificate) {
  std::vector<std::string> out;
  auto* names = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  if (names == nullptr) return out;
  for (int i = 0; i < sk_GENERAL_NAME_num(names) && out.size() < kMaxNames; ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names, i);
    if (name->type == GEN_URI || name->type == GEN_DNS) {
      const ASN1_IA5STRING* text =
          name->type == GEN_URI ? name->d.uniformResourceIdentifier : name->d.dNSName;
      out.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                       static_cast<std::size_t>(ASN1_STRING_length(text)));
    } else if (name->type == GEN_IPADD) {
      const int size = ASN1_STRING_length(name->d.iPAddress);
      Address address;
      address.v6 = size == 16;
      if (size != 4 && size != 16) continue;
      std::copy_n(ASN1_STRING_get0_data(name->d.iPAddress), size, address.ip.begin());
      out.push_back(host_of(address));
    }
  }
  GENERAL_NAMES_free(names);
  return out;
}

bool is_for(X509* certificate, const std::string& name) {
  if (name.find("://") != std::string::npos) {
    const std::vector<std::string> names = alternative_names(certificate);
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  if (literal_address(name)) return X509_check_ip_asc(certificate, name.c_str(), 0) == 1;
  return X509_check_host(certificate, name.data(), name.size(),
                         X509_CHECK_FLAG_NO_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT,
                         nullptr) == 1;
}

/// OpenSSL's side: it reads from `in`, and writes to what a call of the session was given.
struct TlsSession::Ssl {
  Ssl(TlsSession& owner, bool is_client);

  static int read_bio(BIO* bio, char* to, int size);
  static int write_bio(BIO* bio, const char* from, int size);
  static long control_bio(BIO*, int command, long, void*) {
    return command == BIO_CTRL_FLUSH ? 1 : 0;
  }
  static BIO_METHOD* method();
  static int verify(int good, X509_STORE_CTX* chain);
  static int index() {
    static const int at = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
    return at;
  }

  std::shared_ptr<ssl_ctx_st> context;
  SslPtr ssl;
  Output in;
  std::size_t in_at = 0;
  std::size_t handshake_bytes = 0;
  Output* out = nullptr;
  std::string flaw;  // of the other side's certificate
};

int TlsSession::Ssl::read_bio(BIO* bio, char* to, int size) {
  auto& self = *static_cast<Ssl*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  const std::size_t have = self.in.size() - self.in_at;
  if (have == 0) {
    BIO_set_retry_read(bio);
    return -1;
  }
  const std::size_t count = std::min(have, static_cast<std::size_t>(std::max(size, 0)));
  std::copy_n(self.in.data() + self.in_at, count, to);
  self.in_at += count;
  if (self.in_at == self.in.size()) {
    self.in_at = 0;
    self.in.clear();
    if (self.in.capacity() > kKeepInput) self.in = {};
  }
  return static_cast<int>(count);
}

// Called from C: nothing may be thrown through it.
int TlsSession::Ssl::write_bio(BIO* bio, const char* from, int size) {
  auto& self = *static_cast<Ssl*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (size <= 0 || self.out == nullptr) return -1;
  try {
    self.out->append({from, static_cast<std::size_t>(size)});
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return size;
}

BIO_METHOD* TlsSession::Ssl::method() {
  static BIO_METHOD* const made = [] {
    BIO_METHOD* bio = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "weir");
    if (bio == nullptr) throw std::bad_alloc();
    BIO_meth_set_read(bio, read_bio);
    BIO_meth_set_write(bio, write_bio);
    BIO_meth_set_ctrl(bio, control_bio);
    return bio;
  }();
  return made;
}

TlsSession::Ssl::Ssl(TlsSession& owner, bool is_client) : context(owner.context_->current()) {
  ssl.reset(SSL_new(context.get()));
  BIO* bio = BIO_new(method());
  if (ssl == nullptr || bio == nullptr) {
    BIO_free(bio);
    throw std::bad_alloc();
  }
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl.get(), bio, bio);
  SSL_set_ex_data(ssl.get(), index(), &owner);
  int mode = SSL_VERIFY_PEER;
  if (is_client) {
    SSL_set_connect_state(ssl.get());
    for (const std::string& name : owner.names_) {
      if (name.find("://") != std::string::npos || literal_address(name)) continue;
      SSL_set_tlsext_host_name(ssl.get(), name.c_str());
      break;
    }
  } else {
    SSL_set_accept_state(ssl.get());
    switch (owner.context_->options().client_certificate) {
      case ClientCertificate::none:
        mode = SSL_VERIFY_NONE;
        break;
      case ClientCertificate::optional:
        break;
      case ClientCertificate::required:
        mode |= SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
        break;
    }
  }
  SSL_set_verify(ssl.get(), mode, verify);
}

int TlsSession::Ssl::verify(int good, X509_STORE_CTX* chain) {
  auto* ssl =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(chain, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto& session = *static_cast<TlsSession*>(SSL_get_ex_data(ssl, index()));
  X509* certificate = X509_STORE_CTX_get_current_cert(chain);
  try {
    if (good != 1) {
      X509* own = X509_STORE_CTX_get0_cert(chain);
      session.ssl_->flaw = certificate_flaw(X509_STORE_CTX_get_error(chain), own);
      return 0;
    }
    if (X509_STORE_CTX_get_error_depth(chain) != 0 || session.names_.empty()) return 1;
    for (const std::string& name : session.names_) {
      if (is_for(certificate, name)) return 1;
    }
    session.ssl_->flaw = "its certificate is of " + one_line(alternative_names(certificate)) +
                         ", expected " + one_line(session.names_);
  } catch (const std::bad_alloc&) {
  }
  X509_STORE_CTX_set_error(chain, X509_V_ERR_HOSTNAME_MISMATCH);
  return 0;
}

std::unique_ptr<TlsSession> TlsSession::client(std::shared_ptr<TlsContext> context, std::string who,
                                               std::vector<std::string> names) {
  return std::unique_ptr<TlsSession>(
      new TlsSession(std::move(context), std::move(who), std::move(names), true));
}

std::unique_ptr<TlsSession> TlsSession::server(std::shared_ptr<TlsContext> context,
                                               std::string who) {
  return std::unique_ptr<TlsSession>(new TlsSession(std::move(context), std::move(who), {}, false));
}

TlsSession::TlsSession(std::shared_ptr<TlsContext> context, std::string who,
                       std::vector<std::string> names, bool is_client)
    : context_(std::move(context)),
      who_(std::move(who)),
      names_(std::move(names)),
      ssl_(std::make_unique<Ssl>(*this, is_client)) {}

TlsSession::~TlsSession() = default;

void TlsSession::start(Output& out) {
  if (SSL_is_server(ssl_->ssl.get()) == 0) shake(out);
}

void TlsSession::receive(std::span<const char> bytes) {
  if (state_ == State::failed || state_ == State::ended) return;
  if (!secured_) {
    ssl_->handshake_bytes += bytes.size();
    if (ssl_->handshake_bytes > kMaxHandshake) return fail("its handshake is too long");
  }
  ssl_->in.append({bytes.data(), bytes.size()});
}

/// True once the handshake is done.
bool TlsSession::shake(Output& out) {
  if (secured_) return true;
  if (state_ != State::handshaking) return false;
  ERR_clear_error();
  ssl_->out = &out;
  const int result = SSL_do_handshake(ssl_->ssl.get());
  if (result != 1) {
    failed_with(result);
    ssl_->out = nullptr;
    return false;
  }
  ssl_->out = nullptr;
  secured_ = true;
  state_ = State::open;
  context_->succeeded(SSL_session_reused(ssl_->ssl.get()) == 1);
  return true;
}

std::size_t TlsSession::read(std::span<char> to, Output& out) {
  if (!shake(out) || state_ != State::open || to.empty()) return 0;
  ERR_clear_error();
  ssl_->out = &out;  // a key update is answered
  std::size_t filled = 0;
  while (filled < to.size() && state_ == State::open) {
    std::size_t count = 0;
    const int result = SSL_read_ex(ssl_->ssl.get(), to.data() + filled, to.size() - filled, &count);
    if (result != 1) {
      failed_with(result);
      break;
    }
    filled += count;
  }
  ssl_->out = nullptr;
  return filled;
}

void TlsSession::write(std::string_view bytes, Output& out) {
  ERR_clear_error();
  ssl_->out = &out;
  while (!bytes.empty() && can_write()) {
    std::size_t count = 0;
    const int result = SSL_write_ex(ssl_->ssl.get(), bytes.data(), bytes.size(), &count);
    if (result != 1) {
      failed_with(result);
      break;
    }
    bytes.remove_prefix(count);
  }
  ssl_->out = nullptr;
}

void TlsSession::close(Output& out) {
  if (!can_write()) return;
  closed_ = true;
  ERR_clear_error();
  ssl_->out = &out;
  SSL_shutdown(ssl_->ssl.get());
  ssl_->out = nullptr;
  ERR_clear_error();
}

bool TlsSession::end() {
  if (state_ == State::ended) return true;
  fail(secured_ ? "the connection ended without a word" : "the connection ended in the handshake");
  return false;
}

void TlsSession::fail(std::string why) {
  if (state_ == State::failed || state_ == State::ended) return;
  state_ = State::failed;
  why_ = "TLS: " + printable(std::move(why));
  ssl_->in = {};
  ssl_->in_at = 0;
  if (!secured_) context_->failed(who_, why_);
}

/// A call of OpenSSL's did not do all of it: it waits for input, or this is the end.
void TlsSession::failed_with(int result) {
  switch (SSL_get_error(ssl_->ssl.get(), result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return;
    case SSL_ERROR_ZERO_RETURN:
      state_ = State::ended;
      return;
    default:
      break;
  }
  const unsigned long code = ERR_peek_error();
  const int reason = ERR_GET_REASON(code);
  std::string why;
  if (!ssl_->flaw.empty()) {
    why = ssl_->flaw;
  } else if (ERR_GET_LIB(code) == ERR_LIB_SSL && reason > SSL_AD_REASON_OFFSET &&
             reason < SSL_AD_REASON_OFFSET + 256) {
    const int alert = reason - SSL_AD_REASON_OFFSET;
    why = std::string("the other side refused: ") + (alert == kCertificateRequired
                                                         ? "certificate required"
                                                         : SSL_alert_desc_string_long(alert));
  } else if (reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST ||
             reason == SSL_R_HTTPS_PROXY_REQUEST || reason == SSL_R_UNKNOWN_PROTOCOL) {
    why = "it speaks no TLS";
  } else if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
    why = "it showed no certificate";
  } else {
    why = openssl_error();
  }
  ERR_clear_error();
  const bool in_use = secured_;
  fail(std::move(why));
  // A client is told after its handshake that its certificate is refused (TLS 1.3).
  if (in_use) context_->failed(who_, why_);
}

std::vector<std::string> TlsSession::peer_names() const {
  X509* certificate = SSL_get0_peer_certificate(ssl_->ssl.get());
  return certificate == nullptr ? std::vector<std::string>() : alternative_names(certificate);
}

bool TlsSession::peer_is(const std::string& name) const {
  X509* certificate = SSL_get0_peer_certificate(ssl_->ssl.get());
  return secured_ && certificate != nullptr && is_for(certificate, name);
}

std::string TlsSession::alpn() const {
  const unsigned char* name = nullptr;
  unsigned size = 0;
  SSL_get0_alpn_selected(ssl_->ssl.get(), &name, &size);
  return {reinterpret_cast<const char*>(name), size};
}

TlsSession::Exporter TlsSession::exporter(std::string_view label) const {
  Exporter out{};
  if (!secured_ || SSL_export_keying_material(ssl_->ssl.get(), out.data(), out.size(), label.data(),
                                              label.size(), nullptr, 0, 0) != 1) {
    throw std::runtime_error("TLS: no key can be exported: " + openssl_error());
  }
  return out;
}

std::string TlsSession::description() const {
  return std::string(SSL_get_version(ssl_->ssl.get())) + " " + SSL_get_cipher_name(ssl_->ssl.get());
}

}  // namespace weir::rpc
