// Dense matrices, float32, float16 or bfloat16, with float32 activations.
#include "quantized.h"
#include "tile.h"

namespace ts {
namespace {

inline int64_t element_bytes(int32_t element) { return element == FLOAT32 ? 4 : 2; }

template <int M, int32_t ELEMENT>
void four_rows(const Matrix& w, const Row* x, int64_t row, int64_t last, float* y, int64_t stride) {
  const int64_t whole = w.columns / LANES * LANES;
  const int tail = (int)(w.columns - whole);
  F total[M][4] = {};
  int64_t start[4];
  for (int i = 0; i < 4; i++) start[i] = clamp_row(w, row + i) * w.columns;
  for (int64_t k = 0; k < whole; k += LANES) {
    for (int i = 0; i < 4; i++) {
      __builtin_prefetch(w.data + (start[i] + k) * element_bytes(ELEMENT) + PREFETCH_BYTES);
      const F weight = load_elements(w.data, start[i] + k, ELEMENT);
      for (int m = 0; m < M; m++) total[m][i] = fma(weight, load(x[m].values + k), total[m][i]);
    }
  }
  if (tail > 0) {
    for (int i = 0; i < 4; i++) {
      const F weight = load_elements(w.data, start[i] + whole, ELEMENT, tail);
      for (int m = 0; m < M; m++)
        total[m][i] = fma(weight, load(x[m].values + whole), total[m][i]);
    }
  }
  for (int m = 0; m < M; m++) store_four(w, total[m], row, last, y + m * stride);
}

template <int32_t ELEMENT>
void decode_as(const Matrix& w, const Rows& x, int64_t first, int64_t last, float* y,
               int64_t stride) {
  for (int64_t row = first; row < last; row += 4) {
    by_fours(x, [&](int count, const Row* rows, int64_t m) {
      float* to = y + m * stride;
      if (count == 4) four_rows<4, ELEMENT>(w, rows, row, last, to, stride);
      if (count == 2) four_rows<2, ELEMENT>(w, rows, row, last, to, stride);
      if (count == 1) four_rows<1, ELEMENT>(w, rows, row, last, to, stride);
    });
  }
}

void decode(const Matrix& w, const Rows& x, int64_t first, int64_t last, float* y,
            int64_t stride) {
  auto run = w.element == FLOAT32   ? decode_as<FLOAT32>
             : w.element == FLOAT16 ? decode_as<FLOAT16>
                                    : decode_as<BFLOAT16>;
  run(w, x, first, last, y, stride);
}

void expand(const Matrix& w, int64_t row, float* to) {
  for (int64_t k = 0; k < w.columns; k += LANES) {
    const int count = (int)smaller_of(LANES, w.columns - k);
    store_first(to + k, load_elements(w.data, row * w.columns + k, w.element, count), count);
  }
}

void prefill(const Matrix& w, const Tiles& x, int64_t first, int64_t last, float* y,
             int64_t stride, char* scratch) {
  float* wide = reinterpret_cast<float*>(scratch);
  const int64_t step = padded(w.columns);
  for (int64_t block = first; block < last; block += BLOCK_ROWS) {
    for (int i = 0; i < BLOCK_ROWS; i++)
      expand(w, clamp_row(w, block + i), wide + i * step);
    multiply_floats(w, wide, x, block, last, y, stride);
  }
}

int64_t scratch_bytes(int64_t columns) { return BLOCK_ROWS * padded(columns) * 4; }

}  // namespace
}  // namespace ts

extern "C" __attribute__((visibility("default"))) const ts::Product* ts_product() {
  static const ts::Product product = {ts::decode, ts::prefill, ts::scratch_bytes, ts::expand,
                                      ts::FLOATS};
  return &product;
}
