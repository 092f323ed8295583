#include <weir/node/cli/certs.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include <weir/limits/yaml/read_file.h>
#include <weir/rpc/net/certificates.h>

namespace weir::node {
namespace {

constexpr std::size_t kMaxFile = 1u << 20;
/// Clocks differ: a certificate is good from a little before it was made.
constexpr Nanos kBefore = kHour;

[[noreturn]] void fail(const std::string& file, const std::string& why) {
  throw std::runtime_error(file + ": " + why);
}

std::string read(const std::string& file) {
  std::string out;
  if (const int error = internal::read_file(file, kMaxFile, out); error != 0) {
    fail(file, std::strerror(error));
  }
  return out;
}

/// Whole or not at all; a name that was there is replaced, or is an error.
void write(const std::string& file, const std::string& text, mode_t mode, bool replace) {
  const std::string aside = file + ".new";
  ::unlink(aside.c_str());
  const int fd = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) fail(aside, std::strerror(errno));
  const bool written = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                       ::fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  if (!written) {
    ::unlink(aside.c_str());
    fail(aside, std::strerror(error));
  }
  const int moved =
      replace ? ::rename(aside.c_str(), file.c_str()) : ::link(aside.c_str(), file.c_str());
  const int why = errno;
  if (!replace) ::unlink(aside.c_str());
  if (moved != 0) fail(file, why == EEXIST ? "is there already" : std::strerror(why));
}

bool good_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 && name != "ca" && name != "crl" && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '-' || c == '_' || c == '.';
         });
}

void check_name(const std::string& name) {
  if (good_name(name)) return;
  throw std::runtime_error(
      "expected a name of 1 to 64 letters, digits, '-', '_' or '.', other than "
      "ca and crl, got \"" +
      name + "\"");
}

}  // namespace

void CertFolder::make_ca(const std::string& name, unsigned days) const {
  if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST) fail(path_, std::strerror(errno));
  if (std::filesystem::exists(file("ca.pem"))) fail(file("ca.pem"), "is there already");
  const rpc::Certificate ca = rpc::make_ca({name, {}, now_ - kBefore, now_ + days * kDay});
  write(file("ca.key"), ca.key, 0600, false);
  write(file("ca.pem"), ca.cert, 0644, false);
}

void CertFolder::issue(const std::string& name, const std::vector<std::string>& names,
                       unsigned days, bool replace) const {
  check_name(name);
  const rpc::Certificate ca{read(file("ca.pem")), read(file("ca.key"))};
  const rpc::Certificate made = rpc::issue(ca, {name, names, now_ - kBefore, now_ + days * kDay});
  // The key first: a node that looks in between finds that the two do not belong together, keeps
  // what it had, and looks again.
  write(file(name + ".key"), made.key, 0600, replace);
  write(file(name + ".pem"), made.cert, 0644, replace);
}

void CertFolder::revoke(const std::string& name, unsigned days) const {
  std::vector<std::string> revoked;
  if (!name.empty()) {
    check_name(name);
    revoked.push_back(read(file(name + ".pem")));
  }
  const rpc::Certificate ca{read(file("ca.pem")), read(file("ca.key"))};
  const std::string former =
      std::filesystem::exists(file("crl.pem")) ? read(file("crl.pem")) : std::string();
  write(file("crl.pem"), rpc::revoke(ca, former, revoked, now_ - kMinute, now_ + days * kDay), 0644,
        true);
}

}  // namespace weir::node
