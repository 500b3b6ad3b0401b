#include "checkpoint/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/cpu_features.h"

namespace loraaccel {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(64) const uint32_t kSha256Rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

namespace {

uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

void plain_blocks(uint32_t* state, const uint8_t* data, size_t count) {
  for (; count > 0; --count, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15];
      const uint32_t b = w[i - 2];
      const uint32_t s0 = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
      const uint32_t s1 = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    std::copy_n(state, 8, v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t t1 = v[7] + s1 + choice + kSha256Rounds[i] + w[i];
      const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      for (int j = 7; j > 0; --j) v[j] = v[j - 1];
      v[4] += t1;
      v[0] = t1 + s0 + majority;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

}  // namespace

std::span<const Sha256Variant> sha256_variants() {
  static const CpuFeatures& cpu = cpu_features_detected();
  static const Sha256Variant variants[] = {
      {"sha_ni", cpu.sha_ni ? sha256_ni_blocks() : nullptr},
      {"armv8", cpu.armv8_sha2 ? sha256_armv8_blocks() : nullptr},
      {"plain", plain_blocks},
  };
  return variants;
}

Sha256::Sha256() : Sha256(nullptr) {
  for (const Sha256Variant& variant : sha256_variants()) {
    if (blocks_ == nullptr) blocks_ = variant.blocks;
  }
}

// The state begins as the fractional parts of the square roots of the first 8 primes.
Sha256::Sha256(Sha256Blocks blocks)
    : blocks_(blocks),
      state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
      rest_{} {}

void Sha256::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  const size_t held = total_ % 64;
  total_ += bytes;
  if (held > 0) {
    const size_t take = std::min(bytes, 64 - held);
    std::copy_n(p, take, rest_.data() + held);
    p += take;
    bytes -= take;
    if (held + take < 64) return;
    blocks_(state_.data(), rest_.data(), 1);
  }
  if (bytes >= 64) blocks_(state_.data(), p, bytes / 64);
  std::copy_n(p + bytes / 64 * 64, bytes % 64, rest_.data());
}

Sha256::Digest Sha256::finish() {
  const uint64_t bits = total_ * 8;
  const uint8_t padding[64] = {0x80};
  update(padding, 1 + (119 - total_ % 64) % 64);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, sizeof length);
  Digest digest;
  for (size_t i = 0; i < 32; ++i)
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - i % 4 * 8));
  return digest;
}

std::string hex_text(const Sha256::Digest& digest) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kHex[byte >> 4];
    text += kHex[byte & 15];
  }
  return text;
}

}  // namespace loraaccel
