// Turning LANES rows of 32-bit words into columns of LANES words, and back.
#pragma once
#include "simd.h"

namespace ts {

// to[j * to_step + i] = from[i * from_step + j] for i, j < LANES. Bits only, so any 32-bit type.
inline void transpose_square(const float* from, int64_t from_step, float* to, int64_t to_step) {
#if defined(TS_AVX512)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(from + i * from_step);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + 2 + j]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  for (int j = 0; j < 4; j++) {  // a[4 q + j] holds, in each 128-bit part p, column 4 p + j
    const __m512 top = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);
    const __m512 upper = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
    const __m512 low = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    const __m512 lower = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    b[j] = _mm512_shuffle_f32x4(top, low, 0x88);
    b[8 + j] = _mm512_shuffle_f32x4(top, low, 0xdd);
    b[4 + j] = _mm512_shuffle_f32x4(upper, lower, 0x88);
    b[12 + j] = _mm512_shuffle_f32x4(upper, lower, 0xdd);
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_ps(to + i * to_step, b[i]);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) memcpy(to + j * to_step + i, from + i * from_step + j, 4);
#endif
}

// LANES rows of `count` words, `from_step` apart, become `count` groups of LANES words.
inline void transpose_words(const void* from, int64_t from_step, void* to, int64_t count) {
  const float* rows = static_cast<const float*>(from);
  float* columns = static_cast<float*>(to);
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES)
    transpose_square(rows + j, from_step, columns + j * LANES, LANES);
  for (; j < count; j++)
    for (int i = 0; i < LANES; i++) memcpy(columns + j * LANES + i, rows + i * from_step + j, 4);
}

}  // namespace ts
