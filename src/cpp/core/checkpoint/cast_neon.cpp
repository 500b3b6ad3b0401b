// Casts from float with NEON, whose conversion to binary16 every Armv8 has.
#include "checkpoint/cast.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

namespace loraaccel {
namespace cast_neon_body {
namespace {

void round_to_f16(const float* source, uint16_t* destination, size_t count) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const float16x4_t half = vcvt_f16_f32(vld1q_f32(source + i));
    vst1_u16(destination + i, vreinterpret_u16_f16(half));
  }
  for (; i < count; ++i) {
    const float16x4_t half = vcvt_f16_f32(vdupq_n_f32(source[i]));
    destination[i] = vget_lane_u16(vreinterpret_u16_f16(half), 0);
  }
}

#include "checkpoint/cast-inl.h"

}  // namespace
}  // namespace cast_neon_body

CastVariant cast_neon() { return {"neon", cast_neon_body::to_f16, cast_neon_body::to_bf16}; }

}  // namespace loraaccel

#else

namespace loraaccel {
CastVariant cast_neon() { return {"neon", nullptr, nullptr}; }
}  // namespace loraaccel

#endif
