// Quantized products with integer activations on 8-bit dot products (AVX-512 VNNI).
#pragma once
#include "quantized.h"
#include "tile.h"
#include "unpack.h"

namespace ts {

// What unit of the `size` columns every 32-bit lane of a chunk lies in, from the chunk's first on.
inline __m512i lane_units(int size) {
  alignas(64) int32_t lane[16];
  for (int j = 0; j < 16; j++) lane[j] = 4 * j / size;
  return _mm512_load_si512(lane);
}

// Codes are multiplied at the upper end of their bytes: there the code that stands for 0 is 128,
// which is also what a high half counts for.
template <int BITS, int GROUP, bool PAIR>
struct IntegerProduct {
  static constexpr int STEP = GROUP < SCALE_SPAN ? GROUP : SCALE_SPAN;  // one scale on each side
  static constexpr int CHUNKS = LANES * STEP / CHUNK;                   // of a window of scales
  static constexpr int RAISED = FP4 ? 3 : 8 - BITS;  // a float's halves need five bits

  Unpacker<BITS, RAISED> raise;
  __m512i steps_of_lanes, minus_zero, has_zero;

  explicit IntegerProduct(const Matrix& w)
      : steps_of_lanes(lane_units(STEP)),
        minus_zero(_mm512_set1_epi32(-w.zero)),
        has_zero(_mm512_set1_epi32(w.zero ? -1 : 0)) {}

  template <int M>
  TS_NOINLINE void rows(const Matrix& w, const Row* x, int64_t first, int64_t last, float* y,
                        int64_t stride) const {
    const Layout layout(w, BITS, GROUP);
    const int64_t whole = w.rows * layout.row_bytes - CHUNK;
    for (int64_t row = first; row < last; row += 4) {
      if ((row + 4) * layout.row_bytes <= whole)
        four_rows<M, true>(w, layout, x, row, last, y, stride);
      else
        four_rows<M, false>(w, layout, x, row, last, y, stride);
    }
  }

  // BEFORE_END: a vector may be read from any of their codes on. What lies behind a row then
  // meets activations of zero.
  template <int M, bool BEFORE_END>
  TS_INLINE void four_rows(const Matrix& w, const Layout& layout, const Row* x, int64_t row,
                        int64_t last, float* y, int64_t stride) const {
    const QuantizedRows rows(w, layout, row);
    const int64_t chunks = layout.chunks;
    F total[M][4] = {};
    for (int64_t window = 0; window < chunks; window += CHUNKS) {
      const int64_t end = smaller_of(chunks, window + CHUNKS);
      F scales[M][4];
      window_scales<M>(w, layout, rows, x, window, scales);
      __m512i lanes = steps_of_lanes;
      for (int64_t c = window; c < end; c++) {
        const int64_t bytes = c + 1 < chunks ? 8 * BITS : layout.rest_bytes;
        __m512i start[M];
        TS_UNROLL for (int m = 0; m < M; m++) {
          start[m] = minus_zeros(_mm512_loadu_si512(x[m].minus_quads + c * 16));
        }
        TS_UNROLL for (int i = 0; i < 4; i++) {
          const uint8_t* from = rows.codes[i] + c * 8 * BITS;
          prefetch(from + layout.ahead);
          const __m512i codes =
              raise(BEFORE_END ? _mm512_loadu_si512(from) : load_bytes(from, bytes));
          TS_UNROLL for (int m = 0; m < M; m++) {
            const F scale = (F)_mm512_permutexvar_ps(lanes, (__m512)scales[m][i]);
            const F dot = to_float((I)chunk_dot(codes, x[m], c, start[m]));
            total[m][i] = fma(dot, scale, total[m][i]);
          }
        }
        lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(CHUNK / STEP));
      }
    }
    TS_UNROLL for (int m = 0; m < M; m++) {
      TS_UNROLL for (int i = 0; i < 4; i++) total[m][i] = total[m][i] * (1.0f / (1 << RAISED));
      if (w.biases) add_biases(w, rows, x[m].sums_of(GROUP, w.columns), total[m]);
      store_four(w, total[m], row, last, y + m * stride);
    }
  }

  // Scales of LANES steps from chunk `window` on, of the weights times those of the activations.
  template <int M>
  TS_INLINE void window_scales(const Matrix& w, const Layout& layout, const QuantizedRows& rows,
                               const Row* x, int64_t window, F (&scales)[M][4]) const {
    constexpr int GROUPS = LANES * STEP / GROUP, SPANS = LANES * STEP / SCALE_SPAN;
    const int64_t group = window * CHUNK / GROUP, span = window * CHUNK / SCALE_SPAN;
    const int groups = (int)smaller_of(GROUPS, rows.groups - group);
    const int spans = (int)smaller_of(SPANS, layout.chunks * CHUNK / SCALE_SPAN - span);
    F inputs[M];
    TS_UNROLL for (int m = 0; m < M; m++) {
      inputs[m] = spread<SPANS>(load_first(x[m].scales + span, spans));
    }
    TS_UNROLL for (int i = 0; i < 4; i++) {
      const int64_t at = rows.first_group[i] + group;
      const F weights = spread<GROUPS>(load_elements(w.scales, at, w.element, groups));
      prefetch_scales(w, at + layout.scales_ahead);
      TS_UNROLL for (int m = 0; m < M; m++) scales[m][i] = weights * inputs[m];
    }
  }

  // COUNT lanes repeated so that they fill the vector.
  template <int COUNT>
  static F spread(F few) {
    if (COUNT == LANES) return few;
    return (F)_mm512_permutexvar_ps(lane_units(4 * LANES / COUNT), (__m512)few);
  }

  // What the codes that stand for 0 take away from a dot product, before its high half is raised.
  TS_INLINE __m512i minus_zeros(__m512i minus_quads) const {
    const __m512i zeros = _mm512_and_si512(has_zero, minus_quads);
    return PAIR ? zeros : _mm512_slli_epi32(zeros, 7);
  }

  static __m512i chunk_dot(__m512i codes, const Row& x, int64_t chunk, __m512i start) {
    const __m512i high = _mm512_loadu_si512(x.high + chunk * CHUNK);
    const __m512i upper = _mm512_dpbusd_epi32(start, codes, high);
    if (!PAIR) return upper;
    const __m512i low = _mm512_loadu_si512(x.low + chunk * CHUNK);
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(upper, 7), codes, low);
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
        uint8_t* to = block.codes + i * block.step + c * CHUNK;
        unpack_chunk<BITS>(from + c * 8 * BITS, chunk_bytes<BITS>(w.columns, c), to);
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
