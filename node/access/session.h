#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/node/access/access.h>
#include <weir/node/access/caller.h>
#include <weir/rpc/net/address.h>

namespace weir::node {

/// Who is at the other end of one connection. What it showed is looked up once, and again when
/// another table comes into force: so what is taken away from somebody is taken from connections
/// that are there. For the connection's thread.
class Session {
 public:
  /// `access` outlives it; null: nobody is known. `front` is a literal.
  Session(Access* access, std::string_view front, const rpc::Address& from);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// What TLS has verified. Once the handshake is done, before the first caller().
  void shows_certificate(std::vector<std::string> names);
  /// It counts for all that follows, and instead of all else. False if it is not known: so it is
  /// for what follows, too.
  bool shows_token(std::string_view token);
  /// The same from an HTTP request's Authorization field. One that is not there (data() is null),
  /// or is of another scheme than Bearer, takes nothing away and adds nothing.
  const Caller& with_authorization(std::string_view field);
  std::string_view address() const { return address_; }
  const Caller& caller() {
    if (access_ != nullptr && version_ != access_->version()) [[unlikely]]
      look_up();
    return caller_;
  }

 private:
  void look_up();

  Access* const access_;
  const rpc::Address from_;
  const std::string address_;
  std::vector<std::string> names_;
  std::string token_;  // as it was shown last
  bool has_token_ = false;
  std::shared_ptr<const Grant> grant_;
  std::string identity_;
  std::uint64_t version_ = 0;
  Caller caller_;
};

}  // namespace weir::node
