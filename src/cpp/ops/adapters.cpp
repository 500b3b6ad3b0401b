#include "ops/adapters.h"

#include <algorithm>
#include <cstdint>

#include "loraaccel/pack.h"

namespace loraaccel::bridge {

namespace {

struct Key {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

Key key_of(const char* op, const Dropouts& dropouts) {
  bool drops = dropouts.output > 0;
  for (const double p : dropouts.input) drops = drops || p > 0;
  for (const double p : dropouts.rank) drops = drops || p > 0;
  if (!drops) return {};
  const OptionalTensor& seed = dropouts.seed;
  if (!seed.has_value() || !is_int64(*seed) || seed->numel() != 2 || !seed->is_contiguous() ||
      !seed->is_cpu()) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) +
             ": dropout without a seed, expected a dense int64 tensor of two "
             "numbers on the CPU (seed, offset)");
  }
  const auto* numbers = static_cast<const int64_t*>(seed->data_ptr());
  return {static_cast<uint64_t>(numbers[0]), static_cast<uint64_t>(numbers[1])};
}

// `count` columns from `first` on, or as many of them as there are.
TensorView columns_of(const TensorView& v, int64_t first, int64_t count) {
  const int64_t start = std::min(first, v.cols());
  auto* data = static_cast<char*>(v.data) +
               start * v.stride[1] * static_cast<int64_t>(dtype_size_bytes(v.dtype));
  return TensorView::strided(data, v.dtype, v.rows(), std::min(count, v.cols() - start),
                             v.stride[0], v.stride[1]);
}

}  // namespace

std::vector<LoraAdapter> adapters_of(const char* op, const std::vector<Tensor>& lora_a,
                                     const std::vector<Tensor>& lora_b,
                                     const std::vector<double>& scalings,
                                     const Dropouts& dropouts) {
  const size_t n = lora_a.size();
  if (lora_b.size() != n || scalings.size() != n || dropouts.input.size() != n) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": " + std::to_string(n) + " lora_A, " + std::to_string(lora_b.size()) +
             " lora_B, " + std::to_string(scalings.size()) + " scalings and " +
             std::to_string(dropouts.input.size()) + " dropouts, expected as many of each");
  }
  if (!dropouts.rank.empty() && dropouts.rank.size() != 2 * n) {
    fail(StatusCode::kInvalidArgument, std::string(op) + ": " +
                                           std::to_string(dropouts.rank.size()) +
                                           " rank_dropouts, expected none or " +
                                           std::to_string(2 * n) + ", two for each adapter");
  }
  const Key key = key_of(op, dropouts);
  TensorView factors;
  if (dropouts.factors != nullptr && dropouts.factors->has_value())
    factors = matrix_view(**dropouts.factors, op, "rank_factors");
  int64_t column = 0;
  std::vector<LoraAdapter> adapters(n);
  for (size_t i = 0; i < n; ++i) {
    adapters[i].a = matrix_view(lora_a[i], op, "lora_A");
    adapters[i].b = matrix_view(lora_b[i], op, "lora_B");
    adapters[i].scale = scalings[i];
    adapters[i].dropout = {dropouts.input[i], key.seed, key.offset + i};
    if (factors.defined()) {
      adapters[i].factors = columns_of(factors, column, adapters[i].a.rows());
      column += adapters[i].a.rows();
    }
    if (dropouts.rank.empty()) continue;
    adapters[i].hidden = {dropouts.rank[2 * i], key.seed, key.offset + n + i};
    adapters[i].rank = {dropouts.rank[2 * i + 1], key.seed, key.offset + 2 * n + i};
  }
  if (factors.defined() && column != factors.cols()) {
    fail(StatusCode::kShapeMismatch, std::string(op) + ": rank_factors has " +
                                         std::to_string(factors.cols()) + " columns, expected " +
                                         std::to_string(column) + ", the sum of the ranks");
  }
  return adapters;
}

DropoutSpec output_dropout_of(const char* op, size_t adapters, const Dropouts& dropouts) {
  const Key key = key_of(op, dropouts);
  return {dropouts.output, key.seed, key.offset + 3 * adapters};
}

LoraSamples samples_of(const char* op, const Tensor& x, int64_t rows,
                       const OptionalTensor& adapters) {
  const int64_t samples = x.dim() > 1 ? x.size(0) : 1;
  LoraSamples result;
  if (samples > 0 && rows > 0) result.rows = rows / samples;
  if (!adapters.has_value()) return result;
  if (!is_int64(*adapters) || adapters->dim() != 1 || adapters->numel() != samples ||
      !adapters->is_contiguous() || !adapters->is_cpu()) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) +
             ": adapter_ids is not one dense int64 number on the CPU for each of the " +
             std::to_string(samples) + " samples of x, its first dimension");
  }
  result.adapter = static_cast<const int64_t*>(adapters->data_ptr());
  return result;
}

Group::Group(const char* op, size_t layers, const std::vector<int64_t>& counts,
             std::vector<LoraAdapter> all)
    : adapters(std::move(all)) {
  int64_t total = 0;
  bool negative = false;
  for (const int64_t n : counts) {
    total += n;
    negative = negative || n < 0;
  }
  if (counts.size() != layers || negative || total != static_cast<int64_t>(adapters.size())) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": " + std::to_string(counts.size()) +
             " counts of adapters with the sum " + std::to_string(total) + ", expected " +
             std::to_string(layers) + " with the sum " + std::to_string(adapters.size()));
  }
  size_t at = 0;
  for (const int64_t n : counts) {
    of.emplace_back(adapters.data() + at, static_cast<size_t>(n));
    at += static_cast<size_t>(n);
  }
  for (const LoraAdapter& ad : adapters) rank += ad.a.rows();
}

// The tensors of a list that holds those of the true entries only.
std::vector<const Tensor*> spread(const char* op, const char* name, const std::vector<Tensor>& some,
                                  const std::vector<bool>& present, size_t expected) {
  std::vector<const Tensor*> all;
  size_t next = 0;
  for (const bool there : present) {
    if (there && next == some.size()) {
      next = some.size() + 1;
      break;
    }
    all.push_back(there ? &some[next++] : nullptr);
  }
  if (next != some.size() || present.size() != expected) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": " + std::to_string(some.size()) + " " + name + " and " +
             std::to_string(present.size()) +
             " flags, expected one flag for each layer and a tensor for each true one");
  }
  return all;
}

TensorView GradientOutputs::matrix(const TensorView& like) {
  outputs_->push_back(empty({like.rows(), like.cols()}, like.dtype));
  return TensorView::matrix(outputs_->back().data_ptr(), like.dtype, like.rows(), like.cols());
}

LoraProjectionBackward GradientOutputs::of_layer(const TensorView& weight,
                                                 std::span<const LoraAdapter> adapters) {
  LoraProjectionBackward layer;
  layer.w = weight;
  layer.adapters = adapters;
  if (mask_[at_++]) layer.dw = matrix(weight);
  if (mask_[at_++]) {
    outputs_->push_back(empty({weight.rows()}, weight.dtype));
    layer.dbias = vector_view(outputs_->back(), op_, "grad_bias");
  }
  std::vector<TensorView>& da = views_.emplace_back(adapters.size());
  std::vector<TensorView>& db = views_.emplace_back(adapters.size());
  for (size_t i = 0; i < adapters.size(); ++i) {
    if (mask_[at_++]) da[i] = matrix(adapters[i].a);
    if (mask_[at_++]) db[i] = matrix(adapters[i].b);
  }
  layer.da = da;
  layer.db = db;
  return layer;
}

const void* packed_memory(const OptionalTensor& packed, const char* op) {
  if (!packed.has_value()) return nullptr;
  if (!packed->is_cpu() || !packed->is_contiguous() || !is_byte(*packed) || packed->numel() < 64) {
    fail(StatusCode::kInvalidArgument,
         std::string(op) + ": packed is no packed weight, expected what pack_weight returned");
  }
  const auto needed = static_cast<int64_t>(packed_weight_bytes(packed->data_ptr()));
  if (packed->numel() < needed) {
    fail(StatusCode::kInvalidArgument, std::string(op) + ": packed has " +
                                           std::to_string(packed->numel()) + " bytes, expected " +
                                           std::to_string(needed) + " as pack_weight returned");
  }
  return packed->data_ptr();
}

}  // namespace loraaccel::bridge
