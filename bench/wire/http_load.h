#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <weir/bench/wire/links.h>
#include <weir/bench/wire/load.h>

namespace weir::bench {

/// What is asked, and of whom.
struct HttpTarget {
  std::uint16_t port = 0;  ///< on 127.0.0.1
  std::string request;     ///< whole, with sixteen bytes in it that each request's key replaces
  std::size_t key_at = 0;  ///< where they are
  int status = 200;        ///< what every answer must have
  std::uint64_t keys = 0;  ///< of which each request has one, at random
};

/// Asks over connections that stay open, in one thread, as cheaply as it can: requests are a copy
/// of one with another key in it, answers are read as far as their length. Every call throws
/// std::runtime_error if an answer has another status, a connection ends or nothing comes for
/// kPatienceNs.
class HttpLoad {
 public:
  /// Connects. `depth` requests are written at once on a connection, and the next ones when all of
  /// these are answered.
  HttpLoad(HttpTarget target, unsigned connections, unsigned depth);

  /// Every connection asks again as soon as it is answered. A latency is the time from the writing
  /// of a request to its answer.
  Load closed(double seconds);
  /// `rate` requests a second come at random times (a Poisson process, the same each time) and go
  /// out on a free connection, or wait for one. A latency counts from when the request came. Keeps
  /// its processor busy, so that it sends in time.
  Load open(double rate, double seconds);
  /// Each key once, in order.
  void ask_all();

 private:
  struct Connection {
    unsigned unanswered = 0;
    std::uint64_t since = 0;  // when the requests were written, or came
  };

  /// Writes `count` requests with these keys.
  template <typename NextKey>
  void send(Link& link, unsigned count, std::uint64_t since, NextKey&& next_key);
  void send_random(Link& link, unsigned count, std::uint64_t since);
  /// Waits for answers, at most `timeout_ms`. Calls `answered(link)` for each connection of which
  /// nothing more is owed.
  template <typename Answered>
  void wait(int timeout_ms, Answered&& answered);
  void take_answers(Link& link, std::uint64_t now);

  HttpTarget target_;
  unsigned depth_;
  std::uint64_t random_;
  Links links_;
  std::vector<Connection> connections_;  // by link
  std::string output_;
  Load load_;
  std::uint64_t last_answer_ = 0;
};

}  // namespace weir::bench
