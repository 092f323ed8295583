#include <weir/node/access/session.h>

#include <strings.h>

#include <utility>

namespace weir::node {
namespace {

/// Of an Authorization field; data() is null if it is no bearer token.
std::string_view bearer_of(std::string_view field) {
  constexpr std::string_view kScheme = "bearer ";
  if (field.size() < kScheme.size() ||
      ::strncasecmp(field.data(), kScheme.data(), kScheme.size()) != 0) {
    return {};
  }
  field.remove_prefix(kScheme.size());
  while (field.starts_with(' ')) field.remove_prefix(1);
  return field;
}

}  // namespace

Session::Session(Access* access, std::string_view front, const rpc::Address& from)
    : access_(access), from_(from), address_(rpc::host_of(from)) {
  caller_.address = address_;
  caller_.front = front;
  caller_.access = access;
}

void Session::shows_certificate(std::vector<std::string> names) {
  if (names.empty()) return;
  names_ = std::move(names);
  version_ = 0;
}

bool Session::shows_token(std::string_view token) {
  // Most often the one of the request before. Nobody else sees how long it takes to find that out:
  // it is his own.
  if (!has_token_ || token_ != token) {
    token_ = token.substr(0, kMaxToken + 1);
    has_token_ = true;
    version_ = 0;
  }
  return caller().flaw.empty();
}

const Caller& Session::with_authorization(std::string_view field) {
  const std::string_view token = field.data() == nullptr ? field : bearer_of(field);
  if (token.data() != nullptr) {
    shows_token(token);
  } else if (has_token_) {
    // A proxy may put several clients' requests on one connection.
    has_token_ = false;
    version_ = 0;
  }
  return caller();
}

void Session::look_up() {
  const std::uint64_t version = access_->version();
  const std::shared_ptr<const AccessTable> table = access_->table();
  caller_.flaw = {};
  grant_ = nullptr;
  if (has_token_) {
    grant_ = table->token(token_);
    if (grant_ == nullptr) caller_.flaw = "the token is not known";
  } else {
    grant_ = table->certificate(names_);
    if (grant_ == nullptr) grant_ = table->anonymous(from_);
  }
  identity_.clear();
  // No address looks so.
  if (grant_ != nullptr && !grant_->name.empty()) identity_.append("=").append(grant_->name);
  caller_.identity = identity_;
  caller_.grant = grant_.get();
  version_ = version;
}

}  // namespace weir::node
