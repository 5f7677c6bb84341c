// Operations on vectors that reading keys and values needs.
#pragma once
#include "simd.h"

namespace ts {

// Into the second-level cache: the first has too few places for lines under way.
inline void prefetch(const float* from) { __builtin_prefetch(from, 0, 2); }

// Keeps a value that several operations share from being loaded again for each.
inline F in_register(F value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// The sums of four vectors, each by the same tree.
inline void sum_four(const F (&a)[4], float* to) {
#if defined(TS_AVX512)
  auto add_pairs = [](F x, F y) {
    return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y),
                                          _mm512_unpackhi_ps((__m512)x, (__m512)y)));
  };
  const __m512d low = add_pairs(a[0], a[1]), high = add_pairs(a[2], a[3]);
  const __m512 wide = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m256 fours =
      _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#elif defined(TS_AVX2)
  const __m256 low = _mm256_hadd_ps((__m256)a[0], (__m256)a[1]);
  const __m256 fours = _mm256_hadd_ps(low, _mm256_hadd_ps((__m256)a[2], (__m256)a[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
#else
  for (int i = 0; i < 4; i++) to[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
#endif
}

}  // namespace ts
