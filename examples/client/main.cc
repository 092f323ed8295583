// A service that asks a region's nodes before it does its work, as a stranger would write it.
//   weir-example-client 127.0.0.1:7401,127.0.0.1:7411 api api_key=k7
// With nodes that speak TLS, and ask for a certificate:
//   weir-example-client 127.0.0.1:7401 api api_key=k7 ca.pem web.pem web.key
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#include <weir/rpc/client/client.h>
#include <weir/rpc/net/backoff.h>

namespace {

weir::ClientOptions options_for(const std::string& nodes) {
  weir::ClientOptions options;
  for (std::size_t begin = 0; begin <= nodes.size();) {
    std::size_t end = std::min(nodes.find(',', begin), nodes.size());
    options.nodes.push_back(nodes.substr(begin, end - begin));
    begin = end + 1;
  }
  options.deadline = 50 * weir::kMillisecond;
  options.leases.enabled = true;
  return options;
}

/// ca.pem web.pem web.key. False after the reason was printed.
bool speak_tls(char** files, weir::ClientOptions& options) {
  weir::rpc::TlsOptions tls;
  tls.ca = files[0];
  tls.cert = files[1];
  tls.key = files[2];
  std::string error;
  options.connection.tls = weir::rpc::TlsContext::make(tls, error);
  if (options.connection.tls == nullptr) std::fprintf(stderr, "%s\n", error.c_str());
  return options.connection.tls != nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if ((argc != 4 && argc != 7) || std::string(argv[3]).find('=') == std::string::npos) {
    std::fprintf(stderr,
                 "usage: weir-example-client NODE[,NODE…] DOMAIN KEY=VALUE [CA CERT KEY]\n");
    return 2;
  }
  weir::ClientOptions options = options_for(argv[1]);
  if (argc == 7 && !speak_tls(argv + 4, options)) return 2;
  weir::Client client(options);
  const std::string entry = argv[3];
  const std::size_t equals = entry.find('=');
  const weir::CheckItem item{argv[2], {{entry.substr(0, equals), entry.substr(equals + 1)}}, 1};

  std::mt19937_64 random(std::random_device{}());
  weir::Backoff backoff({}, [&](std::uint64_t n) { return random() % n; });
  int done = 0;
  for (int i = 0; i < 1000; ++i) {
    const weir::ClientReply reply = client.check(item);
    if (!reply.error.empty()) {
      std::fprintf(stderr, "no decision: %s\n", reply.error.to_string().c_str());
      return 1;
    }
    if (reply.allowed) {
      ++done;  // the work would be done here
      backoff.reset();
      continue;
    }
    const weir::Status* decider = reply.decider();
    const weir::Nanos wait =
        decider == nullptr ? backoff.next() : backoff.next(decider->retry_after);
    std::printf("denied%s%s; would wait %.3f s\n", decider == nullptr ? "" : " by ",
                decider == nullptr ? "" : decider->rule.c_str(),
                static_cast<double>(wait) / static_cast<double>(weir::kSecond));
    break;
  }
  const weir::ClientCounters counters = client.counters();
  std::printf("%d passed, with %llu calls\n", done,
              static_cast<unsigned long long>(counters.calls));
  return 0;
}
