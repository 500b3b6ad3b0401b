// Norms of updates, and hashes of files: what `info` says.
#include <algorithm>
#include <cmath>

#include "adapters/delta.h"
#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/sha256.h"
#include "loraaccel/adapter_convert.h"
#include "loraaccel/safetensors.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

constexpr size_t kBlockBytes = size_t{4} << 20;

Status load(const AdapterTensor& t, std::vector<double>* values) {
  values->resize(static_cast<size_t>(t.numel()));
  for (size_t i = 0; i < values->size(); ++i) {
    if (!element_value(t.dtype, t.data, static_cast<int64_t>(i), &(*values)[i]))
      return Status(StatusCode::kUnsupportedDtype,
                    t.key + " is " + file_dtype_name(t.dtype) + ", expected a type of numbers");
  }
  return Status();
}

// ||B A||^2 = sum over i, j of (B^T B)_ij (A A^T)_ij: no [out, in] matrix is made.
Status pair_norm(const AdapterTensor& up, const AdapterTensor& down, double* norm) {
  std::vector<double> b;
  std::vector<double> a;
  LORAACCEL_RETURN_IF_ERROR(load(up, &b));
  LORAACCEL_RETURN_IF_ERROR(load(down, &a));
  const auto rank = static_cast<size_t>(down.shape[0]);
  const size_t out = b.size() / rank;
  const size_t in = a.size() / rank;
  std::vector<double> gram(rank * rank, 0.0);
  for (size_t o = 0; o < out; ++o) {
    for (size_t i = 0; i < rank; ++i) {
      for (size_t j = 0; j <= i; ++j) gram[i * rank + j] += b[o * rank + i] * b[o * rank + j];
    }
  }
  double sum = 0;
  for (size_t i = 0; i < rank; ++i) {
    for (size_t j = 0; j <= i; ++j) {
      double dot = 0;
      for (size_t k = 0; k < in; ++k) dot += a[i * in + k] * a[j * in + k];
      sum += (i == j ? 1 : 2) * gram[i * rank + j] * dot;
    }
  }
  *norm = std::isnan(sum) ? sum : std::sqrt(sum < 0 ? 0 : sum);
  return Status();
}

}  // namespace

Status adapter_norm(const AdapterEntry& entry, std::optional<double>* norm) {
  norm->reset();
  double value = 0;
  if (entry.kind == AdapterKind::kLora && entry.find(Role::kMid) == nullptr) {
    LORAACCEL_RETURN_IF_ERROR(pair_norm(*entry.find(Role::kUp), *entry.find(Role::kDown), &value));
    *norm = value * std::abs(entry.scale.value);
    return Status();
  }
  if (delta_columns(entry) == 0) return Status();
  std::vector<double> delta;
  int64_t rows = 0;
  int64_t columns = 0;
  LORAACCEL_RETURN_IF_ERROR(adapter_delta(entry, &delta, &rows, &columns));
  for (const double d : delta) value += d * d;
  *norm = std::sqrt(value);
  return Status();
}

Status adapter_file_hashes(const std::string& path, std::string* model_hash,
                           std::string* legacy_hash) {
  SafetensorsReader reader;
  LORAACCEL_RETURN_IF_ERROR(SafetensorsReader::open(path, &reader));
  std::vector<TensorToSave> tensors;
  for (const TensorEntry& entry : reader.entries()) {
    TensorToSave t;
    t.name = entry.name;
    t.dtype = entry.dtype;
    t.shape.assign(entry.shape.begin(), entry.shape.end());
    void* data = nullptr;
    LORAACCEL_RETURN_IF_ERROR(reader.view(entry, &data));
    t.data = data;
    tensors.push_back(std::move(t));
  }
  SaveMetadata metadata;
  for (const MetadataItem& item : reader.metadata()) metadata.emplace_back(item.key, item.value);
  SaveOptions options;
  options.hashes = true;
  SavePlan plan;
  LORAACCEL_RETURN_IF_ERROR(plan_save(path, tensors, &metadata, options, &plan));
  // kohya's second hash is of one window of the file.
  constexpr uint64_t kWindow = 0x100000;
  constexpr uint64_t kWindowEnd = 0x110000;
  Sha256 all;
  Sha256 window;
  uint64_t at = 0;
  const auto take = [&](const char* data, uint64_t bytes) {
    const uint64_t begin = std::max(at, kWindow);
    const uint64_t end = std::min(at + bytes, kWindowEnd);
    if (begin < end) window.update(data + (begin - at), end - begin);
    at += bytes;
  };
  take(plan.legacy_header.data(), plan.legacy_header.size());
  for (const PlannedTensor& t : plan.tensors) {
    const char* data = static_cast<const char*>(t.tensor->data);
    const uint64_t bytes = t.end - t.begin;
    for (uint64_t offset = 0; offset < bytes; offset += kBlockBytes) {
      const uint64_t n = std::min<uint64_t>(kBlockBytes, bytes - offset);
      all.update(data + offset, n);
      take(data + offset, n);
    }
  }
  *model_hash = hex_text(all.finish());
  *legacy_hash = hex_text(window.finish()).substr(0, 8);
  return Status();
}

}  // namespace loraaccel
