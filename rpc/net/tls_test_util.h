#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <weir/rpc/net/certificates.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::rpc::test {

inline Nanos wall_now() {
  return std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

/// A CA and what it issues, as files in a folder of its own.
class TestCa {
 public:
  explicit TestCa(const std::string& name = "test CA") {
    static std::atomic<int> count{0};
    folder_ = std::filesystem::temp_directory_path() /
              ("weir-tls-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
    std::filesystem::create_directories(folder_);
    ca_ = make_ca({name, {}, wall_now() - kHour, wall_now() + kDay});
    write("ca.pem", ca_.cert);
  }
  ~TestCa() { std::filesystem::remove_all(folder_); }
  TestCa(const TestCa&) = delete;
  TestCa& operator=(const TestCa&) = delete;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    // By a rename, with another inode: as tools do that replace certificates.
    std::ofstream(path(name) + ".new") << text;
    std::filesystem::rename(path(name) + ".new", path(name));
  }
  /// NAME.pem and NAME.key.
  Certificate issue(const std::string& name, std::vector<std::string> names,
                    Nanos from = wall_now() - kHour, Nanos until = wall_now() + kDay) const {
    Certificate made = rpc::issue(ca_, {name, std::move(names), from, until});
    write(name + ".key", made.key);
    write(name + ".pem", made.cert);
    return made;
  }
  void revoke(const std::vector<std::string>& certs, Nanos until = wall_now() + kDay) const {
    write("crl.pem", rpc::revoke(ca_, "", certs, wall_now() - kHour, until));
  }
  /// With what issue() wrote; `name` may be empty: none.
  TlsOptions options(const std::string& name,
                     ClientCertificate client_certificate = ClientCertificate::none) const {
    TlsOptions out;
    if (!name.empty()) {
      out.cert = path(name + ".pem");
      out.key = path(name + ".key");
    }
    out.ca = path("ca.pem");
    out.client_certificate = client_certificate;
    return out;
  }
  std::shared_ptr<TlsContext> context(
      const std::string& name,
      ClientCertificate client_certificate = ClientCertificate::none) const {
    return make(options(name, client_certificate));
  }
  static std::shared_ptr<TlsContext> make(TlsOptions options) {
    std::string error;
    auto made = TlsContext::make(std::move(options), error);
    EXPECT_NE(made, nullptr) << error;
    return made;
  }
  const Certificate& ca() const { return ca_; }

 private:
  std::filesystem::path folder_;
  Certificate ca_;
};

}  // namespace weir::rpc::test
