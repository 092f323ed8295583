#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <weir/bench/wire/load.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::bench {

/// A CA and certificates for a node and a client of it, in DIRECTORY/certs: ca.pem, node.pem and
/// client.pem, each with its .key.
void make_certificates(const std::string& directory);
/// What the client makes its connections with. Throws std::runtime_error, with the reason.
std::shared_ptr<rpc::TlsContext> client_context(const std::string& directory);

/// Connects, shakes hands, waits until the server has answered, and closes, one after the other: a
/// request is one full handshake with both certificates. Throws std::runtime_error if one fails.
Load handshake_load(std::uint16_t port, const std::shared_ptr<rpc::TlsContext>& context,
                    double seconds);

}  // namespace weir::bench
