#include <weir/bench/wire/http_load.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include <weir/bench/keys.h>
#include <weir/bench/machine.h>
#include <weir/bench/wire/http_response.h>

namespace weir::bench {

HttpLoad::HttpLoad(HttpTarget target, unsigned connections, unsigned depth)
    : target_(std::move(target)),
      depth_(depth),
      random_(steady_ns()),
      links_(target_.port, connections),
      connections_(connections) {}

template <typename NextKey>
void HttpLoad::send(Link& link, unsigned count, std::uint64_t since, NextKey&& next_key) {
  output_.clear();
  for (unsigned i = 0; i < count; ++i) {
    output_ += target_.request;
    Key16 key = key_of(next_key());
    std::memcpy(output_.data() + output_.size() - target_.request.size() + target_.key_at,
                key.text.data(), key.text.size());
  }
  connections_[link.index] = {count, since};
  links_.send(link, output_);
}

void HttpLoad::send_random(Link& link, unsigned count, std::uint64_t since) {
  send(link, count, since, [this] { return next_random(random_) % target_.keys; });
}

template <typename Answered>
void HttpLoad::wait(int timeout_ms, Answered&& answered) {
  links_.wait(timeout_ms, [&](Link& link) {
    last_answer_ = steady_ns();
    unsigned before = connections_[link.index].unanswered;
    take_answers(link, last_answer_);
    if (before > 0 && connections_[link.index].unanswered == 0) answered(link);
  });
}

void HttpLoad::take_answers(Link& link, std::uint64_t now) {
  Connection& connection = connections_[link.index];
  for (;;) {
    auto head = read_response(link.unread());
    if (!head || head->size > link.unread().size()) return;
    if (head->status != target_.status) {
      throw std::runtime_error("an answer that is not " + std::to_string(target_.status) + ": " +
                               std::string(link.unread().substr(0, 1000)));
    }
    if (connection.unanswered == 0) throw std::runtime_error("an answer to no request");
    link.take(head->size);
    --connection.unanswered;
    load_.latency.record(now - connection.since);
    ++load_.requests;
  }
}

Load HttpLoad::closed(double seconds) {
  load_ = {};
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = last_answer_ = steady_ns();
  std::uint64_t end = start + static_cast<std::uint64_t>(seconds * 1e9);
  std::size_t busy = connections_.size();
  for (Link& link : links_.all()) send_random(link, depth_, steady_ns());
  while (busy > 0) {
    wait(100, [&](Link& link) {
      if (last_answer_ < end) {
        send_random(link, depth_, last_answer_);
      } else {
        --busy;
      }
    });
  }
  load_.ns = last_answer_ - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

Load HttpLoad::open(double rate, double seconds) {
  load_ = {};
  std::vector<Link*> idle;
  for (Link& link : links_.all()) idle.push_back(&link);
  std::uint64_t seed = 1;
  std::uint64_t cpu = thread_cpu_ns();
  std::uint64_t start = last_answer_ = steady_ns();
  std::uint64_t end = start + static_cast<std::uint64_t>(seconds * 1e9);
  auto gap = [&] { return -std::log(1 - next_unit(seed)) * 1e9 / rate; };
  double due = static_cast<double>(start) + gap();
  auto came = static_cast<std::uint64_t>(due);
  while (came < end || idle.size() < connections_.size()) {
    std::uint64_t now = steady_ns();
    while (came <= now && came < end && !idle.empty()) {
      send_random(*idle.back(), 1, came);
      idle.pop_back();
      due += gap();
      came = static_cast<std::uint64_t>(due);
    }
    wait(0, [&](Link& link) { idle.push_back(&link); });
  }
  load_.ns = last_answer_ - start;
  load_.load_cpu_ns = thread_cpu_ns() - cpu;
  return load_;
}

void HttpLoad::ask_all() {
  std::uint64_t key = 0;
  std::size_t busy = 0;
  auto next = [&](Link& link) {
    auto count = static_cast<unsigned>(std::min<std::uint64_t>(depth_, target_.keys - key));
    if (count > 0) {
      send(link, count, steady_ns(), [&key] { return key++; });
    } else {
      --busy;
    }
  };
  for (Link& link : links_.all()) {
    ++busy;
    next(link);
  }
  while (busy > 0) wait(100, next);
}

}  // namespace weir::bench
