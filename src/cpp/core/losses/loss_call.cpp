#include "losses/loss_call.h"

#include <algorithm>
#include <cstring>

#include "half.h"
#include "losses/loss_kernels.h"
#include "scratch.h"

namespace loraaccel {
namespace {

// With fewer elements than this, waking threads costs more than they save.
constexpr int64_t kSerial = 4 * kLossPiece;

const void* element(const TensorView& v, int64_t index) {
  return static_cast<const char*>(v.data) + index * static_cast<int64_t>(dtype_size_bytes(v.dtype));
}

void widen(DType dtype, const void* data, int64_t from, int64_t count, float* out) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = static_cast<const T*>(data) + from;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(to_float(p[i]));
  });
}

// Elements [begin, begin + count) of sample b: where they lie, or one number, or written out in `memory`.
LossNumbers numbers_of(const BroadcastView& v, int64_t b, int64_t begin, int64_t count,
                       float* memory) {
  if (!v.defined()) return {};
  const int64_t base = b * v.sample_stride;
  const int64_t end = begin + count;
  const auto number = [&](int64_t i) {
    return static_cast<float>(read_number(v.dtype, v.data, base + i / v.inner % v.period));
  };
  if (v.period == 1 || begin / v.inner == (end - 1) / v.inner)
    return {nullptr, v.dtype, number(begin)};
  if (v.inner > 1) {
    for (int64_t i = begin; i < end;) {  // runs of one number
      const int64_t run = std::min((i / v.inner + 1) * v.inner, end);
      const float value = number(i);
      for (; i < run; ++i) memory[i - begin] = value;
    }
    return {memory, DType::kFloat32, 0};
  }
  const int64_t at = begin % v.period;
  if (at + count <= v.period) {
    const auto size = static_cast<int64_t>(dtype_size_bytes(v.dtype));
    return {static_cast<const char*>(v.data) + (base + at) * size, v.dtype, 0};
  }
  const int64_t tail = v.period - at;
  widen(v.dtype, v.data, base + at, tail, memory);
  widen(v.dtype, v.data, base, std::min(at, count - tail), memory + tail);
  // What is there repeats itself.
  for (int64_t filled = v.period; filled < count;) {
    const int64_t more = std::min(filled, count - filled);
    std::memcpy(memory + filled, memory, static_cast<size_t>(more) * sizeof(float));
    filled += more;
  }
  return {memory, DType::kFloat32, 0};
}

int64_t count_of(DType dtype, const void* data, int64_t from, int64_t count, double value) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = static_cast<const T*>(data) + from;
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += to_float(p[i]) == value ? 1 : 0;
    return found;
  });
}

double sum_of(DType dtype, const void* data, int64_t from, int64_t count) {
  return visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = static_cast<const T*>(data) + from;
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += to_float(p[i]);
    return sum;
  });
}

// What the mean of each sample divides by.
double kept_elements(const LossCall& call, int64_t b) {
  const int64_t size = call.x.cols();
  if (call.is_bce()) {
    return static_cast<double>(
        size - count_of(call.target.dtype, call.target.data, b * size, size, call.ignore_index));
  }
  const BroadcastView& m = call.weight;
  const int64_t cycle = m.period * m.inner;
  if (!m.defined()) return static_cast<double>(size);
  double kept = 0;
  if (size % cycle != 0) {
    for (int64_t i = 0; i < size; ++i) kept += broadcast_at(m, b, i);
    return kept;
  }
  const int64_t times = size / m.period;
  return sum_of(m.dtype, m.data, b * m.sample_stride, m.period) * static_cast<double>(times);
}

struct SampleScales {
  double mean;  // of the sum of the sample's losses: to the mean of the sample
  double loss, grad;
};

// Fills one entry for each sample. A binary cross entropy is one sample to a mean, however many its operands have.
void make_scales(const ExecContext& ctx, const LossCall& call, SampleScales* scales) {
  const int64_t samples = call.x.rows();
  const auto size = static_cast<double>(call.x.cols());
  const auto count = static_cast<double>(samples);
  const bool counts = call.mean_of_kept && (call.is_bce() ? call.ignore_index == call.ignore_index
                                                          : call.weight.defined());
  if (counts) {
    parallel_for(ctx, samples, [&](int64_t b) { scales[b].mean = kept_elements(call, b); });
  }
  double all = 0;
  for (int64_t b = 0; b < samples; ++b) {
    if (!counts) scales[b].mean = size;
    all += scales[b].mean;
  }
  const auto upstream = [&](int64_t i) {
    return call.upstream.defined() ? read_number(call.upstream.dtype, call.upstream.data, i) : 1.0;
  };
  for (int64_t b = 0; b < samples; ++b) {
    SampleScales& s = scales[b];
    const double factor =
        call.factors.defined() ? read_number(call.factors.dtype, call.factors.data, b) : 1;
    const double divisor = call.is_bce() ? all / count : s.mean;
    s.mean = divisor == 0 && counts ? 0 : factor / divisor;
    s.loss = factor;
    switch (call.reduction) {
      case LossReduction::kNone:
        s.grad = factor;
        break;
      case LossReduction::kMean:
        s.grad = upstream(0) * s.mean / count;
        break;
      case LossReduction::kSum:
        s.grad = upstream(0) * factor;
        break;
      case LossReduction::kSamples:
        s.grad = upstream(b) * s.mean;
        break;
    }
  }
}

// From the sums of the samples' losses to the loss and the losses of the samples.
void reduce(const LossCall& call, const SampleScales* scales, const double* sums) {
  const int64_t samples = call.x.rows();
  double total = 0;
  for (int64_t b = 0; b < samples; ++b) {
    const double mean = sums[b] * scales[b].mean;
    total += call.reduction == LossReduction::kSum ? sums[b] * scales[b].loss : mean;
    if (call.per_sample.defined())
      write_number(call.per_sample.dtype, call.per_sample.data, b, mean);
    if (call.loss.defined() && call.reduction == LossReduction::kSamples)
      write_number(call.loss.dtype, call.loss.data, b, mean);
  }
  if (!call.loss.defined()) return;
  if (call.reduction == LossReduction::kMean) total /= static_cast<double>(samples);
  if (call.reduction == LossReduction::kMean || call.reduction == LossReduction::kSum)
    write_number(call.loss.dtype, call.loss.data, 0, total);
}

}  // namespace

double loss_piece_simd(const LossSimd* simd, const LossCall& call, const LossPiece& piece) {
  float weights[kLossPiece];
  float pos_weights[kLossPiece];
  const int64_t first = piece.sample * call.x.cols() + piece.begin;
  LossRun run;
  run.kind = call.kind;
  run.count = piece.count;
  run.x = {element(call.x, first), call.x.dtype, 0};
  run.target = {element(call.target, first), call.target.dtype, 0};
  run.weight = numbers_of(call.weight, piece.sample, piece.begin, piece.count, weights);
  run.pos_weight = numbers_of(call.pos_weight, piece.sample, piece.begin, piece.count, pos_weights);
  const bool each = call.reduction == LossReduction::kNone;
  if (each && call.upstream.defined())
    run.upstream = {element(call.upstream, first), call.upstream.dtype, 0};
  run.huber_c =
      call.huber_c.defined()
          ? static_cast<float>(read_number(call.huber_c.dtype, call.huber_c.data, piece.sample))
          : 0;
  run.smoothing = static_cast<float>(call.smoothing);
  run.focal_gamma = static_cast<float>(call.focal_gamma);
  run.ignore_index = static_cast<float>(call.ignore_index);
  run.loss_scale = static_cast<float>(piece.loss_scale);
  run.grad_scale = static_cast<float>(piece.grad_scale);
  run.sum = piece.sum;
  run.loss_dtype = call.loss.dtype;
  run.grad_dtype = call.grad.dtype;
  run.loss = each && call.loss.defined() ? const_cast<void*>(element(call.loss, first)) : nullptr;
  run.grad = call.grad.defined() ? const_cast<void*>(element(call.grad, first)) : nullptr;
  return simd->run(run);
}

Status run_loss(const ExecContext& ctx, const char* op, const LossCall& call) {
  DType widest = DType::kFloat32;
  for (const DType dtype :
       {call.x.dtype, call.target.dtype, call.weight.dtype, call.pos_weight.dtype,
        call.upstream.dtype, call.loss.dtype, call.grad.dtype, call.huber_c.dtype}) {
    if (dtype == DType::kFloat64) widest = dtype;
  }
  const LossSimd* table = nullptr;
  LORAACCEL_RETURN_IF_ERROR(choose_loss_table(op, ctx, widest, &table));
  const LossPieceFunction run_piece = table == nullptr ? loss_piece_ref : loss_piece_simd;

  const int64_t samples = call.x.rows();
  const int64_t size = call.x.cols();
  const int64_t pieces = ceil_div(size, kLossPiece);
  const bool sum =
      call.per_sample.defined() || (call.loss.defined() && call.reduction != LossReduction::kNone);
  Scratch<SampleScales> scales;
  Scratch<double> sums;  // of the pieces, then of the samples
  if (!scales.allocate(ctx, samples) || !sums.allocate(ctx, samples * (pieces + 1)))
    return out_of_memory(op);
  ExecContext own = ctx;
  if (samples * size <= kSerial) own.num_threads = 1;
  make_scales(own, call, scales.data());
  parallel_for(own, samples * pieces, [&](int64_t i) {
    const int64_t b = i / pieces;
    const int64_t begin = i % pieces * kLossPiece;
    const int64_t count = size - begin < kLossPiece ? size - begin : kLossPiece;
    const SampleScales& s = scales.data()[b];
    sums.data()[i] = run_piece(table, call, {b, begin, count, s.loss, s.grad, sum});
  });
  if (!sum) return Status();
  double* of_samples = sums.data() + samples * pieces;
  for (int64_t b = 0; b < samples; ++b) {
    of_samples[b] = 0;
    for (int64_t i = 0; i < pieces; ++i) of_samples[b] += sums.data()[b * pieces + i];
  }
  reduce(call, scales.data(), of_samples);
  return Status();
}

}  // namespace loraaccel
