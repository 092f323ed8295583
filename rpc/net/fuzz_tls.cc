// Fuzz target (scripts/fuzz): arbitrary bytes as what a client sends to a TLS server that asks for
// certificates, and what a server sends to a client. The first byte says which, and how the rest is
// cut. Seeds are the first words of honest ones.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/rpc/net/tls_session.h>
#include <weir/rpc/net/tls_test_util.h>

namespace {

using namespace weir::rpc;

void expect(bool holds) {
  if (!holds) std::abort();
}

struct Sides {
  Sides() {
    ca.issue("server", {"localhost"});
    server = ca.context("server", ClientCertificate::optional);
    client = ca.context("");
  }
  test::TestCa ca;
  std::shared_ptr<TlsContext> server, client;
};

const Sides& sides() {
  static const Sides sides;
  return sides;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  weir::crdt::test::FuzzSeeds seeds;
  if (!seeds.wanted()) return 0;
  auto client = TlsSession::client(sides().client, "server", {"localhost"});
  auto server = TlsSession::server(sides().server, "client");
  Output hello;
  client->start(hello);
  Output answer;
  server->receive({hello.view().data(), hello.view().size()});
  server->read({}, answer);
  for (const char kind : {'\x0e', '\x0f'}) {
    const Output& words = kind == '\x0e' ? hello : answer;
    const std::string text = kind + std::string(words.view());
    seeds.add(std::as_bytes(std::span(text.data(), text.size())));
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const bool as_server = (data[0] & 1) == 0;
  const std::size_t cut = 1 + (data[0] >> 1) * std::size_t{17};
  std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  auto session = as_server ? TlsSession::server(sides().server, "client")
                           : TlsSession::client(sides().client, "server", {"localhost"});
  Output out;
  if (!as_server) session->start(out);
  char plain[4096];
  while (!bytes.empty()) {
    const auto piece = bytes.substr(0, std::min(cut, bytes.size()));
    bytes.remove_prefix(piece.size());
    session->receive({piece.data(), piece.size()});
    while (session->read(plain, out) > 0) {
    }
  }
  // Who does not have the other side's secrets, and shows nothing that the CA vouches for, is not
  // heard; why is said.
  expect(!session->secured());
  session->end();
  expect(session->state() == TlsSession::State::failed && !session->why().empty());
  return 0;
}
