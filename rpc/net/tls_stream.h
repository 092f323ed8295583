#pragma once

#include <memory>

#include <weir/rpc/net/byte_stream.h>
#include <weir/rpc/net/tls_session.h>

namespace weir::rpc {

/// How long a server waits for a TLS handshake, in milliseconds.
inline constexpr std::uint64_t kTlsHandshakeMs = 10'000;

/// A stream that speaks TLS over `below`, which nobody has started; null if that is. The user sees
/// plain bytes; on_end(EPROTO) if the handshake fails or is not done after `handshake_ms`, or if
/// what arrives later is not what the other side sent; on_end(ECONNRESET) if the connection ends
/// without the other side's word that it is the end. What is written before the handshake is done
/// waits.
std::unique_ptr<ByteStream> make_tls_stream(StreamLoop& loop, std::unique_ptr<ByteStream> below,
                                            std::unique_ptr<TlsSession> session,
                                            std::uint64_t handshake_ms = kTlsHandshakeMs);

}  // namespace weir::rpc
