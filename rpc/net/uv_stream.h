#pragma once

#include <kj/async-io.h>
#include <kj/io.h>
#include <uv.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <weir/rpc/net/address.h>
#include <weir/rpc/net/event_loop.h>

namespace weir::rpc {

class TlsSession;

/// A connected socket as a KJ stream on an EventLoop. No buffer is ever lent to libuv or the kernel
/// beyond a call, so any promise may be dropped at any time.
///
/// Reads go through a 64 KiB buffer: into the reader's memory, or the reader looks at what is there
/// (input(), not mixed with tryRead() inside of a message). The socket is read once each time it
/// has something, and not again to find it empty. Writes are gathered and sent at the end of the
/// loop's turn; while more than kWriteHigh bytes wait, the promise of a write stays unresolved
/// (back-pressure), so a writer that honours it buffers at most kWriteHigh and one write. Errors
/// reject promises with kj::Exception, type DISCONNECTED if the connection is gone. One read and
/// one write at a time; send() may come between.
///
/// With TLS all of that holds for the plain bytes. What is written in one turn is encrypted when it
/// is sent, so that small writes share a record. Reading drives the handshake. An end without the
/// other side's word is an error.
class UvStream final : public kj::AsyncIoStream, private Flushable {
 public:
  static constexpr std::size_t kReadBuffer = 64u << 10;
  static constexpr std::size_t kWriteHigh = 256u << 10;

  /// Takes a non-blocking socket. Throws if libuv refuses it.
  UvStream(EventLoop& loop, kj::AutoCloseFd fd);
  ~UvStream() noexcept(false);

  /// Speaks TLS from now on: before anything was read or written.
  void start_tls(std::unique_ptr<TlsSession> session);
  /// Resolves once the TLS handshake is done, or rejects with what was wrong. Before anything is
  /// read.
  kj::Promise<void> secured();
  /// Null without TLS.
  const TlsSession* tls() const;
  /// Why TLS failed; empty if it did not, or there is none.
  std::string tls_failure() const;

  kj::Promise<size_t> tryRead(void* buffer, size_t min, size_t max) override;
  kj::Promise<void> write(const void* buffer, size_t size) override;
  kj::Promise<void> write(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces) override;
  kj::Promise<void> whenWriteDisconnected() override { return kj::NEVER_DONE; }
  /// What is buffered still goes out before the end.
  void shutdownWrite() override;
  void abortRead() override;
  void getsockopt(int level, int option, void* value, kj::uint* length) override;
  void setsockopt(int level, int option, const void* value, kj::uint length) override;
  kj::Maybe<int> getFd() const override { return fd_.get(); }

  /// What has arrived and is not taken yet, from a multiple of 8 bytes in memory on. While it is
  /// taken in multiples of 8 bytes, all of it stays where it is until the next read.
  kj::ArrayPtr<const kj::byte> input();
  /// Takes the first `bytes` of input(), or all of it.
  void take_input(size_t bytes) { in_begin_ += std::min(bytes, in_end_ - in_begin_); }
  /// Resolves with true once input() is longer than now, with false if it will not be: that is the
  /// end. input() must be shorter than kReadBuffer.
  kj::Promise<bool> more_input();

  /// Like write(), for a writer that asks before whether there is room (buffered()); an error shows
  /// in the next read or write.
  void send(kj::ArrayPtr<const kj::ArrayPtr<const kj::byte>> pieces);
  /// Resolves when less than kWriteHigh bytes wait to be sent.
  kj::Promise<void> when_drained();
  /// Resolves when the socket takes output, or has failed.
  kj::Promise<void> when_writable();
  std::size_t buffered() const { return out_.size() - sent_ + (tls_ ? unsealed() : 0); }
  /// When bytes last arrived, on the loop's clock; at first, when the stream was made.
  kj::TimePoint last_received() const { return last_received_; }
  /// Whether something waits in the socket to be read. A system call.
  bool unread() const;
  /// Whether the other side has said anything: what was read, or waits to be.
  bool heard() const { return read_any_ || unread(); }

 private:
  using Fulfiller = kj::Maybe<kj::Own<kj::PromiseFulfiller<void>>>;

  struct Tls;

  ssize_t receive(kj::byte* to, size_t size);
  ssize_t receive_raw(kj::byte* to, size_t size);
  ssize_t receive_tls(kj::byte* to, size_t size);
  kj::Exception read_error(ssize_t result) const;
  std::size_t unsealed() const;
  void seal();
  void take_sealed();
  bool make_room();
  kj::Promise<size_t> read_more(kj::byte* to, size_t min, size_t max, size_t done);
  kj::Promise<void> when_readable();
  void append(kj::ArrayPtr<const kj::byte> bytes);
  void after_append();
  void flush() noexcept override;
  void send_out();
  void wake_drained();
  void fail_writes(int error);
  void arm(int events);
  void on_poll(int status, int events);
  static void wake(Fulfiller& waiter);

  EventLoop& loop_;
  kj::AutoCloseFd fd_;
  uv_poll_t* poll_;  // freed by libuv's close callback, after this object
  int armed_ = 0;
  bool failed_ = false;  // the socket reported an error: libuv no longer polls it
  int write_error_ = 0;
  bool dirty_ = false;
  bool shutdown_wanted_ = false;
  Fulfiller readable_;
  Fulfiller writable_;
  std::vector<kj::Own<kj::PromiseFulfiller<void>>> drained_;
  bool emptied_ = false;  // the last read took all that the socket had
  bool read_any_ = false;
  kj::TimePoint last_received_;
  kj::Array<kj::byte> in_;
  size_t in_begin_ = 0, in_end_ = 0;
  std::vector<kj::byte> out_;
  size_t sent_ = 0;           // bytes of out_ that went out
  std::unique_ptr<Tls> tls_;  // null: none
};

/// Connects, or rejects: refused, unreachable, or `timeout` passed.
kj::Promise<kj::Own<UvStream>> connect(EventLoop& loop, const Address& address,
                                       kj::Duration timeout);

/// The exception of a failed system call.
kj::Exception system_error(const char* call, int error);

}  // namespace weir::rpc
