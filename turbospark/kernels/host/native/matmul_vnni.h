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
  void four_rows(const Matrix& w, const Row* x, int64_t row, int64_t last, float* y,
                 int64_t stride) const {
    const QuantizedRows rows(w, row, BITS, GROUP);
    const int64_t chunks = padded(w.columns) / CHUNK;
    F total[M][4] = {};
    for (int64_t window = 0; window < chunks; window += CHUNKS) {
      const int64_t group = window * CHUNK / GROUP, end = smaller_of(chunks, window + CHUNKS);
      const int count = (int)smaller_of(SCALE_WINDOW, rows.groups - group);
      F scales[4];
      for (int i = 0; i < 4; i++)
        scales[i] = load_elements(w.scales, rows.first_group[i] + group, w.element, count);
      for (int64_t c = window; c < end; c++) {
        const __mmask64 bytes = Unpacker<BITS>::bytes_mask(chunk_bytes<BITS>(w.columns, c));
        const int at = (int)((c - window) * CHUNK / GROUP);
        const __m512i lanes = _mm512_add_epi32(groups_of_lanes, _mm512_set1_epi32(at));
        __m512i start[M];
        for (int m = 0; m < M; m++)
          start[m] = _mm512_mullo_epi32(minus_zero, _mm512_loadu_si512(x[m].quads + c * 16));
        for (int i = 0; i < 4; i++) {
          const uint8_t* from = rows.codes[i] + c * 8 * BITS;
          __builtin_prefetch(from + PREFETCH_BYTES);
          const __m512i codes = unpack(from, bytes);
          const F scale = (F)_mm512_permutexvar_ps(lanes, (__m512)scales[i]);
          for (int m = 0; m < M; m++) {
            const F dot = to_float((I)chunk_dot(codes, x[m], c, start[m]));
            total[m][i] = fma(dot, scale * load(x[m].scales + c * 16), total[m][i]);
          }
        }
      }
    }
    for (int m = 0; m < M; m++) {
      if (w.biases)
        for (int i = 0; i < 4; i++)
          total[m][i] = add_biases(w, rows.first_group[i], rows.groups,
                                   x[m].sums_of(GROUP, w.columns), total[m][i]);
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
    uint8_t* codes;         // [BLOCK_ROWS][padded]
    float *scales, *biases;  // [BLOCK_ROWS][groups, padded to SCALE_WINDOW]
    int64_t step, groups;

    Block(char* scratch, int64_t columns)
        : step(padded(columns)),
          groups((columns / GROUP + SCALE_WINDOW - 1) / SCALE_WINDOW * SCALE_WINDOW) {
      codes = reinterpret_cast<uint8_t*>(scratch);
      scales = reinterpret_cast<float*>(scratch + BLOCK_ROWS * step);
      biases = scales + BLOCK_ROWS * groups;
    }
  };

  void unpack_rows(const Matrix& w, int64_t first, const Block& block) const {
    const int64_t groups = w.columns / GROUP;
    for (int i = 0; i < BLOCK_ROWS; i++) {
      const int64_t r = clamp_row(w, first + i);
      const uint8_t* from = w.data + r * (w.columns * BITS / 8);
      for (int64_t c = 0; c < block.step / CHUNK; c++) {
        const auto bytes = Unpacker<BITS>::bytes_mask(chunk_bytes<BITS>(w.columns, c));
        _mm512_storeu_si512(block.codes + i * block.step + c * CHUNK, unpack(from + c * 8 * BITS, bytes));
      }
      for (int64_t g = 0; g < groups; g += LANES) {
        const int count = (int)smaller_of(LANES, groups - g);
        const int64_t to = i * block.groups + g;
        store(block.scales + to, load_elements(w.scales, r * groups + g, w.element, count));
        if (w.biases)
          store(block.biases + to, load_elements(w.biases, r * groups + g, w.element, count));
      }
    }
  }

  // Products of eight unpacked rows with one tile.
  template <bool BIASED>
  void eight_rows(const Block& block, int first, const Tiles& x, int64_t tile, F* total) const {
    constexpr int ROWS = 8;
    const int64_t step = block.step;
    const int8_t *high = x.high + tile * step * LANES, *low = x.low + tile * step * LANES;
    const float* scales = x.scales + tile * (step / SCALE_SPAN) * LANES;
    const int32_t* sums = x.sums + tile * (step / 16) * LANES;
    const uint8_t* codes = block.codes + first * step;
    for (int i = 0; i < ROWS; i++) total[i] = F{};
    for (int64_t k = 0; k < x.columns; k += STEP) {
      I sum = I{};
      for (int j = 0; j < STEP / 16; j++) {
        I part;
        memcpy(&part, sums + (k / 16 + j) * LANES, sizeof part);
        sum += part;
      }
      const __m512i start = _mm512_mullo_epi32(minus_zero, (__m512i)sum);
      __m512i upper[ROWS], lower[ROWS];
      for (int i = 0; i < ROWS; i++) {
        upper[i] = PAIR ? _mm512_setzero_si512() : start;
        lower[i] = start;
      }
#pragma GCC unroll 8
      for (int j = 0; j < STEP / 4; j++) {
        const __m512i a = _mm512_loadu_si512(high + (k / 4 + j) * 64);
        const __m512i b = PAIR ? _mm512_loadu_si512(low + (k / 4 + j) * 64) : a;
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          int32_t four;
          memcpy(&four, codes + i * step + k + 4 * j, 4);
          const __m512i weight = _mm512_set1_epi32(four);
          upper[i] = _mm512_dpbusd_epi32(upper[i], weight, a);
          if (PAIR) lower[i] = _mm512_dpbusd_epi32(lower[i], weight, b);
        }
      }
      const F scale = load(scales + k / SCALE_SPAN * LANES);
      const F biased = BIASED ? to_float(sum) * scale : F{};
      for (int i = 0; i < ROWS; i++) {
        const int64_t group = (first + i) * block.groups + k / GROUP;
        const __m512i dot =
            PAIR ? _mm512_add_epi32(_mm512_slli_epi32(upper[i], 7), lower[i]) : upper[i];
        total[i] = fma(to_float((I)dot) * scale, splat(block.scales[group]), total[i]);
        if (BIASED) total[i] = fma(biased, splat(block.biases[group]), total[i]);
      }
    }
  }
};

template <int BITS, int GROUP, bool PAIR>
void integer_decode(const Matrix& w, const Rows& x, int64_t first, int64_t last,
                    float* y, int64_t stride) {
  const IntegerProduct<BITS, GROUP, PAIR> product(w);
  for (int64_t block = first; block < last; block += BLOCK_ROWS) {
    const int64_t end = smaller_of(last, block + BLOCK_ROWS);
    by_fours(x, [&](int count, const Row* rows, int64_t m) {
      float* to = y + m * stride;
      for (int64_t row = block; row < end; row += 4) {
        if (count == 4) product.template four_rows<4>(w, rows, row, last, to, stride);
        if (count == 2) product.template four_rows<2>(w, rows, row, last, to, stride);
        if (count == 1) product.template four_rows<1>(w, rows, row, last, to, stride);
      }
    });
  }
}

template <int BITS, int GROUP, bool PAIR>
void integer_prefill(const Matrix& w, const Tiles& x, int64_t first, int64_t last, float* y,
                     int64_t stride, char* scratch) {
  using Kind = IntegerProduct<BITS, GROUP, PAIR>;
  const Kind product(w);
  const typename Kind::Block unpacked(scratch, w.columns);
  for (int64_t block = first; block < last; block += BLOCK_ROWS) {
    product.unpack_rows(w, block, unpacked);
    for (int64_t t = 0; t < x.count; t++) {
      F products[BLOCK_ROWS];
      for (int r = 0; r < BLOCK_ROWS; r += 8) {
        if (w.biases)
          product.template eight_rows<true>(unpacked, r, x, t, products + r);
        else
          product.template eight_rows<false>(unpacked, r, x, t, products + r);
      }
      if (w.added)
        for (int i = 0; i < BLOCK_ROWS; i++)
          products[i] = products[i] + w.added[clamp_row(w, block + i)];
      const int64_t row = t * LANES;
      store_tile(products, smaller_of(LANES, x.rows - row), smaller_of(BLOCK_ROWS, last - block),
                 y + row * stride + block, stride);
    }
  }
}

template <int GROUP>
int64_t integer_scratch(int64_t columns) {
  return BLOCK_ROWS * (padded(columns) + 2 * 4 * (columns / GROUP + SCALE_WINDOW));
}

}  // namespace ts
