#pragma once

#include <google/protobuf/arena.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <weir/node/fronts/grpc/grpc_messages.h>
#include <weir/node/fronts/grpc/grpc_reflection.h>
#include <weir/node/fronts/grpc/grpc_server.h>
#include <weir/node/service/service.h>

namespace weir::node {

/// The methods that a node serves: Envoy's rate limit service and external authorization, weir's
/// own API, health, and reflection. Checks that one read of a connection brought are decided as one
/// batch. For the loop's thread only.
class GrpcMethods final : public GrpcServer::Handler {
 public:
  /// `wall` reads the wall clock.
  GrpcMethods(Service& service, std::function<Nanos()> wall);
  /// Whose calls they are, from which late answers find them. Before the first call.
  void serve(GrpcServer& server) { server_ = &server; }

  GrpcKind kind_of(std::string_view& path) override;
  void handle(std::span<GrpcCall* const> batch) override;

  /// Tells those who watch the node's health, if it changed. To be called every so often.
  void tell_health();
  /// The node serves no more, whatever the service says.
  void drain();

 private:
  enum class Route : std::uint8_t;
  struct Method;
  struct Malformed {
    std::size_t index = 0;  // in the batch
    std::string why;
  };
  /// What one call asked to be checked.
  struct Part {
    GrpcCall* call = nullptr;  // good until the service has returned
    std::uint64_t id = 0;      // of the call
    Route route{};
    std::size_t count = 0;  // of requests
    std::size_t descriptors = 0;
    std::vector<Malformed> malformed;  // CheckBatch
  };
  struct Watcher {
    std::uint64_t id = 0;  // of the call
    bool known = false;    // the service that it watches
  };

  static const Method* method_at(std::string_view path);
  bool gather(GrpcCall& call, Route route);
  template <typename Message, typename Read>
  bool gather_one(GrpcCall& call, Route route, Read read);
  bool gather_batch(GrpcCall& call);
  void decide(const GrpcCall* asked);
  void answer(GrpcCall& call, const Part& part, std::span<const Reply> replies);
  void answer_batch(GrpcCall& call, const Part& part, std::span<const Reply> replies);
  void reserve(GrpcCall& call);
  void settle(GrpcCall& call);
  void lease(GrpcCall& call);
  void health(GrpcCall& call, bool watch);
  void reflect(GrpcCall& call);
  bool ready() const { return !draining_ && service_.ready(); }

  template <typename Message>
  Message* parse(GrpcCall& call);
  template <typename Message, typename Fill>
  void write(GrpcCall& call, Fill fill);

  Service& service_;
  const std::function<Nanos()> wall_;
  GrpcServer* server_ = nullptr;
  const GrpcReflection reflection_;
  /// What an arena begins with, and keeps.
  struct Block {
    alignas(8) std::array<char, 16u << 10> bytes;
  };
  const std::unique_ptr<Block> in_block_, out_block_;
  google::protobuf::Arena in_;   // what the batch that is being read asks
  google::protobuf::Arena out_;  // the answer that is being written
  std::vector<Request> requests_;
  std::vector<Part> parts_;
  std::vector<std::size_t> sizes_;
  std::vector<Watcher> watchers_;
  bool told_ready_ = true;
  bool draining_ = false;
};

}  // namespace weir::node
