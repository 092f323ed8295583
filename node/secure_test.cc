// Real nodes that know each other by certificates, and foreign clients of their HTTPS.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <cluster/cluster.h>

#include <weir/rpc/client/node_client.h>
#include <weir/rpc/net/certificates.h>

namespace weir::examples {
namespace {

using testing::HasSubstr;

constexpr const char* kRules = R"(domain: api
rules:
  - {name: all, match: {key: any}, key: [key], limit: 1000, window: 365d}
)";

std::string text_of(const std::string& file) {
  std::ostringstream out;
  out << std::ifstream(file).rdbuf();
  return out.str();
}

Nanos wall_now() {
  return std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

/// What a command prints, errors included.
std::string run(const std::string& command) {
  std::string out;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return out;
  std::array<char, 4096> chunk;
  while (std::size_t got = std::fread(chunk.data(), 1, chunk.size(), pipe)) {
    out.append(chunk.data(), got);
  }
  ::pclose(pipe);
  return out;
}

bool have(const std::string& program) {
  return !run("command -v " + program).empty();
}

class SecureTest : public testing::Test {
 protected:
  SecureTest()
      : directory_(
            (std::filesystem::temp_directory_path() / fmt::format("weir-secure-{}", ::getpid()))
                .string()) {}
  ~SecureTest() override {
    if (!HasFailure()) std::filesystem::remove_all(directory_);
  }

  ClusterOptions options(std::vector<std::string> regions) const {
    std::filesystem::remove_all(directory_);
    ClusterOptions made;
    made.node_program = WEIR_NODE_PROGRAM;
    made.directory = directory_;
    made.regions = std::move(regions);
    made.rules = kRules;
    made.tls = true;
    return made;
  }
  std::string certs(const std::string& name) const { return directory_ + "/certs/" + name; }
  /// In the place of what is there, by renames.
  void issue(const std::string& file, const std::string& region, const std::string& node,
             Nanos until) const {
    const rpc::Certificate ca{text_of(certs("ca.pem")), text_of(certs("ca.key"))};
    const rpc::Certificate made = rpc::issue(
        ca,
        {node, {rpc::member_uri("example", region, node), "127.0.0.1"}, wall_now() - kHour, until});
    for (const auto& [end, text] : {std::pair(".key", made.key), std::pair(".pem", made.cert)}) {
      std::ofstream(certs(file) + ".new") << text;
      std::filesystem::rename(certs(file) + ".new", certs(file) + end);
    }
  }
  static bool within(Nanos patience, const std::function<bool()>& condition) {
    for (Nanos waited = 0; waited < patience; waited += 50 * kMillisecond) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }
  static bool logs(const Cluster& cluster, std::size_t node, const std::string& part) {
    return within(20 * kSecond,
                  [&] { return text_of(cluster.log_path(node)).find(part) != std::string::npos; });
  }
  static std::uint64_t count(const Cluster& cluster, std::size_t node, std::uint64_t hits) {
    rpc::NodeClientOptions made;
    made.address = cluster.client_address(node);
    made.deadline = 2 * kSecond;
    const Reply reply = rpc::NodeClient(made).check(rpc::CheckItem{"api", {{"key", "a"}}, hits});
    EXPECT_EQ(reply.error.to_string(), "");
    return reply.statuses.empty() ? 0 : reply.statuses[0].limit - reply.statuses[0].remaining;
  }

  const std::string directory_;
};

TEST_F(SecureTest, ThreeNodesWithCertificatesConverge) {
  Cluster cluster(options({"eu", "us", "ap"}));
  cluster.start_all();
  for (std::size_t i = 0; i < cluster.size(); ++i) count(cluster, i, 10);
  for (std::size_t i = 0; i < cluster.size(); ++i) {
    EXPECT_TRUE(within(30 * kSecond, [&] { return count(cluster, i, 0) == 30; }));
  }
  ASSERT_TRUE(within(30 * kSecond, [&] { return cluster.converged(); }));

  // A new certificate ends no session, and is what comes next is made with.
  issue("eu-1", "eu", "eu-1", wall_now() + 5 * kDay);
  EXPECT_TRUE(logs(cluster, 0, R"("event":"certificates_taken","use":"peers")"));
  EXPECT_TRUE(logs(cluster, 0, R"("event":"certificate_expires")"));
  EXPECT_EQ(text_of(cluster.log_path(0)).find("peer_down"), std::string::npos);
  count(cluster, 0, 5);
  EXPECT_TRUE(within(30 * kSecond, [&] { return count(cluster, 1, 0) == 35; }));
  for (std::size_t i = 0; i < cluster.size(); ++i) EXPECT_EQ(cluster.stop(i), 0);
}

TEST_F(SecureTest, ANodeWithAnothersCertificateIsRefused) {
  Cluster cluster(options({"eu", "us"}));
  // A good certificate, of this CA: but of another one.
  issue("us-1", "us", "us-9", wall_now() + kDay);
  cluster.start_all();
  // It dials, and is refused by name; it answers, and is refused in the handshake.
  const std::string is = "its certificate is of weir://example/us/us-9";
  EXPECT_TRUE(logs(cluster, 0, is + ", expected weir://example/us/us-1"));
  EXPECT_TRUE(logs(cluster, 0, "TLS: " + is));
  EXPECT_TRUE(logs(cluster, 1, "refused us: " + is));
  EXPECT_TRUE(logs(cluster, 1, "TLS: the other side refused: bad certificate"));
  count(cluster, 1, 10);
  EXPECT_EQ(text_of(cluster.log_path(0)).find("peer_up"), std::string::npos);
  EXPECT_EQ(count(cluster, 0, 0), 0u);

  // The right one, without a restart.
  issue("us-1", "us", "us-1", wall_now() + kDay);
  EXPECT_TRUE(logs(cluster, 0, "peer_up"));
  EXPECT_TRUE(within(30 * kSecond, [&] { return count(cluster, 0, 0) == 10; }));
}

TEST_F(SecureTest, AnExpiredNodeIsRefused) {
  Cluster cluster(options({"eu", "us"}));
  issue("us-1", "us", "us-1", wall_now() - kMinute);
  cluster.start_all();
  EXPECT_TRUE(logs(cluster, 0, "its certificate of weir://example/us/us-1, 127.0.0.1 has expired"));
  EXPECT_TRUE(logs(cluster, 1, "TLS: the other side refused: certificate expired"));
  EXPECT_TRUE(logs(cluster, 1, R"("event":"certificate_expired")"));
}

TEST_F(SecureTest, CurlAsks) {
  ASSERT_TRUE(have("curl")) << "scripts/setup installs it";
  Cluster cluster(options({"eu"}));
  cluster.start_all();
  const std::string ask = fmt::format(
      "curl -sS -o /dev/null -w '%{{http_code}} %{{http_version}}' -m 10 "
      "-H 'content-type: application/json' -d '{}' https://{}/v1/check ",
      R"({"domain":"api","descriptor":{"key":"a"}})", cluster.http_address(0));
  EXPECT_EQ(run(ask + "--cacert " + certs("ca.pem")), "200 1.1");
  EXPECT_THAT(run(ask), HasSubstr("certificate"));  // of no CA that it knows
  EXPECT_THAT(run(ask + "--tls-max 1.2 --cacert " + certs("ca.pem")),
              HasSubstr("protocol version"));
  // Several on one connection.
  const std::string url = "https://" + cluster.http_address(0) + "/v1/check ";
  EXPECT_EQ(run("curl -sS -o /dev/null -o /dev/null -w '%{num_connects} ' -m 10 --cacert " +
                certs("ca.pem") + " " + url + url),
            "1 0 ");
}

TEST_F(SecureTest, OpensslAsks) {
  ASSERT_TRUE(have("openssl")) << "scripts/setup installs it";
  Cluster cluster(options({"eu"}));
  cluster.start_all();
  const std::string request = R"(printf 'GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n')";
  const std::string ask = request + " | timeout 10 openssl s_client -connect " +
                          cluster.http_address(0) + " -verify_return_error -CAfile " +
                          certs("ca.pem") + " -verify_ip 127.0.0.1 -ign_eof ";
  const std::string both = run(ask + "-alpn h2,http/1.1");
  EXPECT_THAT(both, HasSubstr("ALPN protocol: http/1.1"));
  EXPECT_THAT(both, HasSubstr("TLSv1.3"));
  EXPECT_THAT(both, HasSubstr("HTTP/1.1 404 Not Found"));
  EXPECT_THAT(run(ask + "-alpn h2"), HasSubstr("no application protocol"));
  EXPECT_THAT(run(ask + "-tls1_2"), HasSubstr("protocol version"));
}

}  // namespace
}  // namespace weir::examples
