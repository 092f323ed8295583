#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

namespace weir::rpc {

// OpenSSL's objects with owners. Not installed.

template <auto Free>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};

using BioPtr = std::unique_ptr<BIO, OpensslFree<BIO_free_all>>;
using CrlPtr = std::unique_ptr<X509_CRL, OpensslFree<X509_CRL_free>>;
using PkeyPtr = std::unique_ptr<EVP_PKEY, OpensslFree<EVP_PKEY_free>>;
using SslCtxPtr = std::unique_ptr<SSL_CTX, OpensslFree<SSL_CTX_free>>;
using SslPtr = std::unique_ptr<SSL, OpensslFree<SSL_free>>;
using X509Ptr = std::unique_ptr<X509, OpensslFree<X509_free>>;

/// A PEM that is encrypted is a mistake: nobody is there to be asked.
inline int no_password(char*, int, int, void*) {
  return -1;
}

/// The last thing that OpenSSL complained of on this thread; forgets all of them.
std::string openssl_error();

/// URIs, DNS names and addresses of a certificate, in its order, at most 64, as text that may be
/// anything.
std::vector<std::string> alternative_names(X509* certificate);

/// Whether a certificate is for `name`: a URI (it has "://") by every byte, a literal address, or a
/// DNS name. A wildcard is nobody's name: who has it could be any member.
bool is_for(X509* certificate, const std::string& name);

}  // namespace weir::rpc
