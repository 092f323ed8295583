#pragma once

#include <nghttp2/nghttp2.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weir::node::test {

/// Long enough for the slowest machine: reached only if a test fails.
inline constexpr auto kGrpcPatience = std::chrono::seconds(20);

/// `message` behind its prefix.
inline std::string framed(std::string_view message, char flag = 0) {
  std::string out(1, flag);
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(message.size() >> shift);
  return out.append(message);
}

/// A call as its client sees it.
struct GrpcAnswer {
  std::map<std::string, std::string> fields;  ///< of the head and of the trailer
  std::string data;
  bool closed = false;
  std::uint32_t reset = 0;  ///< the stream's error

  std::string field(const std::string& name) const {
    const auto at = fields.find(name);
    return at == fields.end() ? "(absent)" : at->second;
  }
  /// "OK", "3 the text", "HTTP 405", "reset 7"
  std::string status() const {
    if (reset != 0) return "reset " + std::to_string(reset);
    if (field(":status") != "200") return "HTTP " + field(":status");
    if (field("grpc-status") == "0") return "OK";
    return field("grpc-status") + " " + field("grpc-message");
  }
  /// The messages that have arrived.
  std::vector<std::string> messages() const {
    std::vector<std::string> out;
    std::string_view left = data;
    while (left.size() >= 5) {
      std::size_t size = 0;
      for (int i = 1; i < 5; ++i) size = size << 8 | static_cast<unsigned char>(left[i]);
      out.emplace_back(left.substr(5, size));
      left.remove_prefix(std::min(left.size(), 5 + size));
    }
    return out;
  }
};

/// The client's side of HTTP/2, without I/O.
class GrpcSession {
 public:
  using Fields = std::vector<std::pair<std::string, std::string>>;

  GrpcSession() {
    nghttp2_session_callbacks* callbacks = nullptr;
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_header_callback(
        callbacks, [](nghttp2_session*, const nghttp2_frame* frame, const std::uint8_t* name,
                      std::size_t name_size, const std::uint8_t* value, std::size_t value_size,
                      std::uint8_t, void* user) {
          of(user).answers[frame->hd.stream_id].fields[text(name, name_size)] =
              text(value, value_size);
          return 0;
        });
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(
        callbacks, [](nghttp2_session*, std::uint8_t, std::int32_t stream,
                      const std::uint8_t* bytes, std::size_t size, void* user) {
          of(user).answers[stream].data += text(bytes, size);
          return 0;
        });
    nghttp2_session_callbacks_set_on_stream_close_callback(
        callbacks, [](nghttp2_session*, std::int32_t stream, std::uint32_t error, void* user) {
          of(user).answers[stream].closed = true;
          of(user).answers[stream].reset = error;
          return 0;
        });
    nghttp2_session_callbacks_set_on_frame_recv_callback(
        callbacks, [](nghttp2_session*, const nghttp2_frame* frame, void* user) {
          if (frame->hd.type != NGHTTP2_GOAWAY) return 0;
          of(user).goaways.push_back({frame->goaway.last_stream_id, frame->goaway.error_code});
          return 0;
        });
    nghttp2_option* option = nullptr;
    nghttp2_option_new(&option);
    // A test may go beyond what it is told.
    nghttp2_option_set_peer_max_concurrent_streams(option, 1u << 20);
    nghttp2_session_client_new2(&session_, callbacks, this, option);
    nghttp2_option_del(option);
    nghttp2_session_callbacks_del(callbacks);
  }
  ~GrpcSession() { nghttp2_session_del(session_); }
  GrpcSession(const GrpcSession&) = delete;
  GrpcSession& operator=(const GrpcSession&) = delete;

  /// The client's first words.
  void greet(std::vector<nghttp2_settings_entry> settings = {}) {
    nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
  }
  static Fields head(const std::string& path, Fields more = {}) {
    Fields out = {{":method", "POST"}, {":scheme", "http"},
                  {":path", path},     {":authority", "weir"},
                  {"te", "trailers"},  {"content-type", "application/grpc"}};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  /// Begins a call; `body` goes with it, and ends it unless `open`. Its stream.
  std::int32_t call(const Fields& fields, std::string body, bool open = false) {
    std::vector<nghttp2_nv> nvs;
    for (const auto& [name, value] : fields) {
      nvs.push_back({bytes(name), bytes(value), name.size(), value.size(), NGHTTP2_NV_FLAG_NONE});
    }
    nghttp2_data_provider provider{};
    provider.read_callback = read;
    const std::int32_t stream =
        nghttp2_submit_request(session_, nullptr, nvs.data(), nvs.size(), &provider, nullptr);
    sending_[stream] = {std::move(body), !open};
    return stream;
  }
  void more(std::int32_t stream, std::string_view body, bool open = false) {
    sending_[stream].first += body;
    sending_[stream].second = !open;
    nghttp2_session_resume_data(session_, stream);
  }
  void reset(std::int32_t stream) {
    nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, stream, NGHTTP2_CANCEL);
  }

  std::string output() {
    std::string out;
    const std::uint8_t* at = nullptr;
    for (ssize_t size; (size = nghttp2_session_mem_send(session_, &at)) > 0;) {
      out += text(at, static_cast<std::size_t>(size));
    }
    return out;
  }
  void input(std::string_view in) {
    nghttp2_session_mem_recv(session_, reinterpret_cast<const std::uint8_t*>(in.data()), in.size());
  }
  nghttp2_session* h2() { return session_; }

  std::map<std::int32_t, GrpcAnswer> answers;
  std::vector<std::pair<std::int32_t, std::uint32_t>> goaways;  ///< last stream, error

 private:
  static GrpcSession& of(void* user) { return *static_cast<GrpcSession*>(user); }
  static std::string text(const std::uint8_t* at, std::size_t size) {
    return {reinterpret_cast<const char*>(at), size};
  }
  static std::uint8_t* bytes(const std::string& text) {
    return reinterpret_cast<std::uint8_t*>(const_cast<char*>(text.data()));  // NOLINT
  }
  static ssize_t read(nghttp2_session*, std::int32_t stream, std::uint8_t* to, std::size_t size,
                      std::uint32_t* flags, nghttp2_data_source*, void* user) {
    auto& [left, last] = of(user).sending_[stream];
    const std::size_t count = std::min(size, left.size());
    left.copy(reinterpret_cast<char*>(to), count);
    left.erase(0, count);
    if (left.empty() && last) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return count == 0 && !last ? static_cast<ssize_t>(NGHTTP2_ERR_DEFERRED)
                               : static_cast<ssize_t>(count);
  }

  nghttp2_session* session_ = nullptr;
  std::map<std::int32_t, std::pair<std::string, bool>> sending_;  // what is left, and if it is all
};

/// The same over a socket, driven in the same thread as the loop that serves the other end.
class GrpcClient : public GrpcSession {
 public:
  /// `turn` has the loop turn once. `fd` is connected and does not block; the client closes it.
  GrpcClient(const std::function<void()>& turn, int fd) : turn_(turn), fd_(fd) {}
  ~GrpcClient() { leave(); }

  void leave() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  /// Sends what there is, as far as the server takes it, and takes what has come.
  void exchange() {
    if (!mute) out_ += output();
    const ssize_t sent = ::send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent > 0) out_.erase(0, static_cast<std::size_t>(sent));
    char buffer[16 << 10];
    while (!gone && !deaf) {
      const ssize_t count = ::recv(fd_, buffer, sizeof buffer, 0);
      if (count < 0 && errno == EAGAIN) return;
      gone = count <= 0;
      if (count > 0) input({buffer, static_cast<std::size_t>(count)});
    }
  }
  /// These bytes as they are.
  void send_raw(std::string_view bytes) { out_ += output().append(bytes); }
  /// Until it is so; false if it never was.
  bool wait(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + kGrpcPatience;
    while (!condition()) {
      exchange();
      turn_();
      if (std::chrono::steady_clock::now() > until) return false;
    }
    return true;
  }
  /// The answer to that call, once it is over.
  GrpcAnswer& answer(std::int32_t stream) {
    if (!wait([&] { return answers[stream].closed || gone; })) answers[stream].reset = 99;
    return answers[stream];
  }
  bool ended() {
    return wait([&] { return gone; });
  }

  bool gone = false;  ///< the server has closed the connection
  bool deaf = false;  ///< it reads nothing
  bool mute = false;  ///< it says nothing

 private:
  const std::function<void()>& turn_;
  int fd_;
  std::string out_;
};

}  // namespace weir::node::test
