// Vectors of the host kernels: LANES floats, whatever the instruction set.
//
// Arithmetic on F and I is the compiler's own (+ - * /, comparisons give 0 or -1 a lane). The
// kernels are compiled without contraction, so only `fma` fuses: results do not depend on how a
// loop was unrolled.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(TS_AVX512) || defined(TS_AVX2)
#include <immintrin.h>
#elif defined(TS_NEON)
#include <arm_neon.h>
#endif

// Before a loop of constant length over vectors: without it they may live in memory.
#if defined(__clang__)
#define TS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TS_UNROLL _Pragma("GCC unroll 16")
#endif

#define TS_INLINE inline __attribute__((always_inline))
#define TS_NOINLINE __attribute__((noinline))  // registers of its own, not the caller's leftovers

namespace ts {

#if defined(TS_AVX512)
constexpr int LANES = 16;
#elif defined(TS_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));

// Into the second-level cache: the first has too few lines in flight to hide memory's latency.
// Always inlined, because GCC takes a function that only prefetches for one without effect.
TS_INLINE void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

inline F load(const float* from) {
  F value;
  memcpy(&value, from, sizeof value);
  return value;
}
inline void store(float* to, F value) { memcpy(to, &value, sizeof value); }
// The compiler must not add to a zero here: that costs an instruction and turns -0 into 0.
inline F splat(float value) {
#if defined(TS_AVX512)
  return (F)_mm512_set1_ps(value);
#elif defined(TS_AVX2)
  return (F)_mm256_set1_ps(value);
#else
  return F{value, value, value, value};
#endif
}
inline I splat(int32_t value) { return I{} + value; }

// The first `count` (0 .. LANES) floats, then zeros; touches no memory beyond them.
inline F load_first(const float* from, int count) {
#if defined(TS_AVX512)
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
  F value{};
  memcpy(&value, from, count * sizeof(float));
  return value;
#endif
}
inline void store_first(float* to, F value, int count) {
#if defined(TS_AVX512)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)value);
#else
  memcpy(to, &value, count * sizeof(float));
#endif
}

// a * b + c, rounded once where the hardware can.
inline F fma(F a, F b, F c) {
#if defined(TS_AVX512)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TS_AVX2)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(TS_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline F select(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }
// Where either is NaN the second wins.
inline F larger(F a, F b) { return select(a > b, a, b); }
inline F smaller(F a, F b) { return select(a < b, a, b); }
inline F absolute(F a) { return (F)((I)a & 0x7fffffff); }
inline F to_float(I a) { return __builtin_convertvector(a, F); }

// The sum of each of four vectors, every one by the same tree.
inline void sum_four(const F a, const F b, const F c, const F d, float* to) {
#if defined(TS_AVX512)
  auto add_pairs = [](F x, F y) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y),
                                          _mm512_unpackhi_ps((__m512)x, (__m512)y)));
  };
  const __m512d left = add_pairs(a, b), right = add_pairs(c, d);
  const __m512 wide = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  const __m256 fours =
      _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#elif defined(TS_AVX2)
  const __m256 left = _mm256_hadd_ps((__m256)a, (__m256)b);
  const __m256 fours = _mm256_hadd_ps(left, _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#else
  const F all[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) to[i] = (all[i][0] + all[i][2]) + (all[i][1] + all[i][3]);
#endif
}
inline float sum(F value) {
  float to[4];
  sum_four(value, F{}, F{}, F{}, to);
  return to[0];
}
inline float largest(F value) {
  float found = value[0];
  for (int i = 1; i < LANES; i++) found = value[i] > found ? value[i] : found;
  return found;
}

// e^x to 2 ulp for x in [-87, 88]; x is clamped to that range, NaN stays NaN.
inline F exponential(F x) {
  x = larger(splat(-87.0f), x);
  x = smaller(splat(88.0f), x);
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
  const F magic = splat(12582912.0f), shifted = fma(x, splat(1.44269504f), magic);
  const F whole = shifted - magic;
  F rest = fma(whole, splat(-0.693359375f), x);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  F p = splat(1.9875691500e-4f);
  p = fma(p, rest, splat(1.3981999507e-3f));
  p = fma(p, rest, splat(8.3334519073e-3f));
  p = fma(p, rest, splat(4.1665795894e-2f));
  p = fma(p, rest, splat(1.6666665459e-1f));
  p = fma(p, rest, splat(5.0000001201e-1f));
  p = fma(p, rest * rest, rest + 1.0f);
  return p * (F)(((I)shifted - (I)magic + 127) << 23);
}

inline F hyperbolic_tangent(F x) {
  F e = exponential(absolute(x) * -2.0f);
  F t = (1.0f - e) / (1.0f + e);
  return (F)((I)t | ((I)x & (int32_t)0x80000000));
}

// Pairs of 16-bit numbers, one pair a lane.
typedef int16_t S __attribute__((vector_size(4 * LANES)));

// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] in lane i.
inline I dot_pairs(S a, S b) {
#if defined(TS_AVX512)
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(TS_AVX2)
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(TS_NEON)
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return (I)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  const I left = (I)a, right = (I)b;
  return ((left << 16) >> 16) * ((right << 16) >> 16) + (left >> 16) * (right >> 16);
#endif
}

inline F from_bfloat16(H bits) { return (F)(__builtin_convertvector(bits, I) << 16); }
inline F from_float16(H bits) {
#if defined(TS_AVX512)
  return (F)_mm512_cvtph_ps((__m256i)bits);
#elif defined(TS_AVX2)
  return (F)_mm256_cvtph_ps((__m128i)bits);
#else
  const I half = __builtin_convertvector(bits, I);
  const I sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13;
  const F scaled = (F)rest * 5.192296858534828e33f;  // 2^112 moves the exponent's bias
  const I special = (I)(rest >= (0x7c00 << 13)) & 0x7f800000;
  return (F)((I)scaled | special | sign);
#endif
}
inline H load_halves(const uint16_t* from, int count = LANES) {
#if defined(TS_AVX512)
  return (H)_mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), from);
#else
  H bits{};
  if (count == LANES)
    memcpy(&bits, from, sizeof bits);
  else
    memcpy(&bits, from, count * sizeof(uint16_t));
  return bits;
#endif
}

}  // namespace ts
