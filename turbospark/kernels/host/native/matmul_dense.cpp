// Dense matrices, float32, float16 or bfloat16, with float32 activations.
#include "quantized.h"
#include "tile.h"

namespace ts {
namespace {

template <int32_t ELEMENT>
struct DenseProduct {
  template <int M>
  TS_NOINLINE void rows(const Matrix& w, const Row* x, int64_t first, int64_t last, float* y,
            int64_t stride) const {
    const int64_t whole = w.columns / LANES * LANES, row_bytes = w.columns * element_bytes(ELEMENT);
    const int64_t ahead = prefetched_rows(row_bytes) * row_bytes;
    for (int64_t row = first; row < last; row += 4) {
      int64_t start[4];
      for (int i = 0; i < 4; i++) start[i] = clamp_row(w, row + i) * w.columns;
      F total[M][4] = {};
      for (int64_t k = 0; k < whole; k += LANES) add<M>(w, x, start, k, LANES, ahead, total);
      if (whole < w.columns) add<M>(w, x, start, whole, (int)(w.columns - whole), ahead, total);
      TS_UNROLL for (int m = 0; m < M; m++) store_four(w, total[m], row, last, y + m * stride);
    }
  }

  template <int M>
  static TS_INLINE void add(const Matrix& w, const Row* x, const int64_t* start, int64_t k, int count,
                         int64_t ahead, F (*total)[4]) {
    TS_UNROLL for (int i = 0; i < 4; i++) {
      prefetch(w.data + (start[i] + k) * element_bytes(ELEMENT) + ahead);
      const F weight = load_elements(w.data, start[i] + k, ELEMENT, count);
      TS_UNROLL for (int m = 0; m < M; m++) {
        total[m][i] = fma(weight, load(x[m].values + k), total[m][i]);
      }
    }
  }
};

void decode(const Matrix& w, const Rows& x, int64_t first, int64_t last, float* y,
            int64_t stride) {
  if (w.element == FLOAT32) decode_rows(DenseProduct<FLOAT32>(), w, x, first, last, y, stride);
  if (w.element == FLOAT16) decode_rows(DenseProduct<FLOAT16>(), w, x, first, last, y, stride);
  if (w.element == BFLOAT16) decode_rows(DenseProduct<BFLOAT16>(), w, x, first, last, y, stride);
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
