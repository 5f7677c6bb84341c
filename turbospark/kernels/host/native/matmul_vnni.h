// Quantized products with integer activations on 8-bit dot products (AVX-512 VNNI).
#pragma once
#include "quantized.h"
#include "tile.h"
#include "unpack.h"

namespace ts {

// The group of every 32-bit lane of a chunk, counted from the chunk's first group.
template <int GROUP>
__m512i lane_groups() {
  alignas(64) int32_t lane[16];
  for (int j = 0; j < 16; j++) lane[j] = 4 * j / GROUP;
  return _mm512_load_si512(lane);
}

template <int BITS, int GROUP, bool PAIR>
struct IntegerProduct {
  static constexpr int CHUNKS = SCALE_WINDOW * GROUP / CHUNK;
  static constexpr int STEP = GROUP < SCALE_SPAN ? GROUP : SCALE_SPAN;  // one scale on each side

  Unpacker<BITS> unpack;
  __m512i groups_of_lanes, minus_zero;

  explicit IntegerProduct(const Matrix& w)
      : groups_of_lanes(lane_groups<GROUP>()), minus_zero(_mm512_set1_epi32(-w.zero)) {}

  template <int M>
  TS_NOINLINE void rows(const Matrix& w, const Row* x, int64_t first, int64_t last, float* y,
                        int64_t stride) const {
    const Layout layout(w, BITS, GROUP);
    for (int64_t row = first; row < last; row += 4)
      four_rows<M>(w, layout, x, row, last, y, stride);
  }

  template <int M>
  TS_INLINE void four_rows(const Matrix& w, const Layout& layout, const Row* x, int64_t row,
                        int64_t last, float* y, int64_t stride) const {
    const QuantizedRows rows(w, layout, row);
    const int64_t chunks = layout.chunks;
    const __mmask64 all = Unpacker<BITS>::bytes_mask(8 * BITS);
    const __mmask64 rest = Unpacker<BITS>::bytes_mask(layout.rest_bytes);
    F total[M][4] = {};
    for (int64_t window = 0; window < chunks; window += CHUNKS) {
      const int64_t group = window * CHUNK / GROUP, end = smaller_of(chunks, window + CHUNKS);
      const int count = (int)smaller_of(SCALE_WINDOW, rows.groups - group);
      F scales[4];
      TS_UNROLL for (int i = 0; i < 4; i++) {
        const int64_t at = rows.first_group[i] + group;
        scales[i] = load_elements(w.scales, at, w.element, count);
        prefetch_scales(w, at + layout.scales_ahead);
      }
      for (int64_t c = window; c < end; c++) {
        const __mmask64 bytes = c + 1 < chunks ? all : rest;
        const int at = (int)((c - window) * CHUNK / GROUP);
        const __m512i lanes = _mm512_add_epi32(groups_of_lanes, _mm512_set1_epi32(at));
        __m512i start[M];
        TS_UNROLL for (int m = 0; m < M; m++) {
          start[m] = _mm512_mullo_epi32(minus_zero, _mm512_loadu_si512(x[m].quads + c * 16));
        }
        TS_UNROLL for (int i = 0; i < 4; i++) {
          const uint8_t* from = rows.codes[i] + c * 8 * BITS;
          prefetch(from + layout.ahead);
          const __m512i codes = unpack(from, bytes);
          const F scale = (F)_mm512_permutexvar_ps(lanes, (__m512)scales[i]);
          TS_UNROLL for (int m = 0; m < M; m++) {
            const F dot = to_float((I)chunk_dot(codes, x[m], c, start[m]));
            total[m][i] = fma(dot, scale * load(x[m].scales + c * 16), total[m][i]);
          }
        }
      }
    }
    TS_UNROLL for (int m = 0; m < M; m++) {
      if (w.biases) add_biases(w, rows, x[m].sums_of(GROUP, w.columns), total[m]);
      store_four(w, total[m], row, last, y + m * stride);
    }
  }

  static __m512i chunk_dot(__m512i codes, const Row& x, int64_t chunk, __m512i start) {
    const __m512i high = _mm512_loadu_si512(x.high + chunk * CHUNK);
    if (!PAIR) return _mm512_dpbusd_epi32(start, codes, high);
    const __m512i upper = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, high);
    const __m512i carried = _mm512_add_epi32(_mm512_slli_epi32(upper, 7), start);
    return _mm512_dpbusd_epi32(carried, codes, _mm512_loadu_si512(x.low + chunk * CHUNK));
  }

  struct Block {
    int64_t step;
    uint8_t* codes;  // [BLOCK_ROWS][padded]
    BlockScales at;

    Block(char* scratch, int64_t columns)
        : step(padded(columns)),
          codes(reinterpret_cast<uint8_t*>(scratch)),
          at(scratch + BLOCK_ROWS * step, columns, GROUP) {}
  };

  void unpack_rows(const Matrix& w, int64_t first, const Block& block) const {
    for (int i = 0; i < BLOCK_ROWS; i++) {
      const int64_t r = clamp_row(w, first + i);
      const uint8_t* from = w.data + r * (w.columns * BITS / 8);
      for (int64_t c = 0; c < block.step / CHUNK; c++) {
        const auto bytes = Unpacker<BITS>::bytes_mask(chunk_bytes<BITS>(w.columns, c));
        uint8_t* to = block.codes + i * block.step + c * CHUNK;
        _mm512_storeu_si512(to, unpack(from + c * 8 * BITS, bytes));
      }
      block.at.load_row(w, r, i);
    }
  }

  static constexpr int ROWS = 8;  // rows that `some_rows` takes

  // Products of some unpacked rows with one tile.
  template <bool BIASED>
  void some_rows(const Block& block, int first, const Tiles& x, int64_t tile, F* total) const {
    const int64_t step = block.step;
    const int8_t *high = x.high + tile * step * LANES, *low = x.low + tile * step * LANES;
    const float* scales = x.scales + tile * (step / SCALE_SPAN) * LANES;
    const int32_t* sums = x.sums + tile * (step / 16) * LANES;
    const uint8_t* codes = block.codes + first * step;
    F found[ROWS] = {};
    for (int64_t k = 0; k < x.columns; k += STEP) {
      const I sum = sum_of_step<STEP>(sums, k);
      const __m512i start = _mm512_mullo_epi32(minus_zero, (__m512i)sum);
      __m512i upper[ROWS], lower[ROWS];
      TS_UNROLL for (int i = 0; i < ROWS; i++) {
        upper[i] = PAIR ? _mm512_setzero_si512() : start;
        lower[i] = start;
      }
      TS_UNROLL for (int j = 0; j < STEP / 4; j++) {
        const __m512i a = _mm512_loadu_si512(high + (k / 4 + j) * 64);
        const __m512i b = PAIR ? _mm512_loadu_si512(low + (k / 4 + j) * 64) : a;
        TS_UNROLL for (int i = 0; i < ROWS; i++) {
          int32_t four;
          memcpy(&four, codes + i * step + k + 4 * j, 4);
          const __m512i weight = _mm512_set1_epi32(four);
          upper[i] = _mm512_dpbusd_epi32(upper[i], weight, a);
          if (PAIR) lower[i] = _mm512_dpbusd_epi32(lower[i], weight, b);
        }
      }
      const F scale = load(scales + k / SCALE_SPAN * LANES);
      const F biased = BIASED ? to_float(sum) * scale : F{};
      TS_UNROLL for (int i = 0; i < ROWS; i++) {
        const int64_t group = (first + i) * block.at.step + k / GROUP;
        const __m512i dot =
            PAIR ? _mm512_add_epi32(_mm512_slli_epi32(upper[i], 7), lower[i]) : upper[i];
        found[i] =
            fma(to_float((I)dot) * scale, splat(block.at.scales[group]), found[i]);
        if (BIASED)
          found[i] = fma(biased, splat(block.at.biases[group]), found[i]);
      }
    }
    TS_UNROLL for (int i = 0; i < ROWS; i++) total[i] = found[i];
  }
};

}  // namespace ts

#include "integer_products.h"
