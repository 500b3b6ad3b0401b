// Working memory of one call, given back at the end of the scope.
#pragma once

#include "loraaccel/exec_context.h"

namespace loraaccel {

template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (pointer_ != nullptr) ctx_->deallocate(ctx_->host, pointer_, bytes_);
  }

  // False when the host has no memory left. At most once per object.
  bool allocate(const ExecContext& ctx, int64_t count) {
    ctx_ = &ctx;
    bytes_ = (count > 0 ? static_cast<size_t>(count) : 1) * sizeof(T);
    pointer_ = ctx.allocate(ctx.host, bytes_);
    return pointer_ != nullptr;
  }

  T* data() const noexcept { return static_cast<T*>(pointer_); }

 private:
  const ExecContext* ctx_ = nullptr;
  void* pointer_ = nullptr;
  size_t bytes_ = 0;
};

inline Status out_of_memory(const char* op) {
  return Status(StatusCode::kOutOfMemory, std::string(op) + ": the host gave no scratch memory");
}

// f(i) for i in [0, count) on the context's threads.
template <class F>
void parallel_for(const ExecContext& ctx, int64_t count, const F& f) {
  if (count == 1) {
    f(int64_t{0});
    return;
  }
  ctx.parallel(
      ctx.host, count, [](void* arg, int64_t i) { (*static_cast<const F*>(arg))(i); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace loraaccel
