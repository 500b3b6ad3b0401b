// The low-rank half of the LoRA family for float32 and 16-bit operands, shared by the kernels that differ in the frozen
// half. Sums in float32. Adapters of another type than x are read once into float scratch: they are small.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "lora/operands.h"
#include "lora/rank_rows.h"
#include "lora/simd/simd.h"
#include "loraaccel/lora_linear.h"
#include "tasks.h"

namespace loraaccel {

// The sum of the ranks.
int64_t total_rank(std::span<const LoraAdapter> adapters);

// The adapters of layers over one x, one after the other.
struct RankAdapters {
  std::vector<LoraAdapter> list;
  std::vector<int64_t> index;  // of each, in its own layer
  LoraSamples samples;

  explicit RankAdapters(const LoraSamples& s = {}) : samples(s) {}
  void add(std::span<const LoraAdapter> layer);
};

// h = H . (D(x) A^T) for all adapters, in their order; h is dense and has total_rank() columns. A block of x is read from
// memory once, whatever their number.
class RankHidden {
 public:
  Status prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op, const AnyRows& x,
                 int64_t rows, int64_t inputs, const RankAdapters& adapters, const TensorView& h);
  // This object must outlive them.
  Tasks tasks();
  Status status() const { return no_memory_ ? out_of_memory(op_) : Status(); }

 private:
  void run(int64_t block);
  void run_adapter(size_t i, int64_t row0, int64_t count, float* out, Scratch<float>* dropped);

  const LoraSimd* simd_ = nullptr;
  const ExecContext* ctx_ = nullptr;
  const char* op_ = "";
  AnyRows x_;
  int64_t rows_ = 0;
  int64_t inputs_ = 0;
  const RankAdapters* adapters_ = nullptr;
  TensorView h_;
  std::vector<Scratch<float>> copies_;
  std::vector<AnyRows> factors_;
  std::atomic<bool> no_memory_{false};
};

// The same, done.
Status rank_hidden(const LoraSimd& simd, const ExecContext& ctx, const char* op, const AnyRows& x,
                   int64_t rows, int64_t inputs, const RankAdapters& adapters, const TensorView& h);

// y += s h B^T, one pass over y. y has unit columns.
Status rank_expand(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                   std::span<const LoraAdapter> adapters, const LoraSamples& samples,
                   const TensorView& h, const TensorView& y);

// Panels of the matrix [rank, n] that continues a product: panel[c][n] for the rank columns c of every adapter that
// `take` names, dense. From B (transposed, times the scale) or from A.
enum class RankFactor { kScaledB, kA };
class RankPanels {
 public:
  Status prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op,
                 std::span<const LoraAdapter> adapters, RankFactor factor,
                 const std::vector<bool>& take);
  // One for each panel. This object must outlive them, and the adapters too.
  Tasks tasks();
  int64_t depth() const { return depth_; }
  const float* panel(int64_t index) const { return panels_.data() + index * depth_ * width_; }

  // Instead of prepare() and the tasks: panels that the caller fills.
  Status allocate(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t columns,
                  int64_t depth);
  float* writable(int64_t index) { return panels_.data() + index * depth_ * width_; }

 private:
  struct Part {
    AnyRows source;
    int64_t rank;
    float scale;
    Scratch<char> copy;
  };
  void run(int64_t panel);

  const LoraSimd* simd_ = nullptr;
  RankFactor factor_ = RankFactor::kA;
  std::deque<Part> parts_;
  Scratch<float> panels_;
  int64_t columns_ = 0;
  int64_t depth_ = 0;
  int64_t width_ = 0;
};

// One layer's part of a backward pass.
struct RankLayer {
  AnyRows dy;  // [M, outputs]; null: no gradient, as if zero
  int64_t outputs;
  std::span<const LoraAdapter> adapters;
  std::span<const TensorView> da, db;  // of each adapter; undefined: not wanted
};

// What the backward pass needs of the rank space, for layers over one x.
class RankBackward {
 public:
  // u = H . (s G B), [M, total]. Columns of adapters without dropout of their input come first. After this its tasks must
  // run.
  Status prepare(const LoraSimd& simd, const ExecContext& ctx, const char* op, int64_t rows,
                 std::span<const RankLayer> layers, const LoraSamples& samples);
  // This object must outlive them.
  Tasks tasks();
  const float* u() const { return u_.data(); }
  int64_t u_stride() const { return columns_; }
  // Of all layers, one after the other.
  std::span<const LoraAdapter> adapters() const { return adapters_.list; }
  // True for the adapters that continue the frozen product: without dropout of their input, and in use.
  const std::vector<bool>& in_panels() const { return in_panels_; }
  bool has_dropout() const { return plain_depth_ < columns_; }
  // Where samples have different adapters: the runs of rows and their columns of u. (Of a call with one layer.)
  const std::vector<RankRun>& runs() const { return runs_; }

  // dx += sum of D(u A) over the adapters with dropout, and u A over those without where `plain_too`. All parts are added
  // up first, so that dx is rounded once. dx has unit columns.
  Status add_to_dx(const LoraSimd& simd, const ExecContext& ctx, const TensorView& dx,
                   bool plain_too) const;
  // dA and dB of every adapter that wants them. h: as the forward pass left it.
  Status adapter_gradients(const LoraSimd& simd, const ExecContext& ctx, const AnyRows& x,
                           int64_t inputs, const TensorView& h) const;

 private:
  // One adapter with what its u is made of.
  struct Source {
    const RankLayer* layer;
    const LoraAdapter* adapter;
    AnyRows bt;  // B^T, [R, N]
    Scratch<char> copy;
  };
  void run(int64_t block);

  const LoraSimd* simd_ = nullptr;
  const char* op_ = "";
  int64_t rows_ = 0;
  int64_t block_ = 1;
  std::span<const RankLayer> layers_;
  std::deque<Source> sources_;
  RankAdapters adapters_;
  std::vector<RankRun> runs_;
  std::vector<int64_t> start_;  // first column of u of each adapter
  std::vector<bool> plain_;     // no dropout of the input
  std::vector<bool> in_panels_;
  int64_t columns_ = 0;
  int64_t plain_depth_ = 0;
  Scratch<float> u_;
};

// dbias[n] = sum over m of dy[m][n], sums in double.
void column_sums(const ExecContext& ctx, const AnyRows& dy, int64_t rows, const TensorView& out);

}  // namespace loraaccel
