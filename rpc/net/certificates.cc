#include <weir/rpc/net/certificates.h>

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <stdexcept>

#include <weir/rpc/net/address.h>
#include <weir/rpc/net/tls_openssl.h>

namespace weir::rpc {
namespace {

void require(bool good, const char* what) {
  if (!good) throw std::runtime_error(std::string(what) + ": " + openssl_error());
}

std::string text_of(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(size)};
}

template <typename Read, typename... Rest>
auto from_pem(Read read, const std::string& pem, Rest... rest) {
  BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  return read(bio.get(), nullptr, no_password, nullptr, rest...);
}

std::string pem_of(X509* certificate) {
  BioPtr bio(BIO_new(BIO_s_mem()));
  require(PEM_write_bio_X509(bio.get(), certificate) == 1, "a certificate cannot be written");
  return text_of(bio.get());
}

std::string pem_of(EVP_PKEY* key) {
  BioPtr bio(BIO_new(BIO_s_mem()));
  require(PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1,
          "a key cannot be written");
  return text_of(bio.get());
}

void set_time(ASN1_TIME* to, Nanos at) {
  require(ASN1_TIME_set(to, static_cast<std::time_t>(at / kSecond)) != nullptr,
          "a time is not valid");
}

void add_extension(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  std::unique_ptr<X509_EXTENSION, OpensslFree<X509_EXTENSION_free>> extension(
      X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str()));
  require(extension != nullptr && X509_add_ext(certificate, extension.get(), -1) == 1,
          "an extension cannot be made");
}

// Built by hand: in OpenSSL's text form a name could bring further ones with it.
void add_names(X509* certificate, const std::vector<std::string>& names) {
  std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES_free>> list(sk_GENERAL_NAME_new_null());
  require(list != nullptr, "out of memory");
  for (const std::string& name : names) {
    GENERAL_NAME* one = GENERAL_NAME_new();
    require(one != nullptr && sk_GENERAL_NAME_push(list.get(), one) > 0, "out of memory");
    std::string error;
    auto address = parse_address(name + ":1", error);
    if (!address) address = parse_address("[" + name + "]:1", error);
    if (address) {
      ASN1_OCTET_STRING* bytes = ASN1_OCTET_STRING_new();
      require(bytes != nullptr &&
                  ASN1_OCTET_STRING_set(bytes, address->ip.data(), address->v6 ? 16 : 4) == 1,
              "out of memory");
      GENERAL_NAME_set0_value(one, GEN_IPADD, bytes);
      continue;
    }
    ASN1_IA5STRING* text = ASN1_IA5STRING_new();
    require(
        text != nullptr && ASN1_STRING_set(text, name.data(), static_cast<int>(name.size())) == 1,
        "out of memory");
    GENERAL_NAME_set0_value(one, name.find("://") != std::string::npos ? GEN_URI : GEN_DNS, text);
  }
  require(
      X509_add1_ext_i2d(certificate, NID_subject_alt_name, list.get(), 0, X509V3_ADD_APPEND) == 1,
      "names cannot be added");
}

Certificate make(const CertificateRequest& request, const Certificate* ca) {
  ERR_clear_error();
  if (request.common_name.size() > 64) throw std::runtime_error("a name is longer than 64 bytes");
  PkeyPtr key(EVP_EC_gen("P-256"));
  require(key != nullptr, "a key cannot be made");
  X509Ptr made(X509_new());
  X509* certificate = made.get();
  require(certificate != nullptr && X509_set_version(certificate, 2) == 1, "out of memory");
  unsigned char serial[16];
  require(RAND_bytes(serial, sizeof serial) == 1, "there is no randomness");
  serial[0] &= 0x7f;
  std::unique_ptr<BIGNUM, OpensslFree<BN_free>> number(BN_bin2bn(serial, sizeof serial, nullptr));
  require(number != nullptr &&
              BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate)) != nullptr,
          "out of memory");
  set_time(X509_getm_notBefore(certificate), request.from);
  set_time(X509_getm_notAfter(certificate), request.until);
  X509_set_pubkey(certificate, key.get());
  require(
      X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(request.common_name.data()),
                                 static_cast<int>(request.common_name.size()), -1, 0) == 1,
      "a name is not valid");

  X509Ptr issuer;
  PkeyPtr signer;
  if (ca != nullptr) {
    issuer.reset(from_pem(PEM_read_bio_X509, ca->cert));
    signer.reset(from_pem(PEM_read_bio_PrivateKey, ca->key));
    require(issuer != nullptr && signer != nullptr, "the CA cannot be read");
  }
  X509* by = ca == nullptr ? certificate : issuer.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(by));
  add_extension(certificate, by, NID_subject_key_identifier, "hash");
  add_extension(certificate, by, NID_authority_key_identifier, "keyid");
  if (ca == nullptr) {
    add_extension(certificate, by, NID_basic_constraints, "critical,CA:TRUE,pathlen:0");
    add_extension(certificate, by, NID_key_usage, "critical,keyCertSign,cRLSign");
  } else {
    add_extension(certificate, by, NID_basic_constraints, "critical,CA:FALSE");
    add_extension(certificate, by, NID_key_usage, "critical,digitalSignature");
    add_extension(certificate, by, NID_ext_key_usage, "serverAuth,clientAuth");
  }
  if (!request.names.empty()) add_names(certificate, request.names);
  require(X509_sign(certificate, ca == nullptr ? key.get() : signer.get(), EVP_sha256()) > 0,
          "a certificate cannot be signed");
  return {pem_of(certificate), pem_of(key.get())};
}

}  // namespace

Certificate make_ca(const CertificateRequest& request) {
  return make(request, nullptr);
}

Certificate issue(const Certificate& ca, const CertificateRequest& request) {
  return make(request, &ca);
}

std::string revoke(const Certificate& ca, const std::string& former,
                   std::span<const std::string> revoked, Nanos from, Nanos until) {
  ERR_clear_error();
  X509Ptr issuer(from_pem(PEM_read_bio_X509, ca.cert));
  PkeyPtr signer(from_pem(PEM_read_bio_PrivateKey, ca.key));
  require(issuer != nullptr && signer != nullptr, "the CA cannot be read");
  CrlPtr list(former.empty() ? X509_CRL_new() : from_pem(PEM_read_bio_X509_CRL, former));
  require(list != nullptr, "the list of revoked certificates cannot be read");
  X509_CRL_set_version(list.get(), 1);
  X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(issuer.get()));
  std::unique_ptr<ASN1_TIME, OpensslFree<ASN1_TIME_free>> time(ASN1_TIME_new());
  set_time(time.get(), until);
  X509_CRL_set1_nextUpdate(list.get(), time.get());
  set_time(time.get(), from);
  X509_CRL_set1_lastUpdate(list.get(), time.get());
  for (const std::string& pem : revoked) {
    X509Ptr certificate(from_pem(PEM_read_bio_X509, pem));
    require(certificate != nullptr, "a certificate cannot be read");
    if (X509_NAME_cmp(X509_get_issuer_name(certificate.get()),
                      X509_get_subject_name(issuer.get())) != 0) {
      throw std::runtime_error("a certificate is of another CA");
    }
    X509_REVOKED* entry = X509_REVOKED_new();
    require(entry != nullptr, "out of memory");
    X509_REVOKED_set_serialNumber(entry, X509_get_serialNumber(certificate.get()));
    X509_REVOKED_set_revocationDate(entry, time.get());
    require(X509_CRL_add0_revoked(list.get(), entry) == 1, "out of memory");
  }
  X509_CRL_sort(list.get());
  require(X509_CRL_sign(list.get(), signer.get(), EVP_sha256()) > 0, "the list cannot be signed");
  BioPtr bio(BIO_new(BIO_s_mem()));
  require(PEM_write_bio_X509_CRL(bio.get(), list.get()) == 1, "the list cannot be written");
  return text_of(bio.get());
}

std::string member_uri(const std::string& cluster, const std::string& region,
                       const std::string& node) {
  return "weir://" + cluster + "/" + region + "/" + node;
}

}  // namespace weir::rpc
