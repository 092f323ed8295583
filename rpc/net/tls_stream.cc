#include <weir/rpc/net/tls_stream.h>

#include <uv.h>

#include <cerrno>
#include <utility>

namespace weir::rpc {
namespace {

class TlsStream final : public ByteStream, private ByteStream::User, private Deferred {
 public:
  TlsStream(StreamLoop& loop, std::unique_ptr<ByteStream> below,
            std::unique_ptr<TlsSession> session, std::uint64_t handshake_ms)
      : loop_(loop),
        below_(std::move(below)),
        session_(std::move(session)),
        handshake_ms_(handshake_ms) {}
  ~TlsStream() override;

  void start(ByteStream::User& user) override;
  Output& out() override {
    if (plain_.capacity() == 0) plain_ = loop_.take_buffer();
    if (!reading_) loop_.defer(*this);
    return plain_;
  }
  void flush() override {
    seal();
    below_->flush();
    if (session_->state() == TlsSession::State::failed && !told_) loop_.defer(*this);
  }
  std::size_t waiting() const override { return plain_.size() + below_->waiting(); }
  void pause() override {
    paused_ = true;
    below_->pause();
  }
  void resume() override {
    paused_ = false;
    if (told_) return;
    below_->resume();
    loop_.defer(*this);  // for what was read and not given yet
  }
  void end() override {
    end_wanted_ = true;
    flush();
  }
  std::vector<std::string> peer_names() const override {
    return session_->secured() ? session_->peer_names() : std::vector<std::string>();
  }
  bool unread() const override { return below_->unread(); }
  std::uint64_t last_activity() const override { return below_->last_activity(); }

 private:
  void on_data(std::span<char> bytes) override;
  void on_end(int error) override;
  void on_sent() override;
  void run_deferred() noexcept override;
  void deliver();
  void seal();
  void tell_end(int error);
  void stop_timer();

  StreamLoop& loop_;
  std::unique_ptr<ByteStream> below_;
  std::unique_ptr<TlsSession> session_;
  const std::uint64_t handshake_ms_;
  ByteStream::User* user_ = nullptr;
  uv_timer_t* timer_ = nullptr;  // while the handshake lasts
  bool* gone_ = nullptr;      // set while a callback runs: tells it that the stream was destroyed
  Output plain_;              // what the user has written and is not encrypted yet
  bool ended_below_ = false;  // nothing more comes from the socket
  bool reading_ = false;      // the user's on_data runs
  bool paused_ = false;
  bool told_ = false;    // on_end was called
  bool waited_ = false;  // output waited for the handshake
  bool end_wanted_ = false;
  bool end_sent_ = false;
};

TlsStream::~TlsStream() {
  if (gone_ != nullptr) *gone_ = true;
  stop_timer();
  loop_.forget(*this);
  // As if it were ended: below there is a last try for what is there to be said.
  end_wanted_ = true;
  seal();
  if (plain_.capacity() != 0) loop_.give_buffer(std::move(plain_));
}

void TlsStream::start(ByteStream::User& user) {
  user_ = &user;
  timer_ = new uv_timer_t{};
  timer_->data = this;
  uv_timer_init(loop_.uv(), timer_);
  uv_timer_start(
      timer_,
      [](uv_timer_t* timer) {
        auto& self = *static_cast<TlsStream*>(timer->data);
        self.session_->fail("no handshake in time");
        self.stop_timer();
        self.tell_end(EPROTO);
      },
      handshake_ms_, 0);
  below_->start(*this);
  session_->start(below_->out());
  below_->flush();
}

void TlsStream::stop_timer() {
  if (timer_ == nullptr) return;
  uv_close(reinterpret_cast<uv_handle_t*>(std::exchange(timer_, nullptr)),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

void TlsStream::on_data(std::span<char> bytes) {
  if (told_) return;
  session_->receive(bytes);
  deliver();
}

/// Gives the user what can be decrypted, as far as he wants it.
void TlsStream::deliver() {
  bool gone = false;
  bool* const outer = std::exchange(gone_, &gone);
  const std::span<char> buffer = loop_.read_buffer();
  const bool was_secured = session_->secured();
  while (!told_ && !paused_) {
    const std::size_t count = session_->read(buffer, below_->out());
    if (count == 0) break;
    reading_ = true;
    user_->on_data(buffer.first(count));
    if (gone) {
      if (outer != nullptr) *outer = true;
      return;
    }
    reading_ = false;
    seal();
  }
  if (session_->secured()) stop_timer();
  if (!was_secured && session_->secured()) seal();
  if (!told_ && !paused_) {
    if (session_->state() == TlsSession::State::failed) {
      tell_end(EPROTO);
    } else if (session_->state() == TlsSession::State::ended) {
      tell_end(0);
    } else if (ended_below_) {
      session_->end();
      tell_end(ECONNRESET);
    }
  }
  if (gone) {
    if (outer != nullptr) *outer = true;
    return;
  }
  gone_ = outer;
  below_->flush();
  if (session_->secured() && std::exchange(waited_, false) && waiting() == 0 && !told_) {
    user_->on_sent();
  }
}

void TlsStream::on_end(int error) {
  if (told_) return;
  if (error != 0) {
    session_->end();
    return tell_end(error);
  }
  ended_below_ = true;
  deliver();
}

void TlsStream::on_sent() {
  if (!told_ && plain_.empty()) user_->on_sent();
}

void TlsStream::run_deferred() noexcept {
  if (told_) return flush();
  if (user_ == nullptr) return;
  flush();
  // It may have failed in that, or have what a paused reader was not given.
  if (!paused_) deliver();
}

void TlsStream::seal() {
  if (session_->can_write()) {
    if (!plain_.empty()) session_->write(plain_.view(), below_->out());
    if (end_wanted_ && !std::exchange(end_sent_, true)) {
      session_->close(below_->out());
      if (plain_.capacity() != 0) loop_.give_buffer(std::exchange(plain_, Output()));
      return below_->end();
    }
  } else if (!session_->secured() && session_->state() != TlsSession::State::failed) {
    waited_ = waited_ || !plain_.empty();
    return;
  }
  if (plain_.capacity() != 0 && !reading_) {
    loop_.give_buffer(std::exchange(plain_, Output()));
  } else {
    plain_.clear();
  }
}

void TlsStream::tell_end(int error) {
  if (std::exchange(told_, true)) return;
  below_->flush();  // an alert
  below_->pause();
  user_->on_end(error);
}

}  // namespace

std::unique_ptr<ByteStream> make_tls_stream(StreamLoop& loop, std::unique_ptr<ByteStream> below,
                                            std::unique_ptr<TlsSession> session,
                                            std::uint64_t handshake_ms) {
  if (below == nullptr) return nullptr;
  return std::make_unique<TlsStream>(loop, std::move(below), std::move(session), handshake_ms);
}

}  // namespace weir::rpc
