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

// f(i) for i in [0, count), in at most ctx.num_threads parts that may run at once.
template <class F>
void parallel_for(const ExecContext& ctx, int64_t count, const F& f) {
  const int64_t parts = count < ctx.num_threads ? count : ctx.num_threads;
  if (parts <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  const auto run = [&](int64_t part) {
    const int64_t end = (part + 1) * count / parts;
    for (int64_t i = part * count / parts; i < end; ++i) f(i);
  };
  using Run = decltype(run);
  ctx.parallel(
      ctx.host, parts, [](void* arg, int64_t part) { (*static_cast<const Run*>(arg))(part); },
      const_cast<void*>(static_cast<const void*>(&run)));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace loraaccel
