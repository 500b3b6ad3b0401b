// SHA-256 (FIPS 180-4), with the CPU's instructions for it where there are any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace loraaccel {

// Takes `count` blocks of 64 bytes, of any alignment, into the state.
using Sha256Blocks = void (*)(uint32_t* state, const uint8_t* data, size_t count);

struct Sha256Variant {
  const char* name;
  Sha256Blocks blocks;  // null where it is not compiled, or the CPU has not the instructions
};

// Best first; the last one is plain code.
std::span<const Sha256Variant> sha256_variants();

// Of sha256_ni.cpp and sha256_armv8.cpp; null on other processors. The caller asks the CPU.
Sha256Blocks sha256_ni_blocks();
Sha256Blocks sha256_armv8_blocks();

alignas(64) extern const uint32_t kSha256Rounds[64];

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256();
  explicit Sha256(Sha256Blocks blocks);
  void update(const void* data, size_t bytes);
  Digest finish();

 private:
  Sha256Blocks blocks_;
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> rest_;
  uint64_t total_ = 0;
};

std::string hex_text(const Sha256::Digest& digest);

}  // namespace loraaccel
