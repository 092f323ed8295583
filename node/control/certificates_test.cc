#include <weir/node/control/certificates.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include <weir/rpc/net/test_util.h>
#include <weir/rpc/net/tls_test_util.h>

namespace weir::node {
namespace {

class CertificatesTest : public testing::Test {
 protected:
  CertificatesTest() {
    ca_.issue("node", {"node.example"}, now_ - kHour, now_ + 40 * kDay);
    const std::string path = ca_.path("log");
    fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    LogOptions options;
    options.fd = fd_;
    options.format = LogFormat::text;
    log_ = std::make_unique<Log>(options);
    config_.tls["http"] = {ca_.path("node.pem"), ca_.path("node.key"), {}, {}, {}, false};
  }
  ~CertificatesTest() noexcept override { ::close(fd_); }

  std::string log() const {
    std::ostringstream out;
    out << std::ifstream(ca_.path("log")).rdbuf();
    return out.str();
  }
  int lines(const std::string& with) const {
    const std::string all = log();
    int count = 0;
    for (std::size_t at = all.find(with); at != std::string::npos; at = all.find(with, at + 1)) {
      ++count;
    }
    return count;
  }

  const Nanos now_ = rpc::test::wall_now();
  rpc::EventLoop loop_;
  rpc::Background background_{loop_};
  rpc::test::TestCa ca_;
  int fd_ = -1;
  std::unique_ptr<Log> log_;
  NodeConfig config_;
};

TEST_F(CertificatesTest, AlarmsOnceAsTheEndComesNearer) {
  Certificates certificates(config_, *log_, background_);
  ASSERT_EQ(certificates.error(), "");
  ASSERT_NE(certificates.of("http"), nullptr);
  EXPECT_EQ(certificates.of("peers"), nullptr);
  certificates.look(now_);
  EXPECT_EQ(lines("certificate_expire"), 0);
  int expected = 0;
  for (const Nanos left : {29 * kDay, 6 * kDay, 23 * kHour, -kMinute}) {
    for (int i = 0; i < 3; ++i) certificates.look(now_ + 40 * kDay - left + i * 10 * kSecond);
    EXPECT_EQ(lines("certificate_expire"), ++expected) << log();
  }
  EXPECT_EQ(lines("event=certificate_expired"), 1);
  EXPECT_EQ(lines("days=6"), 0) << "six days less two times 10 s are five whole ones";
}

TEST_F(CertificatesTest, TakesNewFilesAndSaysOnceWhatIsWrongWithBadOnes) {
  Certificates certificates(config_, *log_, background_);
  auto context = certificates.of("http");
  ca_.issue("node", {"fresh.example"});
  Nanos at = now_;
  const auto until = [&](const std::string& line, int count) {
    return rpc::test::eventually(loop_, [&] {
      certificates.look(at += 3 * kSecond);
      return lines(line) >= count;
    });
  };
  EXPECT_TRUE(until("event=certificates_taken use=http", 1));
  EXPECT_EQ(context->certificates()[0].names, std::vector<std::string>{"fresh.example"});
  ca_.write("node.pem", "nonsense");
  EXPECT_TRUE(until("event=certificates_refused use=http", 1));
  for (int i = 0; i < 10; ++i) {
    certificates.look(at += 3 * kSecond);
    rpc::test::turn(loop_, 5);
  }
  EXPECT_EQ(lines("certificates_refused"), 1);
  EXPECT_FALSE(certificates.uses()[0].current);
  EXPECT_EQ(context->certificates()[0].names, std::vector<std::string>{"fresh.example"});
  ca_.issue("node", {"again.example"});
  EXPECT_TRUE(until("event=certificates_taken use=http", 2));
  EXPECT_TRUE(certificates.uses()[0].current);
}

TEST_F(CertificatesTest, NamesTheFieldAndTheFile) {
  config_.tls["http"].cert = ca_.path("none.pem");
  const std::string why = "tls.http: " + ca_.path("none.pem") + ": No such file or directory";
  EXPECT_EQ(Certificates(config_, *log_, background_).error(), why);
  EXPECT_EQ(unusable_tls(config_), why);
}

TEST_F(CertificatesTest, FindsKeysThatEverybodyMayRead) {
  config_.secret_files = {ca_.path("node.key"), ca_.path("none")};
  ::chmod(ca_.path("node.key").c_str(), 0644);
  EXPECT_EQ(readable_secrets(config_), std::vector<std::string>{ca_.path("node.key")});
  ::chmod(ca_.path("node.key").c_str(), 0640);
  EXPECT_TRUE(readable_secrets(config_).empty());
}

}  // namespace
}  // namespace weir::node
