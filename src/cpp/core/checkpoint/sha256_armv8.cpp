// SHA-256 with the cryptographic extension of Armv8.
#include "checkpoint/sha256.h"

#if defined(__aarch64__) && (defined(__ARM_FEATURE_CRYPTO) || defined(__ARM_FEATURE_SHA2))

#include <arm_neon.h>

namespace loraaccel {
namespace {

void armv8_blocks(uint32_t* state, const uint8_t* data, size_t count) {
  uint32x4_t abcd = vld1q_u32(state);
  uint32x4_t efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, data += 64) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      uint32x4_t& next = w[i % 4];
      if (i < 4) {
        next = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
      } else {
        next =
            vsha256su1q_u32(vsha256su0q_u32(next, w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      }
      const uint32x4_t k = vaddq_u32(next, vld1q_u32(kSha256Rounds + 4 * i));
      const uint32x4_t old = abcd;
      abcd = vsha256hq_u32(abcd, efgh, k);
      efgh = vsha256h2q_u32(efgh, old, k);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

}  // namespace

Sha256Blocks sha256_armv8_blocks() { return armv8_blocks; }

}  // namespace loraaccel

#else

namespace loraaccel {
Sha256Blocks sha256_armv8_blocks() { return nullptr; }
}  // namespace loraaccel

#endif
