#pragma once

#include <uv.h>

namespace weir::node {

/// A libuv handle that its owner closes; the memory goes when libuv is done with it.
template <typename Handle>
class UvHandle {
 public:
  UvHandle() : handle_(new Handle{}) {}
  ~UvHandle() {
    uv_close(reinterpret_cast<uv_handle_t*>(handle_),
             [](uv_handle_t* closed) { delete reinterpret_cast<Handle*>(closed); });
  }
  UvHandle(const UvHandle&) = delete;
  UvHandle& operator=(const UvHandle&) = delete;
  Handle* get() { return handle_; }

 private:
  Handle* handle_;
};

}  // namespace weir::node
