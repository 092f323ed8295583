#include <weir/node/fronts/redis/redis_server.h>

#include <algorithm>
#include <array>
#include <utility>

namespace weir::node {
namespace {

// Connections that drain() looks at in one turn.
constexpr int kDrainsPerTurn = 256;
// Connections that are looked at for one of an address, in each list: who has its part of them all
// is soon found.
constexpr int kLooksForRoom = 64;

RedisMilliseconds milliseconds(Nanos length) {
  return static_cast<RedisMilliseconds>((std::max<Nanos>(length, 0) + kMillisecond - 1) /
                                        kMillisecond);
}

}  // namespace

RedisServer::RedisServer(rpc::StreamLoop& stream_loop, Service& to, RedisFrontOptions its_options,
                         std::shared_ptr<ConnectionBudget> its_budget)
    : loop(stream_loop),
      service(to),
      options(std::move(its_options)),
      budget(std::move(its_budget)),
      timer_(new uv_timer_t{}) {
  arriving.timeout = milliseconds(options.command_timeout);
  waiting.timeout = milliseconds(options.answer_timeout);
  blocked.timeout = milliseconds(options.send_timeout);
  lingering.timeout = milliseconds(options.linger_timeout);
  timer_->data = this;
  uv_timer_init(loop.uv(), timer_);
}

void RedisServer::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  if (stream == nullptr || stopped_) return;
  if (!take(peer)) {
    ++counters.turned_away;
    return;
  }
  ++counters.accepted;
  auto& list = fresh.list;
  list.push_back(std::make_unique<RedisConnection>(*this, std::move(stream), peer, ++serial_));
  list.back()->start(std::prev(list.end()), fresh);
  if (draining) arm(now());
}

bool RedisServer::take(const rpc::Address& peer) {
  using Taken = ConnectionBudget::Taken;
  const Taken taken = budget->take(peer);
  if (taken == Taken::yes) return true;
  return make_room(taken == Taken::all_are ? nullptr : &peer) && budget->take(peer) == Taken::yes;
}

/// Closes one, of that address if there is one. Not one whose command may wait to be read: many are
/// accepted in one turn.
bool RedisServer::make_room(const rpc::Address* of) {
  const RedisMilliseconds evict_after = milliseconds(options.evict_after);
  for (RedisConnections* those : {&lingering, &fresh, &idle}) {
    int looked = 0;
    for (const auto& connection : those->list) {
      if (now() < connection->since() + evict_after || ++looked > kLooksForRoom) break;
      if (of != nullptr && !rpc::AddressCounts::same(connection->peer(), *of)) continue;
      if (those != &lingering && connection->unread()) continue;
      ++counters.evicted;
      connection->close();
      return true;
    }
  }
  return false;
}

// The timer goes off at the earliest deadline there was when it was set. Most have moved on by
// then, so a command costs no timer.
void RedisServer::arm(RedisMilliseconds at) {
  if (at >= armed_ || stopped_) return;
  armed_ = at;
  uv_timer_start(
      timer_, [](uv_timer_t* handle) { static_cast<RedisServer*>(handle->data)->on_timer(); },
      at > now() ? at - now() : 0, 0);
}

void RedisServer::on_timer() {
  armed_ = ~RedisMilliseconds{0};
  if (draining) drain_some();
  RedisMilliseconds next = ~RedisMilliseconds{0};
  for (RedisConnections* those : {&arriving, &waiting, &blocked, &lingering}) {
    while (!those->list.empty() && those->list.front()->since() + those->timeout <= now()) {
      those->list.front()->on_deadline();
    }
    if (!those->list.empty()) next = std::min(next, those->list.front()->since() + those->timeout);
  }
  if (draining && !(fresh.list.empty() && idle.list.empty())) next = now() + 1;
  arm(next);
}

void RedisServer::drain() {
  if (std::exchange(draining, true)) return;
  arm(now());
}

void RedisServer::drain_some() {
  int looked = 0;
  for (RedisConnections* those : {&fresh, &idle}) {
    while (!those->list.empty() && ++looked <= kDrainsPerTurn) {
      // Those that stay have something to be read: it is read in the next turn.
      if (!those->list.front()->drain()) break;
    }
  }
}

void RedisServer::stop() {
  if (std::exchange(stopped_, true)) return;
  draining = true;
  for (RedisConnections* those : {&fresh, &idle, &arriving, &waiting, &blocked, &lingering}) {
    while (!those->list.empty()) those->list.front()->close();
  }
  loop.forget(*this);
  dead.list.clear();
  uv_timer_stop(timer_);
  uv_close(reinterpret_cast<uv_handle_t*>(timer_),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

}  // namespace weir::node
