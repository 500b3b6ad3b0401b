// Counter-based random numbers for dropout masks: Philox4x32-10
// (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include <math.h>
#include <stdint.h>

// static, not inline: units compiled for different CPUs include this file, and must not share one copy.
namespace loraaccel {

// Note [Dropout mask]
// keep(m, k) of a mask with key (seed, offset) is the comparison  word >= threshold(p),  word a 32-bit random number:
//   g = k / 64, w = (k % 64) / 16, l = k % 16
//   word = output word w of Philox4x32-10 with counter (16 g + l, m mod 2^32, m / 2^32, offset mod 2^32)
//                                         and key     (seed mod 2^32, seed / 2^32 xor offset / 2^32)
// So a row's mask depends on its index only, whatever the split of the work, and 16 neighbouring columns take
// neighbouring counters: sixteen lanes compute 64 columns without a shuffle.

constexpr int kDropoutGroup = 64;  // columns that one step of sixteen lanes covers

// keep where word >= threshold. 2^32 (p = 1) keeps nothing, hence 64 bits.
static inline uint64_t dropout_threshold(double p) { return (uint64_t)llround(p * 4294967296.0); }

// What kept values are multiplied by: 1 / (1 - p); 0 where nothing is kept.
static inline float dropout_keep_scale(double p) {
  return p < 1.0 ? (float)(1.0 / (1.0 - p)) : 0.0F;
}

// One word, for reference code. Kernels compute the same in lanes.
static inline uint32_t dropout_word(uint64_t seed, uint64_t offset, int64_t row, int64_t col) {
  const int64_t group = col / kDropoutGroup;
  const int in_group = (int)(col % kDropoutGroup);
  uint32_t c0 = (uint32_t)(16 * group + in_group % 16);
  uint32_t c1 = (uint32_t)row;
  uint32_t c2 = (uint32_t)((uint64_t)row >> 32);
  uint32_t c3 = (uint32_t)offset;
  uint32_t k0 = (uint32_t)seed;
  uint32_t k1 = (uint32_t)(seed >> 32) ^ (uint32_t)(offset >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)0xD2511F53U * c0;
    const uint64_t p1 = (uint64_t)0xCD9E8D57U * c2;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  const uint32_t words[4] = {c0, c1, c2, c3};
  return words[in_group / 16];
}

}  // namespace loraaccel
