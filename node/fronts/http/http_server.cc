#include <weir/node/fronts/http/http_server.h>

#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include <fmt/format.h>

#include <weir/node/fronts/http/http_connection.h>

namespace weir::node {
namespace {

// Connections that drain() looks at in one turn.
constexpr int kDrainsPerTurn = 256;
// Connections that are looked at for one of an address, in each list: who has its part of them all
// is soon found.
constexpr int kLooksForRoom = 64;
// An exchange's id: where it stands among all, and how many there were before it.
constexpr unsigned kSlotBits = 22;
constexpr std::uint64_t kSlotMask = (1u << kSlotBits) - 1;

Milliseconds milliseconds(Nanos length) {
  return static_cast<Milliseconds>((std::max<Nanos>(length, 0) + kMillisecond - 1) / kMillisecond);
}

// The Date field, as a line.
std::string date_line(std::time_t now) {
  constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::tm utc{};
  gmtime_r(&now, &utc);
  return fmt::format("Date: {}, {:02} {} {} {:02}:{:02}:{:02} GMT\r\n", kDays[utc.tm_wday],
                     utc.tm_mday, kMonths[utc.tm_mon], utc.tm_year + 1900, utc.tm_hour, utc.tm_min,
                     utc.tm_sec);
}

}  // namespace

std::vector<std::string> with_authorization(std::vector<std::string> names) {
  names.emplace_back("authorization");
  return names;
}

HttpServer::Impl::Impl(rpc::StreamLoop& stream_loop, HttpServerOptions server_options,
                       Handler& server_handler, std::shared_ptr<ConnectionBudget> server_budget)
    : loop(stream_loop),
      options(std::move(server_options)),
      authorization(options.headers.size()),
      names(with_authorization(options.headers)),
      handler(server_handler),
      budget(std::move(server_budget)),
      max_batch(std::max<std::size_t>(options.max_batch, 1)),
      idle_timeout(milliseconds(options.idle_timeout)),
      header_timeout(milliseconds(options.header_timeout)),
      answer_timeout(milliseconds(options.answer_timeout)),
      linger_timeout(milliseconds(options.linger_timeout)),
      evict_after(milliseconds(options.evict_after)),
      timer(new uv_timer_t{}) {
  timer->data = this;
  uv_timer_init(loop.uv(), timer);
}

void HttpServer::Impl::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  if (stream == nullptr || stopped) return;
  if (!take(peer)) {
    ++counters.turned_away;
    return;
  }
  ++counters.accepted;
  ++connections;
  Connections& list = draining ? draining_kept : fresh;
  list.push_back(std::make_unique<HttpConnection>(*this, std::move(stream), peer));
  list.back()->start(std::prev(list.end()), list);
}

bool HttpServer::Impl::take(const rpc::Address& peer) {
  using Taken = ConnectionBudget::Taken;
  const Taken taken = budget->take(peer);
  if (taken == Taken::yes) return true;
  return make_room(taken == Taken::all_are ? nullptr : &peer) && budget->take(peer) == Taken::yes;
}

/// Closes one, of that address if there is one. Not one whose request may wait to be read: many are
/// accepted in one turn.
bool HttpServer::Impl::make_room(const rpc::Address* of) {
  for (Connections* list : {&lingering, &fresh, &kept}) {
    int looked = 0;
    for (const auto& connection : *list) {
      if (loop.now() < connection->since() + evict_after || ++looked > kLooksForRoom) break;
      if (of != nullptr && !rpc::AddressCounts::same(connection->peer(), *of)) continue;
      if (list != &lingering && connection->unread()) continue;
      ++counters.evicted;
      connection->close();
      return true;
    }
  }
  return false;
}

HttpExchange* HttpServer::Impl::take(HttpConnection& connection) {
  if (free_exchanges.empty()) {
    free_exchanges.push_back(static_cast<std::uint32_t>(exchanges.size()));
    exchanges.push_back(std::make_unique<HttpExchange>());
  }
  const std::uint32_t slot = free_exchanges.back();
  free_exchanges.pop_back();
  HttpExchange* exchange = exchanges[slot].get();
  exchange->id_ = ++serial << kSlotBits | slot;
  exchange->connection_ = &connection;
  exchange->next_ = nullptr;
  exchange->out_ = nullptr;
  exchange->answered_ = exchange->last_ = false;
  return exchange;
}

void HttpServer::Impl::release(HttpExchange& exchange) {
  exchange.connection_ = nullptr;
  if (exchange.early_.capacity() != 0) loop.give_buffer(std::move(exchange.early_));
  exchange.early_ = {};
  free_exchanges.push_back(static_cast<std::uint32_t>(exchange.id_ & kSlotMask));
}

std::string_view HttpServer::Impl::date() {
  if (loop.now() >= date_until) {
    std::timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    date_text = date_line(now.tv_sec);
    date_until = loop.now() + milliseconds(kSecond - now.tv_nsec);
  }
  return date_text;
}

// The timer goes off at the earliest deadline there was when it was set. Most have moved on by
// then, so a request costs no timer.
void HttpServer::Impl::arm(Milliseconds at) {
  if (at >= armed || stopped) return;
  armed = at;
  const Milliseconds now = loop.now();
  uv_timer_start(
      timer, [](uv_timer_t* handle) { static_cast<Impl*>(handle->data)->on_timer(); },
      at > now ? at - now : 0, 0);
}

void HttpServer::Impl::on_timer() {
  armed = ~Milliseconds{0};
  if (draining) drain_some();
  expire(loop.now());
  arm(next_deadline());
}

void HttpServer::Impl::expire(Milliseconds now) {
  while (!heads.empty() && heads.front()->head_since() + header_timeout <= now) {
    ++counters.timed_out;
    heads.front()->time_out_head();
  }
  each_idle_list([&](Connections& list) {
    while (!list.empty() && list.front()->since() + idle_timeout <= now) {
      ++counters.timed_out;
      list.front()->close();
    }
  });
  while (!waiting.empty() && waiting.front()->since() + answer_timeout <= now) {
    ++counters.unanswered;
    waiting.front()->answer_all(503, "The answer took too long.");
  }
  while (!lingering.empty() && lingering.front()->since() + linger_timeout <= now) {
    lingering.front()->close();
  }
}

Milliseconds HttpServer::Impl::next_deadline() {
  Milliseconds first = ~Milliseconds{0};
  const auto add = [&](const Connections& list, Milliseconds timeout) {
    if (!list.empty()) first = std::min(first, list.front()->since() + timeout);
  };
  each_idle_list([&](Connections& list) { add(list, idle_timeout); });
  add(waiting, answer_timeout);
  add(lingering, linger_timeout);
  if (!heads.empty()) first = std::min(first, heads.front()->head_since() + header_timeout);
  return draining && !(fresh.empty() && kept.empty()) ? loop.now() : first;
}

void HttpServer::Impl::drain_some() {
  for (int i = 0; i < kDrainsPerTurn && !(fresh.empty() && kept.empty()); ++i) {
    Connections& list = fresh.empty() ? kept : fresh;
    list.front()->drain();
  }
}

void HttpServer::Impl::stop() {
  if (std::exchange(stopped, true)) return;
  draining = true;
  while (!waiting.empty()) waiting.front()->answer_all(503, "This node is stopping.");
  for (Connections* list : {&fresh, &kept, &draining_kept, &waiting, &lingering}) {
    while (!list->empty()) list->front()->close();
  }
  loop.forget(*this);
  dead.clear();
  uv_timer_stop(timer);
  uv_close(reinterpret_cast<uv_handle_t*>(timer),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

HttpServer::HttpServer(rpc::StreamLoop& loop, HttpServerOptions options, Handler& handler,
                       std::shared_ptr<ConnectionBudget> budget)
    : impl_(std::make_unique<Impl>(loop, std::move(options), handler, std::move(budget))) {}

HttpServer::~HttpServer() {
  stop();
}

void HttpServer::accept(int fd, const rpc::Address& peer) {
  if (impl_->stopped) {
    ::close(fd);
    return;
  }
  accept(rpc::make_tcp_stream(impl_->loop, fd), peer);
}

void HttpServer::accept(std::unique_ptr<rpc::ByteStream> stream, const rpc::Address& peer) {
  impl_->accept(std::move(stream), peer);
}

HttpExchange* HttpServer::find(std::uint64_t id) {
  const std::uint64_t slot = id & kSlotMask;
  if (slot >= impl_->exchanges.size()) return nullptr;
  HttpExchange* exchange = impl_->exchanges[slot].get();
  return exchange->id_ == id && exchange->connection_ != nullptr && !exchange->answered_ ? exchange
                                                                                         : nullptr;
}

void HttpServer::drain() {
  if (std::exchange(impl_->draining, true)) return;
  impl_->arm(impl_->loop.now());
}

void HttpServer::stop() {
  impl_->stop();
}

std::size_t HttpServer::connections() const {
  return impl_->connections;
}

const HttpServer::Counters& HttpServer::counters() const {
  return impl_->counters;
}

}  // namespace weir::node
