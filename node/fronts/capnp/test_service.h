#pragma once

#include <kj/async.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <weir/node/service/service.h>
#include <weir/rpc/net/connection.h>

namespace weir::node::test {

/// A node for tests, which answers when its promises resolve. What it throws becomes the error of
/// every reply.
class ServiceHandler {
 public:
  virtual ~ServiceHandler() = default;
  virtual kj::Promise<void> check(std::span<const Request> requests, std::span<Reply> replies) = 0;
  virtual std::string status_json() { return "{}"; }
  virtual std::string rules_yaml() { return {}; }
  virtual kj::Promise<void> reserve(const Request&, Nanos, ReserveReply&) { return kj::READY_NOW; }
  virtual kj::Promise<void> settle(std::string_view, std::uint64_t, SettleReply&) {
    return kj::READY_NOW;
  }
  virtual kj::Promise<void> lease(const Request&, const LeaseTerms&, LeaseReply&) {
    return kj::READY_NOW;
  }
};

/// The Service that a handler makes.
class TestService final : public Service {
 public:
  explicit TestService(ServiceHandler& handler)
      : handler_(handler), tasks_(std::make_unique<kj::TaskSet>(ignore_)) {}
  ~TestService() noexcept override {}

  void check(std::span<const Request> requests, std::span<const std::size_t> parts, const Caller&,
             CheckDone done) override {
    auto shared = std::make_shared<CheckDone>(std::move(done));
    for (std::size_t part = 0; part < parts.size(); ++part) {
      auto replies = std::make_shared<std::vector<Reply>>(parts[part]);
      const auto asked = requests.first(parts[part]);
      requests = requests.subspan(parts[part]);
      run([&] { return handler_.check(asked, *replies); },
          [shared, part, replies](kj::Maybe<kj::Exception> failure) {
            KJ_IF_MAYBE (e, failure) {
              for (Reply& reply : *replies) reply.fail(kind_of(*e), rpc::reason(*e));
            }
            (*shared)(part, *replies);
          });
    }
  }
  void reserve(const Request& request, Nanos timeout, const Caller&,
               Done<ReserveReply> done) override {
    answer<ReserveReply>([&](ReserveReply& r) { return handler_.reserve(request, timeout, r); },
                         std::move(done));
  }
  void settle(std::string_view ticket, std::uint64_t hits, const Caller&,
              Done<SettleReply> done) override {
    answer<SettleReply>([&](SettleReply& r) { return handler_.settle(ticket, hits, r); },
                        std::move(done));
  }
  void lease(const Request& request, const LeaseTerms& terms, const Caller&,
             Done<LeaseReply> done) override {
    answer<LeaseReply>([&](LeaseReply& r) { return handler_.lease(request, terms, r); },
                       std::move(done));
  }
  void rules(std::string_view, const Caller&, Done<RulesReply> done) override {
    RulesReply reply;
    reply.yaml = handler_.rules_yaml();
    done(reply);
  }
  void status(const Caller&, Done<StatusReply> done) override {
    StatusReply reply{{}, handler_.status_json()};
    done(reply);
  }

 private:
  static ErrorKind kind_of(const kj::Exception& e) {
    return e.getType() == kj::Exception::Type::OVERLOADED ? ErrorKind::overloaded
                                                          : ErrorKind::unknown;
  }
  /// At once where the promise is ready, as a node does it.
  template <typename Start, typename Then>
  void run(Start start, Then then) {
    kj::Promise<void> promise = nullptr;
    KJ_IF_MAYBE (e, kj::runCatchingExceptions([&] { promise = start(); })) {
      return then(kj::mv(*e));
    }
    tasks_->add(promise.then([then]() mutable { then(nullptr); },
                             [then](kj::Exception&& e) mutable { then(kj::mv(e)); }));
  }
  template <typename Answer, typename Start>
  void answer(Start start, Done<Answer> done) {
    auto call = std::make_shared<std::pair<Answer, Done<Answer>>>();
    call->second = std::move(done);
    run([&] { return start(call->first); },
        [call](const kj::Maybe<kj::Exception>&) { call->second(call->first); });
  }
  struct Ignore final : kj::TaskSet::ErrorHandler {
    void taskFailed(kj::Exception&&) override {}
  };

  ServiceHandler& handler_;
  Ignore ignore_;
  std::unique_ptr<kj::TaskSet> tasks_;
};

}  // namespace weir::node::test
