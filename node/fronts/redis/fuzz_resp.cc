// Fuzz target (scripts/fuzz): arbitrary bytes as what a client of Redis sends. What it is answered
// must not depend on how the bytes were cut, nor on when the service answers; and of each request
// the bounds hold.
#include <uv.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weir/crdt/fuzz_seeds.h>
#include <weir/limits/bounds.h>
#include <weir/node/fronts/redis/redis_server.h>
#include <weir/node/fronts/redis/redis_test_util.h>
#include <weir/rpc/net/byte_stream.h>

namespace {

using namespace weir;
using namespace weir::node;

void expect(bool holds) {
  if (!holds) std::abort();
}

/// What the test and the server's stream see.
struct Line {
  rpc::ByteStream::User* user = nullptr;
  rpc::Output out;
  std::string sent;
  bool paused = false;
  bool ended = false;
  bool closed = false;
  void flush() {
    sent += out.view();
    out.clear();
  }
};

class Stream final : public rpc::ByteStream {
 public:
  explicit Stream(std::shared_ptr<Line> line) : line_(std::move(line)) {}
  ~Stream() override {
    line_->flush();
    line_->closed = true;
  }
  void start(User& user) override { line_->user = &user; }
  rpc::Output& out() override { return line_->out; }
  void flush() override { line_->flush(); }
  std::size_t waiting() const override { return line_->out.size(); }
  void pause() override { line_->paused = true; }
  void resume() override { line_->paused = false; }
  void end() override {
    line_->flush();
    line_->ended = true;
  }
  std::uint64_t last_activity() const override { return 0; }

 private:
  std::shared_ptr<Line> line_;
};

class Loop {
 public:
  Loop() { uv_loop_init(&loop_); }

  /// What is said to `pieces` over a connection of their own, to a node that has counted nothing.
  std::string ask(const std::vector<std::string_view>& pieces) {
    test::CountingService service;
    rpc::StreamLoop streams(&loop_);
    auto line = std::make_shared<Line>();
    {
      RedisServer server(streams, service, {}, std::make_shared<ConnectionBudget>(8));
      server.accept(std::make_unique<Stream>(line), {});
      for (const std::string_view piece : pieces) {
        settle(*line, service);
        if (line->closed || line->ended) break;
        std::string bytes(piece);  // the callee may write over what he is given
        line->user->on_data({bytes.data(), bytes.size()});
        if (!line->closed) line->flush();
      }
      settle(*line, service);
      if (!line->closed) line->user->on_end(0);
      settle(*line, service);
      expect(line->closed);  // nothing is left to be done
    }
    uv_run(&loop_, UV_RUN_NOWAIT);
    return line->sent;
  }

 private:
  /// Until everything that was asked is answered, the last one first.
  void settle(Line& line, test::CountingService& service) {
    do {
      auto waiting = std::exchange(service.waiting, {});
      for (auto call = waiting.rbegin(); call != waiting.rend(); ++call) (*call)();
      uv_run(&loop_, UV_RUN_NOWAIT);
      if (!line.closed) line.flush();
    } while (!service.waiting.empty() || (line.paused && !line.closed && !line.ended));
  }

  uv_loop_t loop_{};
};

void seed() {
  crdt::test::FuzzSeeds seeds;
  for (const std::string_view text :
       {"*6\r\n$11\r\nCL.THROTTLE\r\n$3\r\nann\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n$1\r\n1\r\n",
        "*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\nINCR late\r\nTTL a\r\nGET b\r\nINFO\r\nQUIT\r\n",
        "MULTI\r\nINCR a\r\nEXPIRE a 60\r\nINCR late\r\nEXEC\r\nDISCARD\r\nRESET\r\n",
        "SET a 0 NX EX 60\r\nSET a b PX 60000 NX\r\nDEL a b c\r\nEXISTS a b\r\nDECRBY a 3\r\n",
        "HELLO 3 AUTH u p SETNAME me\r\nAUTH x\r\nSELECT 0\r\nCLIENT SETINFO lib-name x\r\n",
        "COMMAND DOCS\r\nCONFIG GET save\r\nEVALSHA abc 0\r\nPOST / HTTP/1.1\r\nINCR a\r\n"}) {
    const std::string input = "\7" + std::string(text);
    seeds.add(std::as_bytes(std::span(input)));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Loop& loop = *new Loop;
  static const bool seeded = (seed(), true);
  (void)seeded;
  if (size == 0) return 0;
  // The first byte says how the second run is cut.
  const std::size_t cut = 1 + data[0] % 64;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::vector<std::string_view> pieces;
  for (std::string_view rest = bytes; !rest.empty();
       rest.remove_prefix(std::min(cut, rest.size()))) {
    pieces.push_back(rest.substr(0, cut));
  }
  expect(loop.ask({bytes}) == loop.ask(pieces));
  return 0;
}
