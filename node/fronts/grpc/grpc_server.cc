#include <weir/node/fronts/grpc/grpc_server.h>

#include <algorithm>
#include <utility>

#include <weir/node/fronts/grpc/grpc_connection.h>

namespace weir::node {
namespace {

// Connections that take a step on their way out in one turn.
constexpr int kStepsPerTurn = 256;
// Connections that are looked at for one of an address, in each list.
constexpr int kLooksForRoom = 64;
// What a call that is free keeps of its buffers.
constexpr std::size_t kMostKept = 4u << 10;
// A call's id: where it stands among all, and how many there were before it.
constexpr unsigned kSlotBits = 22;
constexpr std::uint64_t kSlotMask = (1u << kSlotBits) - 1;

Milliseconds milliseconds(Nanos length) {
  return static_cast<Milliseconds>((std::max<Nanos>(length, 0) + kMillisecond - 1) / kMillisecond);
}

/// Spread evenly over 64 bits.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

void forget_texts(rpc::Output& out) {
  if (out.capacity() > kMostKept) out = {};
  out.clear();
}

void forget_texts(std::string& text) {
  if (text.capacity() > kMostKept) text = {};
  text.clear();
}

}  // namespace

GrpcServer::Impl::Impl(rpc::StreamLoop& stream_loop, GrpcServerOptions server_options,
                       Handler& server_handler, std::shared_ptr<ConnectionBudget> server_budget)
    : loop(stream_loop),
      options(server_options),
      handler(server_handler),
      budget(std::move(server_budget)),
      first_timeout(milliseconds(options.first_timeout)),
      message_timeout(milliseconds(options.message_timeout)),
      answer_timeout(milliseconds(options.answer_timeout)),
      idle_timeout(milliseconds(options.idle_timeout)),
      stall_timeout(milliseconds(options.stall_timeout)),
      max_age(milliseconds(options.max_age)),
      last_word(milliseconds(options.last_word)),
      grace(milliseconds(options.grace)),
      evict_after(milliseconds(options.evict_after)),
      timer(new uv_timer_t{}) {
  timer->data = this;
  uv_timer_init(loop.uv(), timer);
  if (nghttp2_session_callbacks_new(&callbacks) != 0 || nghttp2_option_new(&option) != 0) {
    throw std::bad_alloc();
  }
  GrpcConnection::set_callbacks(callbacks);
  nghttp2_option_set_no_closed_streams(option, 1);
  // Resets are bounded with all else that brings nothing (GrpcConnection::calm).
  nghttp2_option_set_stream_reset_rate_limit(option, 1u << 30, 1u << 30);
}

GrpcServer::Impl::~Impl() {
  nghttp2_session_callbacks_del(callbacks);
  nghttp2_option_del(option);
}

void GrpcServer::Impl::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  if (stream == nullptr || stopped) return;
  if (!take(peer)) {
    ++counters.turned_away;
    return;
  }
  ++counters.accepted;
  ++connections;
  fresh.push_back(std::make_unique<GrpcConnection>(*this, std::move(stream), peer));
  const Milliseconds age = max_age - mixed(++serial ^ loop.now() << 20) % (max_age / 10 + 1);
  fresh.back()->start(std::prev(fresh.end()), fresh, loop.now() + (draining ? 0 : age));
}

bool GrpcServer::Impl::take(const rpc::Address& peer) {
  using Taken = ConnectionBudget::Taken;
  const Taken taken = budget->take(peer);
  if (taken == Taken::yes) return true;
  return make_room(taken == Taken::all_are ? nullptr : &peer) && budget->take(peer) == Taken::yes;
}

/// Closes one, of that address if there is one.
bool GrpcServer::Impl::make_room(const rpc::Address* of) {
  for (GrpcConnections* list : {&fresh, &idle}) {
    int looked = 0;
    for (const auto& connection : *list) {
      if (loop.now() < connection->since() + evict_after || ++looked > kLooksForRoom) break;
      if (of != nullptr && !rpc::AddressCounts::same(connection->peer(), *of)) continue;
      ++counters.evicted;
      connection->close();
      return true;
    }
  }
  return false;
}

GrpcCall* GrpcServer::Impl::take(GrpcConnection& connection, std::int32_t stream) {
  if (free_calls.empty()) {
    free_calls.push_back(static_cast<std::uint32_t>(calls.size()));
    calls.push_back(std::make_unique<GrpcCall>());
  }
  const std::uint32_t slot = free_calls.back();
  free_calls.pop_back();
  GrpcCall* call = calls[slot].get();
  call->id_ = ++serial << kSlotBits | slot;
  call->connection_ = &connection;
  call->stream_ = stream;
  return call;
}

void GrpcServer::Impl::release(GrpcCall& call) {
  clear_due(call);
  free_calls.push_back(static_cast<std::uint32_t>(call.id_ & kSlotMask));
  for (rpc::Output* bytes : {&call.in_, &call.out_}) forget_texts(*bytes);
  for (std::string* text : {&call.path_, &call.authorization_, &call.text_}) forget_texts(*text);
  // All but those, which keep their memory.
  GrpcCall fresh_call;
  fresh_call.in_ = std::move(call.in_);
  fresh_call.out_ = std::move(call.out_);
  fresh_call.path_.swap(call.path_);
  fresh_call.authorization_.swap(call.authorization_);
  fresh_call.text_.swap(call.text_);
  call = std::move(fresh_call);
}

void GrpcServer::Impl::set_due(GrpcCall& call, Milliseconds at) {
  clear_due(call);
  call.due_ = calls_due.emplace(at, &call);
  call.has_due_ = true;
  arm(at);
}

void GrpcServer::Impl::clear_due(GrpcCall& call) {
  if (std::exchange(call.has_due_, false)) calls_due.erase(call.due_);
}

// The timer goes off at the earliest deadline there was when it was set. Most have moved on by
// then, so a call costs no timer.
void GrpcServer::Impl::arm(Milliseconds at) {
  if (at >= armed || stopped) return;
  armed = at;
  const Milliseconds now = loop.now();
  uv_timer_start(
      timer, [](uv_timer_t* handle) { static_cast<Impl*>(handle->data)->on_timer(); },
      at > now ? at - now : 0, 0);
}

void GrpcServer::Impl::on_timer() {
  armed = ~Milliseconds{0};
  const Milliseconds now = loop.now();
  expire_calls(now);
  expire_connections(now);
  arm(next_deadline());
}

void GrpcServer::Impl::expire_calls(Milliseconds now) {
  while (!calls_due.empty() && calls_due.begin()->first <= now) {
    GrpcCall& call = *calls_due.begin()->second;
    clear_due(call);
    call.connection_->time_out(call);
  }
}

void GrpcServer::Impl::expire_connections(Milliseconds now) {
  const auto expire = [&](GrpcConnections& list, Milliseconds timeout) {
    while (!list.empty() && list.front()->since() + timeout <= now) {
      ++counters.timed_out;
      list.front()->time_out();
    }
  };
  expire(fresh, first_timeout);
  expire(idle, idle_timeout);
  expire(busy, stall_timeout);
  int steps = 0;
  for (; !young.empty() && steps < kStepsPerTurn; ++steps) {
    if (!draining && young.begin()->first > now) break;
    if (!draining) ++counters.aged;
    young.begin()->second->go();
  }
  for (; !going.empty() && going.begin()->first <= now && steps < kStepsPerTurn; ++steps) {
    going.begin()->second->go();
  }
}

Milliseconds GrpcServer::Impl::next_deadline() {
  Milliseconds first = ~Milliseconds{0};
  const auto add = [&](const GrpcConnections& list, Milliseconds timeout) {
    if (!list.empty()) first = std::min(first, list.front()->since() + timeout);
  };
  add(fresh, first_timeout);
  add(idle, idle_timeout);
  add(busy, stall_timeout);
  if (!calls_due.empty()) first = std::min(first, calls_due.begin()->first);
  if (!young.empty()) first = std::min(first, draining ? loop.now() : young.begin()->first);
  if (!going.empty()) first = std::min(first, going.begin()->first);
  return first;
}

void GrpcServer::Impl::drain() {
  if (std::exchange(draining, true)) return;
  arm(loop.now());
}

void GrpcServer::Impl::stop() {
  if (std::exchange(stopped, true)) return;
  for (GrpcConnections* list : {&fresh, &idle, &busy}) {
    while (!list->empty()) list->front()->close();
  }
  loop.forget(*this);
  dead.clear();
  uv_timer_stop(timer);
  uv_close(reinterpret_cast<uv_handle_t*>(timer),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

GrpcServer::GrpcServer(rpc::StreamLoop& loop, GrpcServerOptions options, Handler& handler,
                       std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, options, handler, std::move(budget))) {}

GrpcServer::~GrpcServer() {
  stop();
}

void GrpcServer::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  impl_->accept(std::move(stream), peer);
}

GrpcCall* GrpcServer::find(std::uint64_t id) {
  const std::uint64_t slot = id & kSlotMask;
  if (slot >= impl_->calls.size()) return nullptr;
  GrpcCall* call = impl_->calls[slot].get();
  const bool open =
      call->id_ == id && call->connection_ != nullptr && call->phase_ != GrpcCall::Phase::finished;
  return open ? call : nullptr;
}

void GrpcServer::drain() {
  impl_->drain();
}

void GrpcServer::stop() {
  impl_->stop();
}

std::size_t GrpcServer::connections() const {
  return impl_->connections;
}

std::size_t GrpcServer::calls() const {
  return impl_->calls.size() - impl_->free_calls.size();
}

std::size_t GrpcServer::held() const {
  return impl_->held;
}

const GrpcServer::Counters& GrpcServer::counters() const {
  return impl_->counters;
}

}  // namespace weir::node
