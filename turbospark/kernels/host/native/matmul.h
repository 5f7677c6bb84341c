// What a matrix is to the host kernels, and the two products every kind of matrix offers.
//
// Products for one width (bits, group, activations) are a library of their own, so a model
// compiles what it needs. Rows of activations are packed once a call and shared by all of them.
#pragma once
#include "simd.h"

namespace ts {

enum Element : int32_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, HALF_POWER = 3 };
enum Form : int32_t { FLOATS = 1, INTEGERS = 2 };  // how a product takes its activations

constexpr int64_t CHUNK = 64;       // codes that decode handles at once; inputs are padded to it
constexpr int64_t SCALE_SPAN = 32;  // activations that share a scale in the integer forms
constexpr int BLOCK_ROWS = 16;      // weight rows that prefill unpacks at once

inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t padded(int64_t columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }

// Activation rows for decode, each zero beyond its last column. Sums are of what the product
// sees: the rounded values in the integer forms. Pointers of a form that is not filled are null.
struct Row {
  float* values;         // [padded]
  int8_t* high;          // [padded]: value = scale * (128 * high + low), or scale * high in int8
  int8_t* low;           // [padded], pair only
  int16_t* whole;        // [padded]: value = scale * whole, where there is no 8-bit dot product
  float* scales;         // one a span
  int32_t* minus_quads;  // [padded / 4]: minus the sums of 4 neighbours of 128 * high + low
  float* sums;           // of every 16 columns, then of every 32, 64 and 128: see `sums_of`

  // Sums of every `group` columns.
  const float* sums_of(int group, int64_t columns) const {
    const float* from = sums;
    for (int size = 16; size < group; size *= 2) from += sums_length(columns, size);
    return from;
  }
  static int64_t sums_length(int64_t columns, int size) {
    return (columns / size + LANES) / LANES * LANES;
  }
};

struct Rows {
  int64_t count, columns;
  Row first;
  int64_t sums_step;

  Row operator[](int64_t m) const {
    const int64_t step = padded(columns), spans = step / SCALE_SPAN;
    auto at = [m](auto* base, int64_t length) { return base ? base + m * length : base; };
    return {at(first.values, step), at(first.high, step),    at(first.low, step),
            at(first.whole, step),  at(first.scales, spans), at(first.minus_quads, step / 4),
            at(first.sums, sums_step)};
  }
};

// LANES rows side by side for prefill: column-major tiles, zero beyond the last row and column.
struct Tiles {
  int64_t rows, columns, count;  // count = rows / LANES rounded up
  float* values;                 // [count][padded][LANES]
  int8_t* high;                  // [count][padded / 4][LANES][4]
  int8_t* low;                   // the same, pair only
  int16_t* whole;                // [count][padded / 2][LANES][2]
  float* scales;                 // [count][padded / 32][LANES]
  int32_t* sums;                 // [count][padded / 16][LANES]: sums of 16 columns

  // `some` rows from the first of a tile on.
  Tiles part(int64_t tile, int64_t some) const {
    const int64_t size = padded(columns) * LANES;
    auto at = [tile](auto* base, int64_t length) { return base ? base + tile * length : base; };
    return {some,           columns,        (some + LANES - 1) / LANES,     at(values, size),
            at(high, size), at(low, size),  at(whole, size),
            at(scales, size / SCALE_SPAN),  at(sums, size / 16)};
  }
};

struct Matrix;

struct Product {
  // y[m * stride + n] for rows n in [first, last) of the matrix, `first` a multiple of 4, and
  // every activation row m.
  void (*decode)(const Matrix& w, const Rows& x, int64_t first, int64_t last, float* y,
                 int64_t stride);
  // The same for the rows of tiles, in other arithmetic; `first` is a multiple of BLOCK_ROWS.
  void (*prefill)(const Matrix& w, const Tiles& x, int64_t first, int64_t last, float* y,
                  int64_t stride, char* scratch);
  // Scratch bytes that one thread's prefill needs.
  int64_t (*prefill_scratch)(int64_t columns);
  // The float32 values of one row.
  void (*expand)(const Matrix& w, int64_t row, float* to);
  int32_t form;
};

struct Matrix {
  const uint8_t* data;  // packed codes, or the elements of a dense matrix
  const void* scales;   // [rows, groups] or null
  const void* biases;   // like scales, or null where `zero` stands for 0
  const float* added;   // [rows], added to every product, or null
  int64_t rows, columns;
  int32_t element;      // Element of scales and biases, or of the dense data
  int32_t zero;
  const Product* product;
};

inline int64_t element_bytes(int32_t element) {
  return element == FLOAT32 ? 4 : element == HALF_POWER ? 1 : 2;
}

// HALF_POWER: byte e is 2^(e - 128), half of what it is in MXFP4, whose codes count halves.
inline F load_powers(const uint8_t* from, int count) {
  I bits = I{};
  for (int i = 0; i < count; i++) bits[i] = from[i] > 1 ? (from[i] - 1) << 23 : 0;
  return (F)bits;
}

inline F load_elements(const void* base, int64_t index, int32_t element, int count = LANES) {
  if (element == FLOAT32) return load_first(static_cast<const float*>(base) + index, count);
  if (element == HALF_POWER) return load_powers(static_cast<const uint8_t*>(base) + index, count);
  const H bits = load_halves(static_cast<const uint16_t*>(base) + index, count);
  return element == FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
}

// Rows between a weight that is read and the one that is prefetched meanwhile: whole blocks of
// four, at least 16 KB, which measured best.
inline int64_t prefetched_rows(int64_t row_bytes) { return ((1 << 14) / (4 * row_bytes) + 1) * 4; }

// Runs `product.rows<M>(w, x, first, last, y, stride)` for M = 1, 2 or 4 activation rows at a time
// until all are done. Weights of one block are read once and then found in the cache.
template <class Kind>
void decode_rows(const Kind& product, const Matrix& w, const Rows& x, int64_t first, int64_t last,
                 float* y, int64_t stride) {
  const int64_t block = x.count == 1 ? last - first : BLOCK_ROWS;
  for (int64_t begin = first; begin < last; begin += block) {
    const int64_t end = smaller_of(last, begin + block);
    for (int64_t m = 0; m < x.count;) {
      Row now[4];
      const int64_t left = x.count - m, count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
      for (int64_t i = 0; i < count; i++) now[i] = x[m + i];
      float* to = y + m * stride;
      if (count == 4) product.template rows<4>(w, now, begin, end, to, stride);
      if (count == 2) product.template rows<2>(w, now, begin, end, to, stride);
      if (count == 1) product.template rows<1>(w, now, begin, end, to, stride);
      m += count;
    }
  }
}

}  // namespace ts
