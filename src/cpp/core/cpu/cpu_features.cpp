#include "cpu/cpu_features.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace loraaccel {
namespace {

#if defined(__x86_64__) || defined(_M_X64)
// Not every compiler's __builtin_cpu_supports knows it.
bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_sha() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_SHA) != 0;
}

// gcc 12 does not know the newer one, and the operating system must have switched the tile registers on.
void detect_amx(CpuFeatures* f) {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return;
  unsigned enabled = 0;
  __asm__("xgetbv" : "=a"(enabled), "=d"(edx) : "c"(0));
  constexpr unsigned kTiles = 3U << 17;
  if ((enabled & kTiles) != kTiles) return;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return;
  f->amx_bf16 = (edx >> 22 & 1) != 0;
  const bool more = eax >= 1;
  if (more && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0)
    f->amx_fp16 = f->amx_bf16 && (eax >> 21 & 1) != 0;
}
#endif

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  f.sse42 = __builtin_cpu_supports("sse4.2") != 0;
  f.avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && has_f16c();
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") != 0 &&
             __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
             __builtin_cpu_supports("avx512vl") != 0;
  f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  f.sha_ni = has_sha() && __builtin_cpu_supports("sse4.1") != 0;
  detect_amx(&f);
#elif defined(__aarch64__)
  f.neon = true;  // part of the architecture
#if defined(__linux__) && defined(HWCAP2_BF16)
  f.neon_bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
#ifdef __APPLE__
  f.armv8_sha2 = true;  // every Arm Mac
#elif defined(__linux__)
  f.armv8_sha2 = (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0;
#endif
#endif
  return f;
}

}  // namespace

const CpuFeatures& cpu_features_detected() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace loraaccel
