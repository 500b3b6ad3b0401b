// The second half of an adapter in plain loops, sums in double: the oracle, and the way of float64.
#include "half.h"
#include "lora/plain.h"
#include "scratch.h"

namespace loraaccel {

Status lora_expand_forward_ref(const ExecContext& ctx, const LoraExpandArgs& args) {
  for (size_t i = 0; i < args.y.size(); ++i) {
    parallel_for(ctx, args.y[i].rows(), [&](int64_t m) {
      for (int64_t n = 0; n < args.b.rows(); ++n) {
        double sum = 0;
        for (int64_t r = 0; r < args.b.cols(); ++r)
          sum += plain_read(args.hidden[i], m, r) * plain_read(args.b, n, r);
        plain_write(args.y[i], m, n, plain_read(args.base[i], m, n) + args.scale * sum);
      }
    });
  }
  return Status();
}

Status lora_expand_backward_ref(const ExecContext& ctx, const LoraExpandBackwardArgs& args) {
  for (size_t i = 0; i < args.dhidden.size(); ++i) {
    parallel_for(ctx, args.dhidden[i].rows(), [&](int64_t m) {
      for (int64_t r = 0; r < args.b.cols(); ++r) {
        double sum = 0;
        for (int64_t n = 0; n < args.b.rows(); ++n)
          sum += plain_read(args.dy[i], m, n) * plain_read(args.b, n, r);
        plain_write(args.dhidden[i], m, r, args.scale * sum);
      }
    });
  }
  if (!args.db.defined()) return Status();
  parallel_for(ctx, args.db.rows(), [&](int64_t n) {
    for (int64_t r = 0; r < args.db.cols(); ++r) {
      double sum = 0;
      for (size_t i = 0; i < args.dy.size(); ++i) {
        for (int64_t m = 0; m < args.dy[i].rows(); ++m)
          sum += plain_read(args.dy[i], m, n) * plain_read(args.hidden[i], m, r);
      }
      plain_write(args.db, n, r, args.scale * sum);
    }
  });
  return Status();
}

}  // namespace loraaccel
