// Which vector instructions the kernels may use on this CPU.
#pragma once

namespace loraaccel {

struct CpuFeatures {
  bool sse42 = false;
  bool avx2 = false;         // AVX2, FMA and F16C together
  bool avx512 = false;       // AVX-512 F, BW, DQ and VL
  bool avx512_bf16 = false;  // the above and AVX512_BF16
  bool amx_bf16 = false;     // matrix unit (AMX) for bfloat16, which no kernel of ours uses
  bool amx_fp16 = false;     // and for float16
  bool sha_ni = false;       // SHA extensions and SSE4.1
  bool neon = false;
  bool neon_bf16 = false;  // BFDOT
  bool armv8_sha2 = false;
};

// Asked once, then constant.
const CpuFeatures& cpu_features_detected();

}  // namespace loraaccel
