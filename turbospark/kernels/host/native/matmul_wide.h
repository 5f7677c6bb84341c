// Quantized products with integer activations of 16 bits, where there is no 8-bit dot product.
//
// An activation of either integer form fits 16 bits whole, so one multiplication does what takes
// two on 8-bit planes; codes are unpacked less their zero.
#pragma once
#include "quantized.h"
#include "tile.h"
#include "unpack.h"

namespace ts {

constexpr int PAIRS = 2 * LANES;  // 16-bit numbers of a vector

template <int BITS>
inline void unpack_wide(const uint8_t* from, int64_t bytes, int zero, int16_t* to) {
  typedef uint8_t Bytes __attribute__((vector_size(PAIRS)));
  uint8_t codes[CHUNK];
  unpack_chunk<BITS>(from, bytes, codes);
  TS_UNROLL for (int j = 0; j < CHUNK; j += PAIRS) {
    Bytes narrow;
    memcpy(&narrow, codes + j, sizeof narrow);
    const S wide = __builtin_convertvector(narrow, S) - (int16_t)zero;
    memcpy(to + j, &wide, sizeof wide);
  }
}

inline S load_pairs(const int16_t* from) {
  S value;
  memcpy(&value, from, sizeof value);
  return value;
}

// BOTH is there to have the names of matmul_vnni.h: both integer forms are the same here.
template <int BITS, int GROUP, bool BOTH>
struct IntegerProduct {
  static constexpr int CHUNKS = SCALE_WINDOW * GROUP / CHUNK;
  static constexpr int STEP = GROUP < SCALE_SPAN ? GROUP : SCALE_SPAN;  // one scale on each side

  explicit IntegerProduct(const Matrix&) {}

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
    F total[M][4] = {};
    for (int64_t window = 0; window < layout.chunks; window += CHUNKS) {
      const int64_t group = window * CHUNK / GROUP;
      const int64_t end = smaller_of(layout.chunks, window + CHUNKS);
      float scales[4][SCALE_WINDOW];
      TS_UNROLL for (int i = 0; i < 4; i++) {
        const int64_t at = rows.first_group[i] + group;
        load_window(w.scales, w.element, at, rows.groups - group, scales[i]);
        prefetch_scales(w, at + layout.scales_ahead);
      }
      for (int64_t c = window; c < end; c++) {
        const int64_t bytes = c + 1 < layout.chunks ? 8 * BITS : layout.rest_bytes;
        TS_UNROLL for (int i = 0; i < 4; i++) {
          int16_t codes[CHUNK];
          const uint8_t* from = rows.codes[i] + c * 8 * BITS;
          prefetch(from + layout.ahead);
          unpack_wide<BITS>(from, bytes, w.zero, codes);
          const float* scale = scales[i] + (c - window) * CHUNK / GROUP;
          TS_UNROLL for (int m = 0; m < M; m++) {
            total[m][i] = add_chunk(codes, x[m], c * CHUNK, scale, total[m][i]);
          }
        }
      }
    }
    TS_UNROLL for (int m = 0; m < M; m++) {
      if (w.biases) add_biases(w, rows, x[m].sums_of(GROUP, w.columns), total[m]);
      store_four(w, total[m], row, last, y + m * stride);
    }
  }

  static F add_chunk(const int16_t* codes, const Row& x, int64_t at, const float* scale, F total) {
    TS_UNROLL for (int k = 0; k < CHUNK; k += STEP) {
      I dot = dot_pairs(load_pairs(codes + k), load_pairs(x.whole + at + k));
      TS_UNROLL for (int j = PAIRS; j < STEP; j += PAIRS) {
        dot += dot_pairs(load_pairs(codes + k + j), load_pairs(x.whole + at + k + j));
      }
      const float both = scale[k / GROUP] * x.scales[(at + k) / SCALE_SPAN];
      total = fma(to_float(dot), splat(both), total);
    }
    return total;
  }

  struct Block {
    int64_t step;
    int16_t* codes;  // [BLOCK_ROWS][padded]
    BlockScales at;

    Block(char* scratch, int64_t columns)
        : step(padded(columns)),
          codes(reinterpret_cast<int16_t*>(scratch)),
          at(scratch + BLOCK_ROWS * step * 2, columns, GROUP) {}
  };

  void unpack_rows(const Matrix& w, int64_t first, const Block& block) const {
    for (int i = 0; i < BLOCK_ROWS; i++) {
      const int64_t r = clamp_row(w, first + i);
      const uint8_t* from = w.data + r * (w.columns * BITS / 8);
      for (int64_t c = 0; c < block.step / CHUNK; c++)
        unpack_wide<BITS>(from + c * 8 * BITS, chunk_bytes<BITS>(w.columns, c), w.zero,
                          block.codes + i * block.step + c * CHUNK);
      block.at.load_row(w, r, i);
    }
  }

  static constexpr int ROWS = 4;  // rows that `some_rows` takes

  // Products of some unpacked rows with one tile.
  template <bool BIASED>
  void some_rows(const Block& block, int first, const Tiles& x, int64_t tile, F* total) const {
    const int16_t* values = x.whole + tile * block.step * LANES;
    const float* scales = x.scales + tile * (block.step / SCALE_SPAN) * LANES;
    const int32_t* sums = x.sums + tile * (block.step / 16) * LANES;
    const int16_t* codes = block.codes + first * block.step;
    F found[ROWS] = {};
    for (int64_t k = 0; k < x.columns; k += STEP) {
      I dots[ROWS] = {};
      TS_UNROLL for (int j = 0; j < STEP; j += 2) {
        const S a = load_pairs(values + (k + j) * LANES);
        TS_UNROLL for (int i = 0; i < ROWS; i++) {
          int32_t two;
          memcpy(&two, codes + i * block.step + k + j, 4);
          dots[i] += dot_pairs((S)splat(two), a);
        }
      }
      const F scale = load(scales + k / SCALE_SPAN * LANES);
      const F biased = BIASED ? to_float(sum_of_step<STEP>(sums, k)) * scale : F{};
      TS_UNROLL for (int i = 0; i < ROWS; i++) {
        const int64_t group = (first + i) * block.at.step + k / GROUP;
        found[i] = fma(to_float(dots[i]) * scale, splat(block.at.scales[group]), found[i]);
        if (BIASED) found[i] = fma(biased, splat(block.at.biases[group]), found[i]);
      }
    }
    TS_UNROLL for (int i = 0; i < ROWS; i++) total[i] = found[i];
  }
};

}  // namespace ts

#include "integer_products.h"
