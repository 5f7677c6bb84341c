// Unpacking codes of any width: 64 codes are 8 * BITS bytes, low bits first.
//
// Compiled with TS_FP4, the four bits of a code are a float: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the
// same negated. It is unpacked as the whole number of its halves, and FP4_ZERO more.
#pragma once
#include "matmul.h"

namespace ts {

#if defined(TS_FP4)
constexpr bool FP4 = true;
#else
constexpr bool FP4 = false;
#endif
constexpr int FP4_ZERO = 12;
constexpr int8_t FP4_HALVES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Bytes of the last chunk of a row, so that nothing beyond the row is read.
template <int BITS>
int64_t chunk_bytes(int64_t columns, int64_t chunk) {
  return smaller_of(8 * BITS, columns * BITS / 8 - chunk * 8 * BITS);
}

#if defined(TS_AVX512)

// Every 8 codes lie in BITS bytes: bring these to the low end of a 64-bit lane, then shift each
// code into a byte of its own, RAISED bits above the byte's low end. A raised float has its zero
// at 128 like every raised code.
template <int BITS, int RAISED = 0>
struct Unpacker {
  static constexpr int SHIFT = FP4 ? 0 : RAISED;
  __m512i order, shifts, mask, floats;

  Unpacker() {
    // Byte j of the 64: code j % 8 of the eight that start at byte j / 8 * BITS.
    const __m512i eighth = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i starts = _mm512_mullo_epi64(eighth, _mm512_set1_epi64(0x0101010101010101 * BITS));
    constexpr int64_t low_bytes = BITS == 8 ? -1 : (int64_t{1} << (8 * BITS % 64)) - 1;
    order = _mm512_add_epi8(starts, _mm512_set1_epi64(0x0706050403020100 & low_bytes));
    shifts = _mm512_sub_epi8(_mm512_set1_epi64(0x0706050403020100 * BITS),
                             _mm512_set1_epi8(SHIFT));
    mask = _mm512_set1_epi8((char)(((1 << BITS) - 1) << SHIFT));
    alignas(16) uint8_t table[16];
    for (int i = 0; i < 16; i++)
      table[i] = (uint8_t)(RAISED ? 128 + FP4_HALVES[i] * (1 << RAISED) : FP4_ZERO + FP4_HALVES[i]);
    floats = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
  }

  __m512i operator()(__m512i packed) const {
    if (BITS == 8) return packed;
    const __m512i placed = _mm512_permutexvar_epi8(order, packed);
    const __m512i codes = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, placed), mask);
    return FP4 ? _mm512_shuffle_epi8(floats, codes) : codes;
  }
};

// The first `count` (1 .. 64) bytes, then zeros; touches no memory beyond them.
inline __m512i load_bytes(const uint8_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi8(~0ull >> (64 - count), from);
}

template <int BITS>
inline void unpack_chunk(const uint8_t* from, int64_t bytes, uint8_t* to) {
  const Unpacker<BITS> unpack;
  _mm512_storeu_si512(to, unpack(load_bytes(from, bytes)));
}

#else

template <int BITS>
inline uint64_t spread(uint64_t packed) {
#if defined(TS_AVX2)
  return _pdep_u64(packed, 0x0101010101010101ull * ((1 << BITS) - 1));
#else
  uint64_t bytes = 0;
  for (int i = 0; i < 8; i++)
    bytes |= ((packed >> (BITS * i)) & ((1ull << BITS) - 1)) << (8 * i);
  return bytes;
#endif
}

template <int BITS>
inline void unpack_chunk(const uint8_t* from, int64_t bytes, uint8_t* to) {
  for (int j = 0; j < 8; j++) {
    uint64_t packed = 0;
    if (j * BITS < bytes) memcpy(&packed, from + j * BITS, BITS);
    const uint64_t codes = spread<BITS>(packed);
    memcpy(to + 8 * j, &codes, 8);
  }
  if (FP4)
    for (int j = 0; j < CHUNK; j++) to[j] = (uint8_t)(FP4_ZERO + FP4_HALVES[to[j]]);
}

#endif

inline F bytes_to_floats(const uint8_t* from) {
#if defined(TS_AVX512)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(TS_AVX2)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef uint8_t B __attribute__((vector_size(LANES)));
  B bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, F);
#endif
}

}  // namespace ts
