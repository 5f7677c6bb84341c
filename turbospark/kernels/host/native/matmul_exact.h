// Quantized products with float32 activations.
#pragma once
#include "quantized.h"
#include "tile.h"
#include "unpack.h"

namespace ts {

template <int BITS, int GROUP>
struct ExactProduct {
  static constexpr int VECTORS = CHUNK / LANES;          // vectors of a chunk
  static constexpr int SPAN = GROUP < CHUNK ? GROUP : CHUNK;  // columns under one scale at a time
  static constexpr int CHUNKS = SCALE_WINDOW * GROUP / CHUNK;  // chunks of a scale window

#if defined(TS_AVX512)
  Unpacker<BITS> unpack;
  __m512i places[VECTORS];
  F offset;

  explicit ExactProduct(const Matrix& w) {
    for (int v = 0; v < VECTORS; v++) {
      alignas(64) int32_t place[16];
      for (int j = 0; j < 16; j++) place[j] = 16 * v + j;
      places[v] = _mm512_load_si512(place);
    }
    offset = splat(8388608.0f + (float)w.zero);
  }

  // A code put into the low byte of 2^23 is the float 2^23 + code.
  void floats(const uint8_t* from, int64_t bytes, F* to) const {
    const __m512i codes = unpack(load_bytes(from, bytes));
    const __m512i base = _mm512_set1_epi32(0x4b000000);
    TS_UNROLL for (int v = 0; v < VECTORS; v++) {
      to[v] = (F)_mm512_mask_permutexvar_epi8(base, 0x1111111111111111ull, places[v], codes);
      to[v] = to[v] - offset;
    }
  }
#else
  F offset;

  explicit ExactProduct(const Matrix& w) : offset(splat((float)w.zero)) {}

  void floats(const uint8_t* from, int64_t bytes, F* to) const {
    uint8_t codes[CHUNK];
    unpack_chunk<BITS>(from, bytes, codes);
    TS_UNROLL for (int v = 0; v < VECTORS; v++) {
      to[v] = bytes_to_floats(codes + v * LANES) - offset;
    }
  }
#endif

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
    F total[M][4] = {};
    for (int64_t window = 0; window < chunks; window += CHUNKS) {
      const int64_t group = window * CHUNK / GROUP, end = smaller_of(chunks, window + CHUNKS);
      float scales[4][SCALE_WINDOW];
      TS_UNROLL for (int i = 0; i < 4; i++) {
        const int64_t at = rows.first_group[i] + group;
        load_window(w.scales, w.element, at, rows.groups - group, scales[i]);
        prefetch_scales(w, at + layout.scales_ahead);
      }
      for (int64_t c = window; c < end; c++) {
        const int64_t bytes = c + 1 < chunks ? 8 * BITS : layout.rest_bytes;
        TS_UNROLL for (int i = 0; i < 4; i++) {
          const uint8_t* codes = rows.codes[i] + c * 8 * BITS;
          prefetch(codes + layout.ahead);
          F values[VECTORS];
          floats(codes, bytes, values);
          const float* scale = scales[i] + (c - window) * CHUNK / GROUP;
          TS_UNROLL for (int m = 0; m < M; m++) {
            total[m][i] = add_chunk(values, x[m].values + c * CHUNK, scale, total[m][i]);
          }
        }
      }
    }
    TS_UNROLL for (int m = 0; m < M; m++) {
      if (w.biases) add_biases(w, rows, x[m].sums_of(GROUP, w.columns), total[m]);
      store_four(w, total[m], row, last, y + m * stride);
    }
  }

  static F add_chunk(const F* values, const float* x, const float* scale, F total) {
    constexpr int PER_SPAN = SPAN / LANES;
    TS_UNROLL for (int s = 0; s < CHUNK / SPAN; s++) {
      F part = values[s * PER_SPAN] * load(x + s * SPAN);
      TS_UNROLL for (int v = 1; v < PER_SPAN; v++) {
        part = fma(values[s * PER_SPAN + v], load(x + s * SPAN + v * LANES), part);
      }
      total = fma(part, splat(scale[s]), total);
    }
    return total;
  }

  void expand(const Matrix& w, int64_t row, float* to) const {
    const int64_t groups = w.columns / GROUP;
    const uint8_t* codes = w.data + row * (w.columns * BITS / 8);
    float scales[SCALE_WINDOW], biases[SCALE_WINDOW] = {};
    for (int64_t k = 0; k < w.columns; k += CHUNK) {
      const int64_t g = k / GROUP, at = row * groups + g;
      if (g % SCALE_WINDOW == 0 && k % GROUP == 0) {
        load_window(w.scales, w.element, at, groups - g, scales);
        if (w.biases) load_window(w.biases, w.element, at, groups - g, biases);
      }
      F values[VECTORS];
      floats(codes + k * BITS / 8, chunk_bytes<BITS>(w.columns, k / CHUNK), values);
      const int64_t vectors = smaller_of(VECTORS, (w.columns - k) / LANES);
      for (int64_t v = 0; v < vectors; v++) {
        const int64_t group = (k + v * LANES) / GROUP % SCALE_WINDOW;
        store(to + k + v * LANES, fma(values[v], splat(scales[group]), splat(biases[group])));
      }
    }
  }
};

template <int BITS, int GROUP>
void exact_decode(const Matrix& w, const Rows& x, int64_t first, int64_t last, float* y,
                  int64_t stride) {
  decode_rows(ExactProduct<BITS, GROUP>(w), w, x, first, last, y, stride);
}

template <int BITS, int GROUP>
void exact_prefill(const Matrix& w, const Tiles& x, int64_t first, int64_t last, float* y,
                   int64_t stride, char* scratch) {
  const ExactProduct<BITS, GROUP> product(w);
  float* wide = reinterpret_cast<float*>(scratch);
  for (int64_t block = first; block < last; block += BLOCK_ROWS) {
    for (int i = 0; i < BLOCK_ROWS; i++)
      product.expand(w, clamp_row(w, block + i), wide + i * padded(w.columns));
    multiply_floats(w, wide, x, block, last, y, stride);
  }
}

template <int BITS, int GROUP>
void expand_row(const Matrix& w, int64_t row, float* to) {
  ExactProduct<BITS, GROUP>(w).expand(w, row, to);
}

inline int64_t float_scratch(int64_t columns) { return BLOCK_ROWS * padded(columns) * 4; }

}  // namespace ts
