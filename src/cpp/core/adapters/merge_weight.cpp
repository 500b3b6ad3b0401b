#include "adapters/merge_weight.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "adapters/delta.h"
#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "adapters/rows.h"
#include "checkpoint/cast.h"
#include "loraaccel/lora_expand.h"
#include "scratch.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

constexpr int64_t kBlockRows = 64;

// Bytes of a row of the weight.
int64_t row_bytes(const MergedWeight& w) { return w.columns * file_dtype_bits(w.dtype) / 8; }

bool plain_lora(const MergeShare& share) {
  return share.entry->kind == AdapterKind::kLora &&
         share.entry->find(Role::kDoraScale) == nullptr && share.entry->find(Role::kMid) == nullptr;
}

bool kernel_dtype(FileDType dtype, DType* kernel) {
  switch (dtype) {
    case FileDType::kF32:
      *kernel = DType::kFloat32;
      return true;
    case FileDType::kF16:
      *kernel = DType::kFloat16;
      return true;
    case FileDType::kBF16:
      *kernel = DType::kBFloat16;
      return true;
    default:
      return false;
  }
}

// Rows [begin, end) that have the same shares all over.
struct Band {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<MergeShare> shares;
};

std::vector<Band> bands_of(const MergeWork& work) {
  std::set<int64_t> edges;
  for (const MergeShare& s : work.shares) {
    edges.insert(s.row);
    edges.insert(s.row + s.rows);
  }
  std::vector<Band> bands;
  for (auto edge = edges.begin(); edge != edges.end() && std::next(edge) != edges.end(); ++edge) {
    Band band{*edge, *std::next(edge), {}};
    for (const MergeShare& s : work.shares) {
      if (s.row <= band.begin && s.row + s.rows >= band.end) {
        MergeShare here = s;
        here.entry_row += band.begin - s.row;
        here.row = band.begin;
        here.rows = band.end - band.begin;
        band.shares.push_back(here);
      }
    }
    if (!band.shares.empty()) bands.push_back(std::move(band));
  }
  return bands;
}

class Merger {
 public:
  Merger(const ExecContext& ctx, MergedWeight* weight) : ctx_(ctx), w_(*weight) {}

  Status band(const Band& band) {
    DType kernel;
    const bool plain = std::all_of(band.shares.begin(), band.shares.end(), plain_lora);
    if (plain && kernel_dtype(w_.dtype, &kernel)) return product(band, kernel);
    if (w_.dtype == FileDType::kF64) return blocks<double>(band);
    return blocks<float>(band);
  }

 private:
  char* row_at(int64_t row) const { return static_cast<char*>(w_.data) + row * row_bytes(w_); }

  // All adapters side by side in the rank: one product, one rounding, straight into the weight.
  Status product(const Band& band, DType kernel) const {
    int64_t rank = 0;
    for (const MergeShare& s : band.shares) rank += s.entry->rank;
    const int64_t rows = band.end - band.begin;
    std::vector<float> up(static_cast<size_t>(rows * rank));
    std::vector<float> down(static_cast<size_t>(rank * w_.columns));
    int64_t first = 0;
    const bool one = band.shares.size() == 1;
    for (const MergeShare& s : band.shares) {
      const int64_t r = s.entry->rank;
      const AdapterTensor& b = *s.entry->find(Role::kUp);
      const AdapterTensor& a = *s.entry->find(Role::kDown);
      const float factor = one ? 1.0F : static_cast<float>(s.strength * s.entry->scale.value);
      std::vector<float> values(static_cast<size_t>(rows * r));
      const char* from =
          static_cast<const char*>(b.data) + s.entry_row * r * file_dtype_bits(b.dtype) / 8;
      if (!widen_elements(b.dtype, from, rows * r, values.data()) ||
          !widen_elements(a.dtype, a.data, r * w_.columns, down.data() + first * w_.columns))
        return Status(StatusCode::kUnsupportedDtype, a.key + ": no type to compute with");
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = 0; k < r; ++k)
          up[static_cast<size_t>(i * rank + first + k)] =
              factor * values[static_cast<size_t>(i * r + k)];
      }
      first += r;
    }
    const MergeShare& only = band.shares[0];
    LoraExpandArgs args;
    args.b = TensorView::matrix(down.data(), DType::kFloat32, rank, w_.columns).transposed();
    args.scale = one ? only.strength * only.entry->scale.value : 1;
    const TensorView y = TensorView::matrix(row_at(band.begin), kernel, rows, w_.columns);
    const TensorView hidden = TensorView::matrix(up.data(), DType::kFloat32, rows, rank);
    args.base = {&y, 1};
    args.hidden = {&hidden, 1};
    args.y = {&y, 1};
    LORAACCEL_RETURN_IF_ERROR(lora_expand_forward(ctx_, args));
    return check_finite(band, kernel);
  }

  Status check_finite(const Band& band, DType kernel) const {
    const char* data = row_at(band.begin);
    const int64_t count = (band.end - band.begin) * w_.columns;
    bool finite = true;
    if (kernel == DType::kFloat32) {
      const auto* v = reinterpret_cast<const float*>(data);
      float sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += v[i] * 0.0F;
      finite = sum == 0.0F;
    } else {
      const auto* v = reinterpret_cast<const uint16_t*>(data);
      const uint16_t exponent = kernel == DType::kFloat16 ? 0x7C00U : 0x7F80U;
      int64_t bad = 0;
      for (int64_t i = 0; i < count; ++i) bad += (v[i] & exponent) == exponent ? 1 : 0;
      finite = bad == 0;
    }
    if (finite) return Status();
    return Status(StatusCode::kInvalidArgument,
                  w_.name + ": the merged weight has numbers that are too large for " +
                      file_dtype_name(w_.dtype));
  }

  // Everything else: blocks of rows, widened, changed and rounded by one thread each.
  template <class T>
  Status blocks(const Band& band) {
    const bool by_inputs =
        std::any_of(band.shares.begin(), band.shares.end(),
                    [](const MergeShare& s) { return !dora_on_output(*s.entry); });
    const int64_t rows = band.end - band.begin;
    const int64_t size = by_inputs ? rows : kBlockRows;  // norms of columns need all rows
    const int64_t count = ceil_div(rows, size);
    ExecContext single = ctx_;
    single.num_threads = 1;
    std::mutex mutex;
    Status failure;
    parallel_for(ctx_, count, [&](int64_t i) {
      const int64_t begin = band.begin + i * size;
      const Status status =
          block<T>(count > 1 ? single : ctx_, band, begin, std::min(size, band.end - begin));
      if (status.ok()) return;
      const std::scoped_lock lock(mutex);
      if (failure.ok()) failure = status;
    });
    return failure;
  }

  template <class T>
  Status block(const ExecContext& ctx, const Band& band, int64_t begin, int64_t rows) {
    const auto count = static_cast<size_t>(rows * w_.columns);
    std::vector<T> original(count);
    if constexpr (std::is_same_v<T, float>) {
      widen_elements(w_.dtype, row_at(begin), static_cast<int64_t>(count), original.data());
    } else {
      std::memcpy(original.data(), row_at(begin), count * sizeof(T));
    }
    std::vector<T> values = original;
    for (const MergeShare& s : band.shares) {
      const int64_t row = s.entry_row + begin - s.row;
      if (s.entry->kind == AdapterKind::kReplace) {
        LORAACCEL_RETURN_IF_ERROR(replace(*s.entry, row, rows, values.data()));
      } else if (s.entry->find(Role::kDoraScale) == nullptr) {
        LORAACCEL_RETURN_IF_ERROR(add_delta(ctx, *s.entry, s.strength, row, rows, values.data()));
      } else {
        LORAACCEL_RETURN_IF_ERROR(dora(ctx, s, row, rows, original, &values));
      }
    }
    return store(begin, values);
  }

  template <class T>
  Status replace(const AdapterEntry& entry, int64_t row, int64_t rows, T* values) const {
    const AdapterTensor& t = *entry.find(Role::kWeight);
    for (int64_t i = 0; i < rows * w_.columns; ++i) {
      double value = 0;
      if (!element_value(t.dtype, t.data, row * w_.columns + i, &value))
        return Status(StatusCode::kUnsupportedDtype, t.key + ": no type to compute with");
      values[i] = static_cast<T>(value);
    }
    return Status();
  }

  // values += m (g V - W); W is the frozen weight, whatever other adapters add.
  template <class T>
  Status dora(const ExecContext& ctx, const MergeShare& s, int64_t row, int64_t rows,
              const std::vector<T>& original, std::vector<T>* values) const {
    std::vector<T> v = original;
    LORAACCEL_RETURN_IF_ERROR(add_delta(ctx, *s.entry, 1, row, rows, v.data()));
    const AdapterTensor& magnitude = *s.entry->find(Role::kDoraScale);
    const bool outputs = dora_on_output(*s.entry);
    const auto width = static_cast<size_t>(w_.columns);
    const auto per_input = outputs ? 1 : width / static_cast<size_t>(magnitude.numel());
    std::vector<double> squares(
        outputs ? static_cast<size_t>(rows) : static_cast<size_t>(magnitude.numel()), 0.0);
    const auto group = [&](size_t i) { return outputs ? i / width : i % width / per_input; };
    for (size_t i = 0; i < v.size(); ++i)
      squares[group(i)] += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    for (size_t i = 0; i < squares.size(); ++i) {
      double m = 0;
      if (!element_value(magnitude.dtype, magnitude.data,
                         static_cast<int64_t>(i) + (outputs ? row : 0), &m))
        return Status(StatusCode::kUnsupportedDtype, magnitude.key + ": no type to compute with");
      squares[i] = m / (std::sqrt(squares[i]) + FLT_EPSILON);
    }
    for (size_t i = 0; i < v.size(); ++i) {
      const double change =
          squares[group(i)] * static_cast<double>(v[i]) - static_cast<double>(original[i]);
      (*values)[i] = static_cast<T>(static_cast<double>((*values)[i]) + s.strength * change);
    }
    return Status();
  }

  Status store(int64_t begin, std::vector<double>& values) const {
    std::memcpy(row_at(begin), values.data(), values.size() * sizeof(double));
    return Status();
  }

  Status store(int64_t begin, std::vector<float>& values) {
    const bool byte = w_.dtype == FileDType::kF8E4M3 || w_.dtype == FileDType::kF8E5M2;
    if (byte) {  // saturating: a type without room for it makes the largest number it has
      const float most = w_.dtype == FileDType::kF8E4M3 ? 448.0F : 57344.0F;
      for (float& v : values) v = v > most ? most : v < -most ? -most : v;
    }
    CastCounts counts{};
    cast_elements(FileDType::kF32, values.data(), w_.dtype, row_at(begin), values.size(), &counts);
    if (counts.infinities > 0)
      return Status(StatusCode::kInvalidArgument,
                    w_.name + ": the merged weight has numbers that are too large for " +
                        file_dtype_name(w_.dtype));
    if (!byte) return Status();
    std::vector<float> stored(values.size());
    widen_elements(w_.dtype, row_at(begin), static_cast<int64_t>(values.size()), stored.data());
    float largest = 0;
    for (size_t i = 0; i < values.size(); ++i)
      largest = std::max(largest, std::abs(stored[i] - values[i]));
    const std::scoped_lock lock(rounding_mutex_);
    w_.rounding = std::max(w_.rounding, static_cast<double>(largest));
    return Status();
  }

  const ExecContext& ctx_;
  MergedWeight& w_;
  std::mutex rounding_mutex_;
};

// A bias or a norm's weight: numbers, not rows.
Status merge_vector(const MergeWork& work, MergedWeight* w) {
  std::vector<double> values(static_cast<size_t>(w->rows));
  for (int64_t i = 0; i < w->rows; ++i)
    element_value(w->dtype, w->data, i, &values[static_cast<size_t>(i)]);
  for (const MergeShare& s : work.shares) {
    const AdapterTensor& t = *s.entry->find(work.role);
    const double factor = s.strength * (work.role == Role::kUpBias ? s.entry->scale.value : 1);
    for (int64_t i = 0; i < s.rows; ++i) {
      double change = 0;
      if (!element_value(t.dtype, t.data, s.entry_row + i, &change))
        return Status(StatusCode::kUnsupportedDtype, t.key + ": no type to compute with");
      double& value = values[static_cast<size_t>(s.row + i)];
      value = work.role == Role::kBias ? change : value + factor * change;
    }
  }
  if (w->dtype == FileDType::kF64) {
    std::memcpy(w->data, values.data(), values.size() * sizeof(double));
    return Status();
  }
  CastCounts counts{};
  cast_elements(FileDType::kF64, values.data(), w->dtype, w->data, values.size(), &counts);
  if (counts.infinities == 0) return Status();
  return Status(StatusCode::kInvalidArgument,
                w->name + ": the merged numbers are too large for " + file_dtype_name(w->dtype));
}

}  // namespace

Status merge_weight(const ExecContext& ctx, const MergeWork& work, MergedWeight* weight) {
  if (work.vector) return merge_vector(work, weight);
  Merger merger(ctx, weight);
  for (const Band& band : bands_of(work)) LORAACCEL_RETURN_IF_ERROR(merger.band(band));
  return Status();
}

}  // namespace loraaccel
