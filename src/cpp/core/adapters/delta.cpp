#include "adapters/delta.h"

#include <type_traits>

#include "adapters/entry.h"
#include "adapters/numbers.h"
#include "loraaccel/adapter_convert.h"
#include "loraaccel/lora_expand.h"

namespace loraaccel {
namespace {

using Role = AdapterRole;

template <class T>
struct Matrix {
  std::vector<T> values;
  int64_t rows = 0;
  int64_t cols = 0;
};

template <class T>
constexpr DType dtype_of() {
  return std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32;
}

Status no_numbers(const AdapterTensor& t) {
  return Status(StatusCode::kUnsupportedDtype,
                t.key + " is " + file_dtype_name(t.dtype) + ", expected a type of numbers");
}

// The tensor's rows [row, row + rows) as a matrix of its first dimension by all others.
template <class T>
Status load(const AdapterTensor& t, int64_t row, int64_t rows, Matrix<T>* m) {
  m->rows = rows;
  m->cols = columns_of(t);
  m->values.resize(static_cast<size_t>(m->rows * m->cols));
  const char* first =
      static_cast<const char*>(t.data) + row * m->cols * file_dtype_bits(t.dtype) / 8;
  if constexpr (std::is_same_v<T, float>) {
    if (!widen_elements(t.dtype, first, rows * m->cols, m->values.data())) return no_numbers(t);
  } else {
    for (int64_t i = 0; i < rows * m->cols; ++i) {
      double value = 0;
      if (!element_value(t.dtype, first, i, &value)) return no_numbers(t);
      m->values[static_cast<size_t>(i)] = value;
    }
  }
  return Status();
}

template <class T>
Status load(const AdapterTensor& t, Matrix<T>* m) {
  return load(t, 0, t.shape[0], m);
}

// out [a.rows, b.cols] += scale a b
template <class T>
Status add_product(const ExecContext& ctx, const Matrix<T>& a, const Matrix<T>& b, double scale,
                   T* out) {
  constexpr DType kType = dtype_of<T>();
  LoraExpandArgs args;
  args.b = TensorView::matrix(b.values.data(), kType, b.rows, b.cols).transposed();
  args.scale = scale;
  const TensorView y = TensorView::matrix(out, kType, a.rows, b.cols);
  const TensorView hidden = TensorView::matrix(a.values.data(), kType, a.rows, a.cols);
  args.base = {&y, 1};
  args.hidden = {&hidden, 1};
  args.y = {&y, 1};
  return lora_expand_forward(ctx, args);
}

template <class T>
Status product(const ExecContext& ctx, const Matrix<T>& a, const Matrix<T>& b, Matrix<T>* out) {
  out->rows = a.rows;
  out->cols = b.cols;
  out->values.assign(static_cast<size_t>(a.rows * b.cols), T(0));
  return add_product(ctx, a, b, 1, out->values.data());
}

template <class T>
Matrix<T> transposed(const Matrix<T>& m) {
  Matrix<T> t;
  t.rows = m.cols;
  t.cols = m.rows;
  t.values.resize(m.values.size());
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j)
      t.values[static_cast<size_t>(j * m.rows + i)] = m.values[static_cast<size_t>(i * m.cols + j)];
  }
  return t;
}

// [r, in k k]: sum over j of core[i, j, u, v] down[j, c]
template <class T>
Status core_times_down(const AdapterTensor& core_tensor, const Matrix<T>& down, Matrix<T>* out) {
  Matrix<T> core;
  LORAACCEL_RETURN_IF_ERROR(load(core_tensor, &core));
  const int64_t window = core_tensor.shape[2] * core_tensor.shape[3];
  out->rows = core.rows;
  out->cols = down.cols * window;
  out->values.assign(static_cast<size_t>(out->rows * out->cols), T(0));
  for (int64_t i = 0; i < core.rows; ++i) {
    for (int64_t j = 0; j < down.rows; ++j) {
      const T* weights = core.values.data() + i * core.cols + j * window;
      for (int64_t c = 0; c < down.cols; ++c) {
        const T d = down.values[static_cast<size_t>(j * down.cols + c)];
        T* to = out->values.data() + i * out->cols + c * window;
        for (int64_t u = 0; u < window; ++u) to[u] += weights[u] * d;
      }
    }
  }
  return Status();
}

class Updates {
 public:
  Updates(const ExecContext& ctx, const AdapterEntry& entry) : ctx_(ctx), e_(entry) {}

  template <class T>
  Status lora(double scale, int64_t row, int64_t rows, T* delta) const {
    Matrix<T> up;
    Matrix<T> down;
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(Role::kUp), row, rows, &up));
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(Role::kDown), &down));
    const AdapterTensor* mid = e_.find(Role::kMid);
    if (mid == nullptr) return add_product(ctx_, up, down, scale, delta);
    Matrix<T> inner;
    LORAACCEL_RETURN_IF_ERROR(core_times_down(*mid, down, &inner));
    return add_product(ctx_, up, inner, scale, delta);
  }

  template <class T>
  Status embedding(double scale, int64_t row, int64_t rows, T* delta) const {
    Matrix<T> down;
    Matrix<T> up;
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(Role::kEmbeddingDown), &down));
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(Role::kEmbeddingUp), &up));
    Matrix<T> left = transposed(down);
    left.values.erase(left.values.begin(), left.values.begin() + row * left.cols);
    left.rows = rows;
    return add_product(ctx_, left, transposed(up), scale, delta);
  }

  template <class T>
  Status loha(double scale, int64_t row, int64_t rows, T* delta) const {
    Matrix<T> first;
    Matrix<T> second;
    LORAACCEL_RETURN_IF_ERROR(hada(Role::kHada1A, Role::kHada1B, Role::kHadaT1, row, rows, &first));
    LORAACCEL_RETURN_IF_ERROR(
        hada(Role::kHada2A, Role::kHada2B, Role::kHadaT2, row, rows, &second));
    const T s = static_cast<T>(scale);
    for (size_t i = 0; i < first.values.size(); ++i)
      delta[i] += s * (first.values[i] * second.values[i]);
    return Status();
  }

  template <class T>
  Status lokr(double scale, int64_t row, int64_t rows, T* delta) const {
    Matrix<T> first;
    Matrix<T> second;
    LORAACCEL_RETURN_IF_ERROR(kron(Role::kKron1, Role::kKron1A, Role::kKron1B, nullptr, &first));
    const AdapterTensor* core = e_.find(Role::kKronT2);
    LORAACCEL_RETURN_IF_ERROR(kron(Role::kKron2, Role::kKron2A, Role::kKron2B, core, &second));
    // The window of a convolution is innermost in the second factor's columns, as it is in the weight's.
    const T s = static_cast<T>(scale);
    for (int64_t i = 0; i < rows; ++i) {
      const T* a = first.values.data() + (row + i) / second.rows * first.cols;
      const T* b = second.values.data() + (row + i) % second.rows * second.cols;
      T* to = delta + i * first.cols * second.cols;
      for (int64_t c = 0; c < first.cols; ++c) {
        for (int64_t d = 0; d < second.cols; ++d) to[c * second.cols + d] += s * (a[c] * b[d]);
      }
    }
    return Status();
  }

  template <class T>
  Status whole(double strength, Role role, int64_t row, int64_t rows, T* delta) const {
    const AdapterTensor* t = e_.find(role);
    if (t == nullptr) return Status();
    Matrix<T> m;
    LORAACCEL_RETURN_IF_ERROR(load(*t, row, rows, &m));
    const T s = static_cast<T>(strength);
    for (size_t i = 0; i < m.values.size(); ++i) delta[i] += s * m.values[i];
    return Status();
  }

 private:
  template <class T>
  Status hada(Role a_role, Role b_role, Role core_role, int64_t row, int64_t rows,
              Matrix<T>* out) const {
    Matrix<T> a;
    Matrix<T> b;
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(b_role), &b));
    const AdapterTensor* core = e_.find(core_role);
    if (core == nullptr) {
      LORAACCEL_RETURN_IF_ERROR(load(*e_.find(a_role), row, rows, &a));
      return product(ctx_, a, b, out);
    }
    Matrix<T> stored;
    Matrix<T> inner;
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(a_role), &stored));
    LORAACCEL_RETURN_IF_ERROR(core_times_down(*core, b, &inner));
    a = transposed(stored);
    a.values.erase(a.values.begin(), a.values.begin() + row * a.cols);
    a.rows = rows;
    return product(ctx_, a, inner, out);
  }

  template <class T>
  Status kron(Role whole_role, Role a_role, Role b_role, const AdapterTensor* core,
              Matrix<T>* out) const {
    if (e_.find(whole_role) != nullptr) return load(*e_.find(whole_role), out);
    Matrix<T> a;
    Matrix<T> b;
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(a_role), &a));
    LORAACCEL_RETURN_IF_ERROR(load(*e_.find(b_role), &b));
    if (core == nullptr) return product(ctx_, a, b, out);
    Matrix<T> inner;
    LORAACCEL_RETURN_IF_ERROR(core_times_down(*core, b, &inner));
    return product(ctx_, transposed(a), inner, out);
  }

  const ExecContext& ctx_;
  const AdapterEntry& e_;
};

}  // namespace

int64_t delta_columns(const AdapterEntry& entry) {
  const auto columns = [&](Role role) {
    const AdapterTensor* t = entry.find(role);
    return t == nullptr ? int64_t{0} : columns_of(*t);
  };
  const auto window = [&](Role role) {
    const AdapterTensor* t = entry.find(role);
    return t == nullptr ? int64_t{1} : t->shape[2] * t->shape[3];
  };
  switch (entry.kind) {
    case AdapterKind::kLora:
      return columns(Role::kDown) * window(Role::kMid);
    case AdapterKind::kLoha:
      return columns(Role::kHada1B) * window(Role::kHadaT1);
    case AdapterKind::kLokr: {
      const int64_t first = columns(Role::kKron1) + columns(Role::kKron1B);
      const int64_t second = columns(Role::kKron2) + columns(Role::kKron2B);
      return first * second * window(Role::kKronT2);
    }
    case AdapterKind::kFull:
      return columns(Role::kDiff);
    case AdapterKind::kNorm:
      return columns(Role::kNormWeight);
    case AdapterKind::kEmbedding:
      return entry.find(Role::kEmbeddingUp)->shape[0];
    default:
      return 0;
  }
}

template <class T>
Status add_delta(const ExecContext& ctx, const AdapterEntry& entry, double strength, int64_t row,
                 int64_t rows, T* delta) {
  const Updates updates(ctx, entry);
  const double scale = strength * entry.scale.value;
  switch (entry.kind) {
    case AdapterKind::kLora:
      return updates.lora(scale, row, rows, delta);
    case AdapterKind::kLoha:
      return updates.loha(scale, row, rows, delta);
    case AdapterKind::kLokr:
      return updates.lokr(scale, row, rows, delta);
    case AdapterKind::kEmbedding:
      return updates.embedding(scale, row, rows, delta);
    case AdapterKind::kFull:
      return updates.whole(strength, Role::kDiff, row, rows, delta);
    case AdapterKind::kNorm:
      return updates.whole(strength, Role::kNormWeight, row, rows, delta);
    default:
      return Status(StatusCode::kInvalidArgument,
                    entry.path + ": an adapter of kind " + adapter_kind_name(entry.kind) +
                        " cannot be written as a difference of weights");
  }
}

template Status add_delta(const ExecContext&, const AdapterEntry&, double, int64_t, int64_t,
                          float*);
template Status add_delta(const ExecContext&, const AdapterEntry&, double, int64_t, int64_t,
                          double*);

Status adapter_delta(const AdapterEntry& entry, std::vector<double>* delta, int64_t* rows,
                     int64_t* columns) {
  *rows = entry.out();
  *columns = delta_columns(entry);
  delta->assign(static_cast<size_t>(*rows * *columns), 0.0);
  const ExecContext ctx = default_context();
  return add_delta(ctx, entry, 1, 0, *rows, delta->data());
}

}  // namespace loraaccel
