#include "lora/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "lora/operands.h"

namespace loraaccel {
namespace {

constexpr uint64_t kMagic = 0x4c6f5261'50616b31;
constexpr size_t kHeaderBytes = 64;

struct Header {
  uint64_t magic;
  int64_t rows, cols;
  int64_t panel_words;
  int32_t width;
  int32_t pairs;
  int32_t transposed;
  int32_t dtype;
};
static_assert(sizeof(Header) <= kHeaderBytes);

Header header_for(const LoraSimd& simd, const TensorView& w, WeightUse use) {
  Header h{};
  h.magic = kMagic;
  h.rows = w.rows();
  h.cols = w.cols();
  h.pairs = simd.pairs && w.dtype == DType::kBFloat16 ? 1 : 0;
  h.transposed = use == WeightUse::kForward ? 1 : 0;
  h.panel_words = ceil_div(h.transposed != 0 ? w.cols() : w.rows(), h.pairs != 0 ? 2 : 1);
  h.width = simd.width;
  h.dtype = static_cast<int32_t>(w.dtype);
  return h;
}

int64_t panels_of(const Header& h) {
  return ceil_div(h.transposed != 0 ? h.rows : h.cols, h.width);
}

// A multiple of the alignment, whatever the width of a panel.
size_t bytes_of(const Header& h) {
  const size_t panels = static_cast<size_t>(panels_of(h) * h.panel_words * h.width) * sizeof(float);
  return (kHeaderBytes + panels + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes;
}

Header read_header(const void* memory) {
  Header h;
  memcpy(&h, memory, sizeof h);
  return h;
}

bool packs(const TensorView& w) {
  return w.ndim == 2 && w.numel() > 0 && w.dtype != DType::kFloat64 && has_unit_columns(w);
}

}  // namespace

const char* PackedWeight::mismatch(const void* memory, const TensorView& w, WeightUse use) {
  const Header h = read_header(memory);
  if (h.magic != kMagic) return "was not made by pack_weight";
  if ((h.transposed != 0) != (use == WeightUse::kForward)) {
    return use == WeightUse::kForward ? "is packed for the input gradient"
                                      : "is packed for the forward pass";
  }
  if (h.rows != w.rows() || h.cols != w.cols()) return "is packed from a weight of another shape";
  if (h.dtype != static_cast<int32_t>(w.dtype)) return "is packed from a weight of another type";
  return nullptr;
}

PackedWeight::PackedWeight(const void* memory) {
  const Header h = read_header(memory);
  panels_ = reinterpret_cast<const float*>(static_cast<const char*>(memory) + kHeaderBytes);
  panel_floats_ = h.panel_words * h.width;
  width_ = h.width;
  pairs_ = h.pairs != 0;
}

size_t packed_weight_bytes(const void* packed) {
  const Header h = read_header(packed);
  if (h.magic != kMagic) return kHeaderBytes;
  return bytes_of(h);
}

size_t packed_weight_bytes(const TensorView& w, WeightUse use) {
  if (!packs(w)) return 0;
  const Header h = header_for(lora_simd_best(), w, use);
  return bytes_of(h);
}

Status pack_weight(const ExecContext& ctx, const TensorView& w, WeightUse use, void* memory,
                   size_t bytes) {
  const size_t needed = packed_weight_bytes(w, use);
  if (needed == 0) {
    return Status(StatusCode::kInvalidArgument,
                  std::string("pack_weight: no packing for this weight, expected a matrix of ") +
                      "float32, bfloat16 or float16 with neighbouring columns");
  }
  if (memory == nullptr || bytes < needed) {
    return Status(StatusCode::kInvalidArgument,
                  "pack_weight: " + std::to_string(memory == nullptr ? 0 : bytes) +
                      " bytes of memory, expected " + std::to_string(needed));
  }
  const LoraSimd& simd = lora_simd_best();
  const Header h = header_for(simd, w, use);
  memset(memory, 0, kHeaderBytes);
  memcpy(memory, &h, sizeof h);
  auto* panels = reinterpret_cast<float*>(static_cast<char*>(memory) + kHeaderBytes);
  const AnyRows rows = {w.data, w.stride[0], w.dtype};
  const int64_t columns = h.transposed != 0 ? h.rows : h.cols;
  parallel_for(ctx, panels_of(h), [&](int64_t i) {
    const int64_t col = i * h.width;
    PanelSource source;
    source.data = h.transposed != 0 ? rows.at(col) : rows.at(0, col);
    source.stride = rows.stride;
    source.dtype = w.dtype;
    source.transposed = h.transposed != 0;
    source.count = static_cast<int>(std::min<int64_t>(h.width, columns - col));
    source.depth = h.transposed != 0 ? h.cols : h.rows;
    simd.pack(source, h.pairs != 0, panels + i * h.panel_words * h.width);
  });
  return Status();
}

}  // namespace loraaccel
