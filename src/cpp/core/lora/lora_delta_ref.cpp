// The adapters alone in plain loops over any type and any strides, sums in double: the oracle, and the way of float64.
#include "lora/plain.h"
#include "lora/rank_rows.h"
#include "random/philox.h"
#include "scratch.h"

namespace loraaccel {
namespace {

double factor(const DropoutSpec& d, int64_t row, int64_t col) {
  if (d.p <= 0) return 1;
  return dropout_word(d.seed, d.offset, row, col) < dropout_threshold(d.p) ? 0 : 1 / (1 - d.p);
}

bool has(const LoraSamples& samples, int64_t row, size_t adapter) {
  return row_has(samples, row, static_cast<int64_t>(adapter));
}

}  // namespace

Status lora_delta_forward_ref(const ExecContext& ctx, const LoraDeltaArgs& args) {
  parallel_for(ctx, args.x.rows(), [&](int64_t m) {
    int64_t column = 0;
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      const LoraAdapter& ad = args.adapters[i];
      for (int64_t r = 0; r < ad.a.rows(); ++r) {
        double sum = 0;
        for (int64_t k = 0; has(args.samples, m, i) && k < args.x.cols(); ++k)
          sum += plain_read(args.x, m, k) * factor(ad.dropout, m, k) * plain_read(ad.a, r, k);
        plain_write(args.h, m, column++, sum * rank_mask_factor(ad, args.samples, m, r));
      }
    }
    for (int64_t n = 0; n < args.y.cols(); ++n) {
      double sum = 0;
      column = 0;
      for (size_t i = 0; i < args.adapters.size(); ++i) {
        const LoraAdapter& ad = args.adapters[i];
        double update = 0;
        for (int64_t r = 0; has(args.samples, m, i) && r < ad.a.rows(); ++r)
          update += plain_read(args.h, m, column + r) * plain_read(ad.b, n, r);
        sum += ad.scale * update;
        column += ad.a.rows();
      }
      plain_write(args.y, m, n, plain_read(args.base, m, n) + sum * factor(args.output, m, n));
    }
  });
  return Status();
}

Status lora_delta_backward_ref(const ExecContext& ctx, const char* op,
                               const LoraDeltaBackwardArgs& args) {
  const int64_t rows = args.x.rows();
  const int64_t outputs = args.dy.cols();
  int64_t rank = 0;
  for (const LoraAdapter& ad : args.adapters) rank += ad.a.rows();
  Scratch<double> u;  // [M, sum of R]
  if (!u.allocate(ctx, rows * rank)) return out_of_memory(op);
  const auto dy = [&](int64_t m, int64_t n) {
    return plain_read(args.dy, m, n) * factor(args.output, m, n);
  };
  parallel_for(ctx, rows, [&](int64_t m) {
    int64_t column = 0;
    for (size_t i = 0; i < args.adapters.size(); ++i) {
      const LoraAdapter& ad = args.adapters[i];
      for (int64_t r = 0; r < ad.a.rows(); ++r) {
        double sum = 0;
        for (int64_t n = 0; has(args.samples, m, i) && n < outputs; ++n)
          sum += dy(m, n) * plain_read(ad.b, n, r);
        u.data()[m * rank + column++] = ad.scale * sum * rank_mask_factor(ad, args.samples, m, r);
      }
    }
    for (int64_t k = 0; args.dx.defined() && k < args.x.cols(); ++k) {
      double sum = 0;
      column = 0;
      for (size_t i = 0; i < args.adapters.size(); ++i) {
        const LoraAdapter& ad = args.adapters[i];
        double update = 0;
        for (int64_t r = 0; has(args.samples, m, i) && r < ad.a.rows(); ++r)
          update += u.data()[m * rank + column + r] * plain_read(ad.a, r, k);
        sum += update * factor(ad.dropout, m, k);
        column += ad.a.rows();
      }
      plain_write(args.dx, m, k, sum);
    }
  });
  int64_t column = 0;
  for (size_t i = 0; i < args.adapters.size(); ++i) {
    const LoraAdapter& ad = args.adapters[i];
    parallel_for(ctx, ad.a.rows(), [&](int64_t r) {
      for (int64_t k = 0; args.da[i].defined() && k < args.x.cols(); ++k) {
        double sum = 0;
        for (int64_t m = 0; m < rows; ++m) {
          if (has(args.samples, m, i))
            sum += u.data()[m * rank + column + r] * plain_read(args.x, m, k) *
                   factor(ad.dropout, m, k);
        }
        plain_write(args.da[i], r, k, sum);
      }
      for (int64_t n = 0; args.db[i].defined() && n < outputs; ++n) {
        double sum = 0;
        for (int64_t m = 0; m < rows; ++m) {
          if (has(args.samples, m, i)) sum += dy(m, n) * plain_read(args.h, m, column + r);
        }
        plain_write(args.db[i], n, r, ad.scale * sum);
      }
    });
    column += ad.a.rows();
  }
  return Status();
}

}  // namespace loraaccel
