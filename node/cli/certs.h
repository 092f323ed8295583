#pragma once

#include <string>
#include <vector>

#include <weir/crdt/time.h>

namespace weir::node {

/// A folder with a CA and what it has issued, for trying out and for tests: ca.pem, ca.key,
/// crl.pem, and NAME.pem and NAME.key for each certificate. Keys are their owner's alone.
/// Everything here throws std::runtime_error, with the file and the reason.
class CertFolder {
 public:
  /// `now`: the wall clock.
  CertFolder(std::string path, Nanos now) : path_(std::move(path)), now_(now) {}

  /// Makes the folder, if it is missing, and a CA in it. Not if there is one.
  void make_ca(const std::string& name, unsigned days) const;
  /// Makes NAME.pem and NAME.key. Where they are there already only with `replace`.
  void issue(const std::string& name, const std::vector<std::string>& names, unsigned days,
             bool replace) const;
  /// Adds NAME.pem to crl.pem, which is good for `days` from now on. An empty `name` only makes the
  /// list, or makes it good for longer.
  void revoke(const std::string& name, unsigned days) const;

  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
  Nanos now_;
};

}  // namespace weir::node
