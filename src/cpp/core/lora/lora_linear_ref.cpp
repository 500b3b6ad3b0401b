// Plain loops over any type and any strides, sums in double: what every other kernel is compared with.
#include <algorithm>
#include <vector>

#include "half.h"
#include "lora/lora_linear_kernels.h"
#include "lora/operands.h"
#include "lora/rank_rows.h"
#include "random/philox.h"

namespace loraaccel {
namespace {

// Reads a view element by element as double.
template <class T>
struct Reader {
  const T* data;
  int64_t row, col;
  explicit Reader(const TensorView& v)
      : data(static_cast<const T*>(v.data)), row(v.stride[0]), col(v.ndim == 2 ? v.stride[1] : 0) {}
  double operator()(int64_t i, int64_t j = 0) const {
    return static_cast<double>(to_float(data[i * row + j * col]));
  }
};

template <class T>
void write(const TensorView& v, int64_t i, int64_t j, double value) {
  from_float(value,
             static_cast<T*>(v.data) + i * v.stride[0] + (v.ndim == 2 ? j * v.stride[1] : 0));
}

template <class F>
auto with_types(DType x, DType a, const F& f) {
  return visit_dtype(x, [&](auto tx) {
    return visit_dtype(a, [&](auto ta) {
      return f(typename decltype(tx)::type{}, typename decltype(ta)::type{});
    });
  });
}

double dropout_factor(const DropoutSpec& d, int64_t row, int64_t col) {
  if (d.p <= 0) return 1;
  if (dropout_word(d.seed, d.offset, row, col) < dropout_threshold(d.p)) return 0;
  return 1 / (1 - d.p);
}

double read_hidden(const TensorView& h, int64_t m, int64_t r) {
  return h.dtype == DType::kFloat64 ? Reader<double>(h)(m, r) : Reader<float>(h)(m, r);
}

void write_hidden(const TensorView& h, int64_t m, int64_t r, double value) {
  if (h.dtype == DType::kFloat64) {
    write<double>(h, m, r, value);
  } else {
    write<float>(h, m, r, value);
  }
}

// h of the whole call has a column for each rank of each projection, those of this one from args.h on.
Status forward(const ExecContext& ctx, const LoraLinearArgs& args) {
  const int64_t rows = args.x.rows();
  const int64_t inputs = args.x.cols();
  const int64_t outputs = args.w.rows();
  parallel_for(ctx, rows, [&](int64_t m) {
    int64_t column = 0;
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      const LoraAdapter& ad = args.adapters[i];
      const bool has = row_has(args.samples, m, static_cast<int64_t>(i));
      with_types(args.x.dtype, ad.a.dtype, [&](auto tx, auto ta) {
        const Reader<decltype(tx)> x(args.x);
        const Reader<decltype(ta)> a(ad.a);
        for (int64_t r = 0; r < ad.a.rows(); ++r) {
          double sum = 0;
          for (int64_t k = 0; has && k < inputs; ++k)
            sum += x(m, k) * dropout_factor(ad.dropout, m, k) * a(r, k);
          write_hidden(args.h, m, column + r, sum * rank_mask_factor(ad, args.samples, m, r));
        }
      });
      column += ad.a.rows();
    }
    visit_dtype(args.x.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const Reader<T> x(args.x);
      const Reader<T> w(args.w);
      for (int64_t n = 0; n < outputs; ++n) {
        double sum = 0;
        if (args.bias.defined()) {
          visit_dtype(args.bias.dtype,
                      [&](auto tb) { sum = Reader<typename decltype(tb)::type>(args.bias)(n); });
        }
        for (int64_t k = 0; k < inputs; ++k) sum += x(m, k) * w(n, k);
        int64_t c = 0;
        for (size_t i = 0; i < args.adapters.size(); ++i) {
          const LoraAdapter& ad = args.adapters[i];
          double update = 0;
          if (row_has(args.samples, m, static_cast<int64_t>(i)))
            visit_dtype(ad.b.dtype, [&](auto tb) {
              const Reader<typename decltype(tb)::type> b(ad.b);
              for (int64_t r = 0; r < ad.b.cols(); ++r)
                update += read_hidden(args.h, m, c + r) * b(n, r);
            });
          sum += ad.scale * update;
          c += ad.b.cols();
        }
        write<T>(args.y, m, n, sum);
      }
    });
  });
  return Status();
}

// dx is added to dx_sum, [M, K], not written.
Status backward(const ExecContext& ctx, const char* op, const LoraLinearBackwardArgs& args,
                double* dx_sum) {
  const int64_t rows = args.x.rows();
  const int64_t inputs = args.x.cols();
  const int64_t outputs = args.w.rows();
  int64_t total_rank = 0;
  for (const LoraAdapter& ad : args.adapters) total_rank += ad.a.rows();

  Scratch<double> u;  // [M, sum of R]
  if (!u.allocate(ctx, rows * total_rank)) return out_of_memory(op);
  parallel_for(ctx, rows, [&](int64_t m) {
    int64_t c = 0;
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      const LoraAdapter& ad = args.adapters[i];
      const bool has = row_has(args.samples, m, static_cast<int64_t>(i));
      with_types(args.dy.dtype, ad.b.dtype, [&](auto tx, auto tb) {
        const Reader<decltype(tx)> dy(args.dy);
        const Reader<decltype(tb)> b(ad.b);
        for (int64_t r = 0; r < ad.b.cols(); ++r) {
          double sum = 0;
          for (int64_t n = 0; has && n < outputs; ++n) sum += dy(m, n) * b(n, r);
          u.data()[m * total_rank + c + r] =
              ad.scale * sum * rank_mask_factor(ad, args.samples, m, r);
        }
      });
      c += ad.b.cols();
    }
  });

  visit_dtype(args.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Reader<T> dy(args.dy);
    const Reader<T> x(args.x);
    const Reader<T> w(args.w);
    if (dx_sum != nullptr) {
      parallel_for(ctx, rows, [&](int64_t m) {
        for (int64_t k = 0; k < inputs; ++k) {
          double sum = 0;
          for (int64_t n = 0; n < outputs; ++n) sum += dy(m, n) * w(n, k);
          int64_t c = 0;
          for (size_t i = 0; i < args.adapters.size(); ++i) {
            const LoraAdapter& ad = args.adapters[i];
            double update = 0;
            if (row_has(args.samples, m, static_cast<int64_t>(i)))
              visit_dtype(ad.a.dtype, [&](auto ta) {
                const Reader<typename decltype(ta)::type> a(ad.a);
                for (int64_t r = 0; r < ad.a.rows(); ++r)
                  update += u.data()[m * total_rank + c + r] * a(r, k);
              });
            sum += update * dropout_factor(ad.dropout, m, k);
            c += ad.a.rows();
          }
          dx_sum[m * inputs + k] += sum;
        }
      });
    }
    if (args.grads.dw.defined()) {
      parallel_for(ctx, outputs, [&](int64_t n) {
        for (int64_t k = 0; k < inputs; ++k) {
          double sum = 0;
          for (int64_t m = 0; m < rows; ++m) sum += dy(m, n) * x(m, k);
          write<T>(args.grads.dw, n, k, sum);
        }
      });
    }
    if (args.grads.dbias.defined()) {
      for (int64_t n = 0; n < outputs; ++n) {
        double sum = 0;
        for (int64_t m = 0; m < rows; ++m) sum += dy(m, n);
        visit_dtype(args.grads.dbias.dtype, [&](auto tb) {
          write<typename decltype(tb)::type>(args.grads.dbias, n, 0, sum);
        });
      }
    }
    int64_t c = 0;
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      const LoraAdapter& ad = args.adapters[i];
      visit_dtype(ad.a.dtype, [&](auto ta) {
        using TA = typename decltype(ta)::type;
        if (args.grads.da[i].defined()) {
          parallel_for(ctx, ad.a.rows(), [&](int64_t r) {
            for (int64_t k = 0; k < inputs; ++k) {
              double sum = 0;
              for (int64_t m = 0; m < rows; ++m) {
                if (!row_has(args.samples, m, static_cast<int64_t>(i))) continue;
                sum +=
                    u.data()[m * total_rank + c + r] * x(m, k) * dropout_factor(ad.dropout, m, k);
              }
              write<TA>(args.grads.da[i], r, k, sum);
            }
          });
        }
        if (args.grads.db[i].defined()) {
          parallel_for(ctx, outputs, [&](int64_t n) {
            for (int64_t r = 0; r < ad.b.cols(); ++r) {
              double sum = 0;
              for (int64_t m = 0; m < rows; ++m) {
                if (row_has(args.samples, m, static_cast<int64_t>(i)))
                  sum += dy(m, n) * read_hidden(args.h, m, c + r);
              }
              write<TA>(args.grads.db[i], n, r, ad.scale * sum);
            }
          });
        }
      });
      c += ad.a.rows();
    }
  });
  return Status();
}

// The columns of h that belong to one projection.
TensorView hidden_columns(const TensorView& h, int64_t start,
                          std::span<const LoraAdapter> adapters) {
  TensorView part = h;
  if (h.data == nullptr) return part;
  part.data = static_cast<char*>(h.data) +
              start * h.stride[1] * static_cast<int64_t>(dtype_size_bytes(h.dtype));
  part.shape[1] = 0;
  for (const LoraAdapter& ad : adapters) part.shape[1] += ad.a.rows();
  return part;
}

}  // namespace

Status lora_group_forward_ref(const ExecContext& ctx, const char*, const LoraQkvArgs& args) {
  int64_t column = 0;
  for (const LoraProjection& p : args.projections) {
    LoraLinearArgs one;
    one.x = args.x;
    one.w = p.w;
    one.bias = p.bias;
    one.adapters = p.adapters;
    one.y = p.y;
    one.samples = args.samples;
    one.h = hidden_columns(args.h, column, p.adapters);
    LORAACCEL_RETURN_IF_ERROR(forward(ctx, one));
    column += one.h.cols();
  }
  return Status();
}

Status lora_group_backward_ref(const ExecContext& ctx, const char* op,
                               const LoraQkvBackwardArgs& args) {
  Scratch<double> dx;
  const TensorView no_rows = TensorView::matrix(nullptr, args.x.dtype, 0, args.x.cols());
  if (args.dx.defined()) {
    if (!dx.allocate(ctx, args.dx.numel())) return out_of_memory(op);
    std::fill_n(dx.data(), args.dx.numel(), 0.0);
  }
  int64_t column = 0;
  for (const LoraProjectionBackward& p : args.projections) {
    LoraLinearBackwardArgs one;
    one.dy = p.dy.defined() ? p.dy : TensorView::matrix(nullptr, args.x.dtype, 0, p.w.rows());
    one.x = p.dy.defined() ? args.x : no_rows;
    one.w = p.w;
    one.adapters = p.adapters;
    one.h = hidden_columns(args.h, column, p.adapters);
    one.samples = args.samples;
    one.grads = {{}, p.dw, p.dbias, p.da, p.db};
    LORAACCEL_RETURN_IF_ERROR(backward(ctx, op, one, dx.data()));
    for (const LoraAdapter& ad : p.adapters) column += ad.a.rows();
  }
  if (args.dx.defined()) store_view(ctx, dx.data(), args.dx.cols(), 1, 1.0, args.dx);
  return Status();
}

}  // namespace loraaccel
