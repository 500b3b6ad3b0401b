// The exponential, in floats that the compiler turns into vector code. Included inside a namespace of each unit that uses it.

// 2^n e^r, |r| <= ln 2 / 2: within 2 ulp for v from -87 to 88; 0 below, e^88 above. NaN stays NaN.
LORAACCEL_INLINE float fast_exp(float argument) {
  float v = argument > 88.0F ? 88.0F : argument;
  v = v < -87.0F ? -87.0F : v;
  const float shifted = v * 1.44269504F + 12582912.0F;  // the integer is in the last bits
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  const float n = shifted - 12582912.0F;
  float r = v - n * 0.693359375F;  // ln 2 in two parts
  r = r + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  bits = (bits - 0x4B400000U + 127U) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return argument < -87.0F ? 0.0F : p * scale;
}
