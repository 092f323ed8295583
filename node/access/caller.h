#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weir::node {

class Access;

/// How a caller proved who he is.
enum class Proof : std::uint8_t {
  none,  ///< by nothing but where he comes from
  certificate,
  token,
};

/// Who somebody is, and what he may do. Immutable and shared.
struct Grant {
  std::string name = {};  ///< of the certificate or token; empty: anonymous
  Proof proof = Proof::none;
  bool check_all = false;
  std::vector<std::string> check = {};  ///< domains, sorted
  bool read = false;                    ///< status, metrics, rules
  bool admin = false;

  bool may_check(std::string_view domain) const {
    return check_all || std::binary_search(check.begin(), check.end(), domain);
  }
  bool may_anything() const { return check_all || !check.empty() || read || admin; }

  /// Of nobody by name, who may do all.
  static const Grant& everything() {
    static const Grant all{{}, Proof::none, true, {}, true, true};
    return all;
  }
};

/// Who asks. What it points to is valid during the call that it is given to. Made by a Session;
/// one without a grant may do nothing.
struct Caller {
  std::string_view address = {};   ///< where the connection comes from, without its port
  std::string_view identity = {};  ///< what tickets belong to; empty: the address
  const Grant* grant = nullptr;
  std::string_view flaw = {};   ///< why what was shown proves nothing; empty: it does
  std::string_view front = {};  ///< of kFronts
  Access* access = nullptr;     ///< told of denials, if there is one

  bool may_check(std::string_view domain) const {
    return grant != nullptr && (grant->check_all || grant->may_check(domain));
  }
  /// Some domain.
  bool may_check() const { return grant != nullptr && (grant->check_all || !grant->check.empty()); }
  bool may_read() const { return grant != nullptr && grant->read; }
  bool may_administer() const { return grant != nullptr && grant->admin; }
  std::string_view owner() const { return identity.empty() ? address : identity; }
};

}  // namespace weir::node
