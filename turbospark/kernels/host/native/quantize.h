// Rounding activations to the integer forms, 32 values under one scale.
#pragma once
#include "matmul.h"

namespace ts {

enum Mode : int32_t { EXACT = 0, PAIR = 1, INT8 = 2 };

#if defined(TS_AVX512)
constexpr bool EIGHT_BIT_DOTS = true;
#else
constexpr bool EIGHT_BIT_DOTS = false;
#endif

constexpr float LARGEST_PAIR = 127 * 128, LARGEST_INT8 = 127;

// Where one row goes; arrays that a form does not have are null.
struct Rounded {
  int8_t *high, *low;
  int16_t* whole;
  int32_t* minus_quads;  // or null where they are not wanted
  float* scales;         // one a span
  int32_t* sums;         // one for 16 columns
};

// The whole numbers nearest to x * inverse; they must be below 2^22.
inline I round_scaled(const float* x, F inverse) {
  const F magic = splat(12582912.0f);  // 1.5 * 2^23 leaves whole numbers in the low bits
  return (I)(load(x) * inverse + magic) - (I)magic;
}

// The scale of a span and what to multiply it by. NaN counts as the largest of all, as its bits
// do, and spoils the scale; so nothing that is not finite is rounded away.
inline float span_scale(const float* x, float most, F* inverse) {
  I found = I{};
  for (int64_t k = 0; k < SCALE_SPAN; k += LANES) {
    const I bits = (I)absolute(load(x + k));
#if defined(TS_AVX512)
    found = (I)_mm512_max_epi32((__m512i)found, (__m512i)bits);
#else
    const I above = bits > found;
    found = (above & bits) | (~above & found);
#endif
  }
#if defined(TS_AVX512)
  const int32_t largest = _mm512_reduce_max_epi32((__m512i)found);
#else
  int32_t largest = 0;
  for (int i = 0; i < LANES; i++) largest = found[i] > largest ? found[i] : largest;
#endif
  float magnitude;
  memcpy(&magnitude, &largest, sizeof magnitude);
  *inverse = splat(magnitude > 0 ? most / magnitude : 0.0f);
  return magnitude / most;
}

#if defined(TS_AVX512)

inline void store_bytes(int8_t* to, I value) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)value));
}

// x and everything else padded to whole chunks.
inline void round_row(const float* x, int64_t step, int32_t mode, const Rounded& to) {
  const bool pair = mode == PAIR;
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t k = 0; k < step; k += CHUNK) {
    for (int64_t span = k; span < k + CHUNK; span += SCALE_SPAN) {
      F inverse;
      to.scales[span / SCALE_SPAN] =
          span_scale(x + span, pair ? LARGEST_PAIR : LARGEST_INT8, &inverse);
      for (int64_t j = span; j < span + SCALE_SPAN; j += LANES) {
        const I q = round_scaled(x + j, inverse);
        const I high = pair ? (q + 64) >> 7 : q;
        store_bytes(to.high + j, high);
        if (pair) store_bytes(to.low + j, q - (high << 7));
      }
    }
    __m512i quads = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones,
                                        _mm512_loadu_si512(to.high + k));
    if (pair)
      quads = _mm512_dpbusd_epi32(_mm512_slli_epi32(quads, 7), ones,
                                  _mm512_loadu_si512(to.low + k));
    if (to.minus_quads)
      _mm512_storeu_si512(to.minus_quads + k / 4, _mm512_sub_epi32(_mm512_setzero_si512(), quads));
    quads = _mm512_add_epi32(quads, _mm512_shuffle_epi32(quads, _MM_PERM_CDAB));
    quads = _mm512_add_epi32(quads, _mm512_shuffle_epi32(quads, _MM_PERM_BADC));
    const __m512i four = _mm512_maskz_compress_epi32(0x1111, quads);
    _mm_storeu_si128((__m128i*)(to.sums + k / 16), _mm512_castsi512_si128(four));
  }
}

#else

inline void round_row(const float* x, int64_t step, int32_t mode, const Rounded& to) {
  typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
  for (int64_t k = 0; k < step; k += SCALE_SPAN) {
    F inverse;
    to.scales[k / SCALE_SPAN] =
        span_scale(x + k, mode == PAIR ? LARGEST_PAIR : LARGEST_INT8, &inverse);
    for (int64_t half = k; half < k + SCALE_SPAN; half += 16) {
      I sums = I{};
      for (int64_t j = half; j < half + 16; j += LANES) {
        const I q = round_scaled(x + j, inverse);
        const Shorts narrow = __builtin_convertvector(q, Shorts);
        memcpy(to.whole + j, &narrow, sizeof narrow);
        sums += q;
      }
      int32_t total = 0;
      for (int i = 0; i < LANES; i++) total += sums[i];
      to.sums[half / 16] = total;
    }
  }
}

#endif

}  // namespace ts
