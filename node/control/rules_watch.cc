#include <weir/node/control/rules_watch.h>

#include <filesystem>
#include <utility>

#include <weir/limits/yaml/read_file.h>

namespace weir::node {
namespace {

/// No file looks so: to be read at the next look.
constexpr internal::FileLook kUnread = {-1, -1, -1, -1, -1, -1};

/// Why nothing could be read. Empty: it was, whatever it held.
std::string unreadable(const LoadedRules& loaded) {
  if (!loaded.version.empty() || loaded.errors.empty()) return {};
  return loaded.errors[0].to_string();
}

}  // namespace

struct RulesWatch::Impl {
  struct Work {
    uv_work_t request{};
    Impl* owner = nullptr;
    std::string path;
    LoadedRules loaded;
  };

  std::string path;
  RulesWatchOptions options;
  Read read;
  uv_loop_t* loop;
  uv_fs_event_t events{};
  uv_timer_t debounce_timer{};
  uv_timer_t poll{};
  internal::FileLook seen;  // before it was read last; kUnread: it could not be
  std::string failed;       // why
  bool busy = false;        // reading
  bool again = false;       // and to be read once more
  bool closing = false;
  int open = 0;  // handles and reads that refer to this

  Impl(uv_loop_t* uv, std::string file, RulesWatchOptions given, Read told)
      : path(std::move(file)), options(given), read(std::move(told)), loop(uv) {
    seen = internal::look_at_file(path);
    uv_timer_init(loop, &debounce_timer);
    uv_timer_init(loop, &poll);
    uv_fs_event_init(loop, &events);
    open = 3;
    debounce_timer.data = poll.data = events.data = this;
    std::filesystem::path folder = std::filesystem::path(path).parent_path();
    // Where events cannot be had the poll does alone.
    uv_fs_event_start(
        &events, [](uv_fs_event_t* handle, const char*, int, int) { self(handle)->debounce(); },
        folder.empty() ? "." : folder.c_str(), 0);
    uv_timer_start(
        &poll, [](uv_timer_t* handle) { self(handle)->look(); }, options.poll_ms, options.poll_ms);
  }

  template <typename Handle>
  static Impl* self(Handle* handle) {
    return static_cast<Impl*>(handle->data);
  }

  void debounce() {
    uv_timer_start(
        &debounce_timer, [](uv_timer_t* handle) { self(handle)->look(); }, options.debounce_ms, 0);
  }

  void look() {
    if (internal::look_at_file(path) != seen) start_reading();
  }

  void start_reading() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    seen = internal::look_at_file(path);
    auto work = std::make_unique<Work>();
    work->owner = this;
    work->path = path;
    work->request.data = work.get();
    ++open;
    uv_queue_work(
        loop, &work.release()->request,
        [](uv_work_t* request) {
          auto* mine = static_cast<Work*>(request->data);
          mine->loaded = load_rules(mine->path);
        },
        [](uv_work_t* request, int) {
          std::unique_ptr<Work> mine(static_cast<Work*>(request->data));
          mine->owner->have_read(std::move(mine->loaded));
        });
  }

  void have_read(LoadedRules loaded) {
    busy = false;
    if (!closing) {
      // What could not be read (no descriptor is free, a disk stalls) may be readable soon, and
      // then looks as it does now. The same reason is told once.
      std::string why = unreadable(loaded);
      if (!why.empty()) seen = kUnread;
      const bool known = !why.empty() && why == failed;
      failed = std::move(why);
      if (!known) read(std::move(loaded));
      if (std::exchange(again, false)) start_reading();
    }
    let_go();
  }

  void close() {
    closing = true;
    auto gone = [](uv_handle_t* handle) { static_cast<Impl*>(handle->data)->let_go(); };
    uv_close(reinterpret_cast<uv_handle_t*>(&debounce_timer), gone);
    uv_close(reinterpret_cast<uv_handle_t*>(&poll), gone);
    uv_close(reinterpret_cast<uv_handle_t*>(&events), gone);
  }

  void let_go() {
    if (--open == 0) delete this;
  }
};

RulesWatch::RulesWatch(uv_loop_t* loop, std::string path, RulesWatchOptions options, Read read)
    : impl_(new Impl(loop, std::move(path), options, std::move(read))) {}

RulesWatch::~RulesWatch() {
  impl_->close();
}

void RulesWatch::reread() {
  impl_->failed.clear();  // whoever asks is told
  impl_->start_reading();
}

}  // namespace weir::node
