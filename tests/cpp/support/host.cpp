#include "support/host.h"

#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace loraaccel::test {
namespace {

constexpr size_t kHeaderBytes = 64;  // the size of the block, in front of it
constexpr size_t kGuardBytes = 64;   // behind it
constexpr int kPoison = 0xFF;        // NaN in every type

void run_backwards(void*, int64_t count, ParallelBody body, void* arg) {
  for (int64_t i = count; i-- > 0;) body(arg, i);
}

template <class T>
double read(const TensorView& v, int64_t i, int64_t j) {
  return static_cast<double>(
      to_float(static_cast<const T*>(v.data)[i * v.stride[0] + j * v.stride[1]]));
}

// Sums as a BLAS keeps them: in float32, or float64 for float64.
template <class T>
void multiply(const GemmArgs& args) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  for (int64_t i = 0; i < args.c.rows(); ++i) {
    for (int64_t j = 0; j < args.c.cols(); ++j) {
      Sum sum = 0;
      for (int64_t k = 0; k < args.a.cols(); ++k)
        sum += static_cast<Sum>(read<T>(args.a, i, k)) * static_cast<Sum>(read<T>(args.b, k, j));
      sum *= static_cast<Sum>(args.alpha);
      if (args.bias.defined()) {
        sum += static_cast<Sum>(read<T>(args.bias, j, 0));
      } else if (args.beta != 0) {
        sum += static_cast<Sum>(args.beta) * static_cast<Sum>(read<T>(args.c, i, j));
      }
      from_float(sum, static_cast<T*>(args.c.data) + i * args.c.stride[0] + j * args.c.stride[1]);
    }
  }
}

}  // namespace

ExecContext TestHost::context(int num_threads) {
  ExecContext ctx;
  ctx.host = this;
  ctx.num_threads = num_threads;
  ctx.parallel = run_backwards;
  ctx.allocate = allocate;
  ctx.deallocate = deallocate;
  ctx.kernel_ran = &kernel_ran;
  return ctx;
}

ExecContext TestHost::lending_context(int num_threads) {
  ExecContext ctx = context(num_threads);
  ctx.gemm = gemm;
  return ctx;
}

void* TestHost::allocate(void* host, size_t bytes) {
  auto* self = static_cast<TestHost*>(host);
  if (self->allocations_++ == self->fail_allocation) return nullptr;
  const size_t total = (kHeaderBytes + bytes + kGuardBytes + 63) / 64 * 64;
  auto* block = static_cast<char*>(std::aligned_alloc(64, total));
  if (block == nullptr) return nullptr;
  std::memset(block, kPoison, total);
  std::memcpy(block, &bytes, sizeof bytes);
  self->live_bytes_ += static_cast<int64_t>(bytes);
  return block + kHeaderBytes;
}

void TestHost::deallocate(void* host, void* pointer, size_t bytes) {
  auto* self = static_cast<TestHost*>(host);
  auto* block = static_cast<char*>(pointer) - kHeaderBytes;
  size_t allocated = 0;
  std::memcpy(&allocated, block, sizeof allocated);
  if (allocated != bytes) self->intact_ = false;
  for (size_t i = 0; i < kGuardBytes; ++i) {
    if (static_cast<unsigned char>(block[kHeaderBytes + allocated + i]) != kPoison) {
      self->intact_ = false;
    }
  }
  self->live_bytes_ -= static_cast<int64_t>(bytes);
  std::free(block);
}

Status TestHost::gemm(void* host, const GemmArgs& args) {
  auto* self = static_cast<TestHost*>(host);
  if (self->gemms_++ == self->fail_gemm) {
    return Status(StatusCode::kLenderFailed, "the test's GEMM failed as it was told to");
  }
  visit_dtype(args.c.dtype, [&](auto tag) { multiply<typename decltype(tag)::type>(args); });
  return Status();
}

}  // namespace loraaccel::test
