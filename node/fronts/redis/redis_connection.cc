#include <algorithm>
#include <utility>

#include <weir/node/fronts/redis/redis_server.h>
#include <weir/node/fronts/redis/resp_text.h>

namespace weir::node {
namespace {

// Commands, and keys that they ask about, that are decided at once: after as many the rest of what
// was read waits for its turn.
constexpr std::size_t kMaxCalls = 64;
constexpr std::size_t kMaxAsked = 256;
// After the last answer so much is read and thrown away, so that the client gets to read it.
constexpr std::size_t kMaxDiscarded = 1u << 20;

}  // namespace

RedisConnection::RedisConnection(RedisServer& server, std::unique_ptr<rpc::ByteStream> stream,
                                 const rpc::Address& peer, std::uint64_t id)
    : server_(server),
      stream_(std::move(stream)),
      peer_(peer),
      commands_(server.options.domain, id,
                [this](std::optional<std::string_view> token) { return authenticate(token); }) {
  session_.emplace(server.options.access, "redis", peer);
}

RedisConnection::~RedisConnection() {
  server_.loop.forget(*this);
}

const Caller& RedisConnection::caller() {
  // Known once something has arrived.
  if (!std::exchange(certificate_asked_, true)) session_->shows_certificate(stream_->peer_names());
  return session_->caller();
}

bool RedisConnection::authenticate(std::optional<std::string_view> token) {
  if (token) return session_->shows_token(*token);
  session_.emplace(server_.options.access, "redis", peer_);
  certificate_asked_ = false;
  return true;
}

void RedisConnection::start(std::list<std::unique_ptr<RedisConnection>>::iterator at,
                            RedisConnections& list) {
  at_ = at;
  list_ = &list;
  since_ = server_.now();
  stream_->start(*this);
}

/// To the end of the list: those that come later have later deadlines.
void RedisConnection::move_to(RedisConnections& list) {
  since_ = server_.now();
  list.list.splice(list.list.end(), list_->list, at_);
  list_ = &list;
  if (list.timeout != 0) server_.arm(since_ + list.timeout);
}

// The object itself lives to the end of the turn, as this may be called from within its functions.
void RedisConnection::close() {
  if (stream_ == nullptr) return;
  stream_.reset();
  if (work_ != nullptr) work_->connection = nullptr;
  work_ = nullptr;
  in_ = {};
  move_to(server_.dead);
  server_.budget->give(peer_);
  server_.loop.forget(*this);
  server_.loop.defer(server_);
}

void RedisConnection::on_data(std::span<char> bytes) {
  if (list_ == &server_.lingering) {
    discarded_ += bytes.size();
    if (discarded_ > kMaxDiscarded) close();
    return;
  }
  // Whole commands are read where they arrived. Only what is left is copied.
  if (in_.empty()) return consume(bytes, true);
  in_.append({bytes.data(), bytes.size()});
  consume({in_.data(), in_.size()}, false);
}

void RedisConnection::consume(std::span<char> data, bool borrowed) {
  std::size_t at = 0;
  for (bool full = true; full;) {
    full = collect(data, at);
    if (!decide()) {
      keep(data, at, borrowed);
      stream_->pause();
      return move_to(server_.waiting);
    }
    if (!room()) {
      blocked_ = true;
      break;
    }
  }
  keep(data, at, borrowed);
  settle();
}

/// Puts the commands of `data` from `at` on into the batch, and moves `at` behind them. True if
/// more of them may be there.
bool RedisConnection::collect(std::span<char> data, std::size_t& at) {
  RedisBatch& batch = server_.work->batch;
  while (!commands_.ends() && !bad_) {
    if (batch.calls.size() >= kMaxCalls || batch.requests.size() >= kMaxAsked) return true;
    const RespParser::State state = parser_.read({data.data() + at, data.size() - at});
    if (state == RespParser::State::more) return false;
    if (state == RespParser::State::bad) {
      bad_ = true;
      ++server_.counters.refused;
      append_resp_error(batch.tell(), "ERR " + std::string(parser_.error()));
      return false;
    }
    const auto& arguments = parser_.arguments();
    if (!arguments.empty()) {
      if (!batch.empty() && RedisCommands::changes_caller(arguments[0])) {
        parser_.reset();  // it is read again once the others are decided
        return true;
      }
      ++server_.counters.commands;
      asked_ = true;
      caller();
      commands_.run(arguments, batch);
    }
    at += parser_.size();
    parser_.reset();
  }
  return false;
}

/// Has the batch decided. False if some of it is not answered yet.
bool RedisConnection::decide() {
  RedisWork& work = *server_.work;
  if (work.batch.empty()) return true;
  work.connection = this;
  for (std::size_t i = 0; i < work.batch.calls.size(); ++i) {
    const RedisCall& call = work.batch.calls[i];
    if (call.done) continue;
    work.parts.push_back(call.requests);
    work.part_calls.push_back(static_cast<std::uint32_t>(i));
  }
  if (!work.parts.empty()) {
    const auto shared = server_.work;
    try {
      server_.service.check(work.batch.finish(), work.parts, caller(),
                            [shared](std::size_t part, std::span<Reply> replies) {
                              if (shared->connection == nullptr) return;
                              shared->connection->told(*shared, part, replies);
                            });
    } catch (...) {
      fail_rest(work, "ERR the command could not be handled");
    }
  }
  write_known(work);
  if (work.next < work.batch.calls.size()) {
    // The views in it are not of use any more.
    work_ = std::exchange(server_.work, std::make_shared<RedisWork>());
    return false;
  }
  // Whoever still may call about it finds no connection.
  work.connection = nullptr;
  if (server_.work.use_count() > 1) {
    server_.work = std::make_shared<RedisWork>();
    return true;
  }
  work.batch.clear();
  work.parts.clear();
  work.part_calls.clear();
  work.next = 0;
  return true;
}

void RedisConnection::told(RedisWork& work, std::size_t part, std::span<Reply> replies) {
  const std::size_t index = work.part_calls[part];
  RedisCall& call = work.batch.calls[index];
  if (call.done) return;
  write_known(work);
  call.done = true;
  if (index != work.next) return append_answer(call.text, call, replies);
  append_answer(stream_->out(), call, replies);
  ++work.next;
  if (work_.get() != &work) return;  // decide() goes on
  write_known(work);
  if (work.next == work.batch.calls.size()) server_.loop.defer(*this);
}

/// The answers that are known and in their turn.
void RedisConnection::write_known(RedisWork& work) {
  for (; work.next < work.batch.calls.size() && work.batch.calls[work.next].done; ++work.next) {
    stream_->out().append(work.batch.calls[work.next].text.view());
  }
}

void RedisConnection::fail_rest(RedisWork& work, std::string_view text) {
  for (RedisCall& call : work.batch.calls) {
    if (call.done) continue;
    call.done = true;
    append_resp_error(call.text, text);
  }
}

/// Keeps what begins at `at`.
void RedisConnection::keep(std::span<char> data, std::size_t at, bool borrowed) {
  if (borrowed) return in_.append({data.data() + at, data.size() - at});
  in_.drop_front(at);
  if (in_.empty()) in_ = {};
}

/// After everything that could be answered was answered.
void RedisConnection::settle() {
  if (bad_ || commands_.ends()) return linger();
  if (blocked_) {
    stream_->pause();
    return move_to(server_.blocked);
  }
  if (ended_ || (server_.draining && in_.empty())) return close_when_sent();
  if (!in_.empty()) {
    // Not anew with each byte.
    if (list_ != &server_.arriving) move_to(server_.arriving);
    return;
  }
  move_to(asked_ ? server_.idle : server_.fresh);
}

/// The last of a batch was answered after the service's call, or what waited to be sent has gone.
void RedisConnection::go_on() {
  if (stream_ == nullptr || blocked_ || closed_at_sent_ || list_ == &server_.lingering) return;
  if (work_ != nullptr) {
    if (work_->next < work_->batch.calls.size()) return;
    work_->connection = nullptr;
    work_ = nullptr;
  }
  stream_->resume();
  consume({in_.data(), in_.size()}, false);
  if (stream_ != nullptr) stream_->flush();
}

bool RedisConnection::room() {
  if (stream_->waiting() <= server_.options.max_waiting) return true;
  stream_->flush();
  return stream_->waiting() <= server_.options.max_waiting;
}

void RedisConnection::on_sent() {
  if (closed_at_sent_) return close();
  if (std::exchange(blocked_, false)) go_on();
}

void RedisConnection::on_end(int error) {
  ended_ = true;
  if (error != 0 || list_ == &server_.lingering) return close();
  // What was asked is still answered, as the other side may have closed its half only.
  if (work_ == nullptr && !blocked_ && !closed_at_sent_) close_when_sent();
}

void RedisConnection::on_deadline() {
  if (list_ != &server_.waiting) {
    if (list_ != &server_.lingering) ++server_.counters.timed_out;
    return close();
  }
  ++server_.counters.unanswered;
  fail_rest(*work_, "ERR deadline: no answer in time; it may have been counted");
  write_known(*work_);
  go_on();
}

bool RedisConnection::drain() {
  if (unread()) return false;
  close_when_sent();
  return true;
}

void RedisConnection::close_when_sent() {
  stream_->flush();
  if (stream_->waiting() == 0) return close();
  closed_at_sent_ = true;
  stream_->pause();
  move_to(server_.blocked);
}

void RedisConnection::linger() {
  in_ = {};
  if (ended_) return close_when_sent();
  stream_->end();
  stream_->resume();
  move_to(server_.lingering);
}

}  // namespace weir::node
