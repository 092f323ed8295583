#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/rpc/net/output.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::rpc {

/// One TLS connection without I/O: bytes of the socket in and out on one side, those of the user on
/// the other. Whatever arrives, no call throws but for want of memory. Not thread-safe.
///
/// What a call appends to `out` is to be sent.
class TlsSession {
 public:
  enum class State : std::uint8_t {
    handshaking,
    open,
    ended,   ///< the other side sends no more; this one still may
    failed,  ///< why() says why; what is in `out` may tell the other side
  };
  using Exporter = std::array<std::uint8_t, 32>;

  /// `who` is the other side, for reports. A client fails unless the server's certificate is for
  /// one of `names` (a URI, a DNS name, a literal address; empty: for whatever the CA vouches for).
  /// A DNS name among them is told to the server. Throws std::bad_alloc.
  static std::unique_ptr<TlsSession> client(std::shared_ptr<TlsContext> context, std::string who,
                                            std::vector<std::string> names);
  static std::unique_ptr<TlsSession> server(std::shared_ptr<TlsContext> context, std::string who);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// A client's first words. A server has none.
  void start(Output& out);
  /// Takes bytes of the socket, all of them. Bounded by the caller: he takes no more while read()
  /// has bytes to give, or has not been asked.
  void receive(std::span<const char> bytes);
  /// Goes on with the handshake, and decrypts into `to`, which may hold what receive() was given:
  /// how many bytes it has filled, 0 if there are none now. `to` may be empty during the handshake.
  std::size_t read(std::span<char> to, Output& out);
  /// Encrypts all of it. Only while can_write().
  void write(std::string_view bytes, Output& out);
  /// Says that this side sends no more. Idempotent.
  void close(Output& out);
  /// The connection ended below: a failure unless the other side had said so. False if it did fail.
  bool end();
  /// Fails for a reason of the caller's, if it has not failed or ended.
  void fail(std::string why);

  State state() const { return state_; }
  bool can_write() const { return secured_ && state_ != State::failed && !closed_; }
  /// The handshake is done; stays so.
  bool secured() const { return secured_; }
  const std::string& why() const { return why_; }
  const std::string& who() const { return who_; }

  // Once it is secured:

  /// Names of the other side's certificate, which was found good; empty if it showed none.
  std::vector<std::string> peer_names() const;
  /// Its certificate is for `name`.
  bool peer_is(const std::string& name) const;
  /// The protocol that was agreed on; empty: none was.
  std::string alpn() const;
  /// Bytes that only the two ends of this very connection know (RFC 5705). Throws
  /// std::runtime_error if it is not secured.
  Exporter exporter(std::string_view label) const;
  /// "TLSv1.3 TLS_AES_256_GCM_SHA384"
  std::string description() const;

 private:
  struct Ssl;
  TlsSession(std::shared_ptr<TlsContext> context, std::string who, std::vector<std::string> names,
             bool is_client);
  bool shake(Output& out);
  void failed_with(int result);

  std::shared_ptr<TlsContext> context_;
  std::string who_;
  std::vector<std::string> names_;
  std::unique_ptr<Ssl> ssl_;
  State state_ = State::handshaking;
  bool secured_ = false;
  bool closed_ = false;
  std::string why_;
};

}  // namespace weir::rpc
