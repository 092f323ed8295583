#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <weir/rpc/net/output.h>

struct uv_loop_s;

namespace weir::rpc {

class StreamLoop;

/// Something with work to do at the end of the loop's turn.
class Deferred {
 public:
  virtual void run_deferred() noexcept = 0;

 protected:
  ~Deferred() = default;

 private:
  friend class StreamLoop;
  static constexpr std::size_t kNotQueued = ~std::size_t{0};
  std::size_t queued_at_ = kNotQueued;
};

/// What the streams of one libuv loop share: the read buffer, spare output buffers, and the end of
/// a turn. For the loop's thread only. Must outlive its streams; the loop must run once more after
/// it is destroyed, so that libuv closes its handle.
class StreamLoop {
 public:
  static constexpr std::size_t kReadBuffer = 64u << 10;

  explicit StreamLoop(uv_loop_s* loop);
  ~StreamLoop();
  StreamLoop(const StreamLoop&) = delete;
  StreamLoop& operator=(const StreamLoop&) = delete;

  uv_loop_s* uv() const { return loop_; }
  /// The loop's clock: milliseconds from some start, read once a turn.
  std::uint64_t now() const;

  /// Calls `deferred.run_deferred()` once, before the loop next sleeps. Does nothing if that is
  /// already to come. Who goes away before must call forget().
  void defer(Deferred& deferred);
  void forget(Deferred& deferred);

  /// Where a stream reads into. Its contents last until the next read of any stream.
  std::span<char> read_buffer() { return {read_.get(), kReadBuffer}; }

  /// An empty buffer with memory, and its return. The one returned last comes first: it is likely
  /// in the cache.
  Output take_buffer();
  void give_buffer(Output buffer);

 private:
  struct Handle;
  void run_deferred();

  uv_loop_s* loop_;
  Handle* handle_;  // freed by libuv's close callback, after this object
  std::unique_ptr<char[]> read_;
  std::vector<Output> spare_;
  std::vector<Deferred*> deferred_, running_;
};

/// A connection as bytes in and bytes out, on a StreamLoop: over TCP, or over something that stands
/// between. For the loop's thread only. Destroying it closes the connection at once; that is
/// allowed from within its callbacks.
class ByteStream {
 public:
  /// Whoever uses the stream. No callback comes from within a call to the stream.
  class User {
   public:
    /// Bytes arrived. They belong to the callee during the call, who may write over them. What is
    /// in out() afterwards goes out in one piece.
    virtual void on_data(std::span<char> bytes) = 0;
    /// The other side sends no more (error 0), or the connection failed (an errno). No on_data and,
    /// after a failure, no on_sent comes after it.
    virtual void on_end(int error) = 0;
    /// Everything that waited has been taken by the socket. Only called if something had to wait.
    virtual void on_sent() = 0;

   protected:
    ~User() = default;
  };

  virtual ~ByteStream() = default;

  /// Begins to read. Once; `user` must outlive the stream.
  virtual void start(User& user) = 0;

  /// What is appended here is sent: after on_data, or at the end of the turn, or by flush(). The
  /// reference stays valid until then; nothing before what is there may be changed or removed.
  virtual Output& out() = 0;
  /// Offers what is in out() to the socket now.
  virtual void flush() = 0;
  /// Bytes that the socket has not taken yet.
  virtual std::size_t waiting() const = 0;

  /// Reads no more until resume(): the other side is slowed down once the kernel's buffers are
  /// full. An end of the connection is noticed after resume() only.
  virtual void pause() = 0;
  virtual void resume() = 0;

  /// No more output will come: once everything is sent the other side is told so. Reading goes on.
  virtual void end() = 0;

  /// Names that TLS has verified the other side to have, once it has sent something; else none.
  virtual std::vector<std::string> peer_names() const { return {}; }

  /// Whether something waits in the socket to be read. A system call.
  virtual bool unread() const { return false; }

  /// When bytes last arrived or went out, by StreamLoop::now(); at first, when it was made.
  virtual std::uint64_t last_activity() const = 0;
};

/// A stream over a connected, non-blocking TCP socket, which it takes: closed with the stream, or
/// at once if this fails (null; only if the loop has no room for it). Sets TCP_NODELAY.
std::unique_ptr<ByteStream> make_tcp_stream(StreamLoop& loop, int fd);

}  // namespace weir::rpc
