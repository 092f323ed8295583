#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/limits/bounds.h>
#include <weir/node/service/service.h>

namespace weir::node::test {

/// Counts by key: of each up to 10000 in a minute. Keys "late" are answered when the test calls
/// what waits.
class CountingService final : public Service {
 public:
  void check(std::span<const Request> requests, std::span<const std::size_t> parts,
             const Caller& caller, CheckDone done) override {
    if (throws) throw std::runtime_error("boom");
    std::string call;
    for (const Request& request : requests) {
      if (request.descriptor.size() != 1 || request.descriptor[0].value.size() > kMaxEntryText) {
        throw std::logic_error("a request beyond the bounds");
      }
      call += call.empty() ? "" : " ";
      call += std::string(request.descriptor[0].value) + "*" + std::to_string(request.hits);
    }
    calls.push_back(std::move(call));
    who.push_back(caller.grant == nullptr ? "?" : caller.grant->name);
    auto shared = std::make_shared<CheckDone>(std::move(done));
    for (std::size_t part = 0; part < parts.size(); ++part) {
      bool late = false;
      auto replies = std::make_shared<std::vector<Reply>>();
      for (const Request& request : requests.first(parts[part])) {
        late |= request.descriptor[0].value == "late";
        replies->push_back(decide(request));
      }
      requests = requests.subspan(parts[part]);
      if (late) {
        waiting.push_back([shared, part, replies] { (*shared)(part, *replies); });
      } else {
        (*shared)(part, *replies);
      }
    }
  }
  void reserve(const Request&, Nanos, const Caller&, Done<ReserveReply>) override {}
  void settle(std::string_view, std::uint64_t, const Caller&, Done<SettleReply>) override {}
  void lease(const Request&, const LeaseTerms&, const Caller&, Done<LeaseReply>) override {}
  void rules(std::string_view, const Caller&, Done<RulesReply>) override {}
  void status(const Caller&, Done<StatusReply>) override {}

  std::vector<std::string> calls;  ///< "a*1 b*0": keys and hits
  std::vector<std::string> who;    ///< the callers' names
  std::vector<std::function<void()>> waiting;
  bool throws = false;

 private:
  static constexpr std::uint64_t kLimit = 10'000;

  Reply decide(const Request& request) {
    std::uint64_t& count = counts_[std::string(request.descriptor[0].value)];
    Reply reply;
    reply.allowed = true;
    if (request.kind == RequestKind::refund) {
      reply.given_back = std::min(count, request.hits);
      count -= reply.given_back;
    } else {
      reply.allowed = request.hits <= kLimit - count;
      count += reply.allowed ? request.hits : 0;
    }
    Status status;
    status.rule = "counts";
    status.allowed = reply.allowed;
    status.limit = kLimit;
    status.remaining = kLimit - count;
    status.window = status.reset = kMinute;
    status.retry_after = reply.allowed ? 0 : kMinute;
    reply.deciding = 0;
    reply.statuses = {status};
    return reply;
  }

  std::map<std::string, std::uint64_t> counts_;
};

}  // namespace weir::node::test
