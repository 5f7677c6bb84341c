// What all prefill products share: four or eight weight rows against LANES activation rows.
#pragma once
#include "matmul.h"
#include "transpose.h"

namespace ts {

// Turns [BLOCK_ROWS][LANES] products (weight row, activation row) into rows of y.
inline void store_tile(const F* products, int64_t rows, int64_t columns, float* y, int64_t stride) {
  const float* from = reinterpret_cast<const float*>(products);
  for (int64_t n = 0; n < columns; n += LANES) {
    float turned[LANES * LANES];
    transpose_square(from + n * LANES, LANES, turned, LANES);
    const int count = (int)smaller_of(LANES, columns - n);
    for (int64_t m = 0; m < rows; m++)
      store_first(y + m * stride + n, load(turned + m * LANES), count);
  }
}

// The sum over STEP columns from k on, of every row of a tile, from sums of 16 columns.
template <int STEP>
inline I sum_of_step(const int32_t* sums, int64_t k) {
  I total = I{};
  for (int j = 0; j < STEP / 16; j++) {
    I part;
    memcpy(&part, sums + (k / 16 + j) * LANES, sizeof part);
    total += part;
  }
  return total;
}

// Rows beyond the last are read as the last one and never stored.
inline int64_t clamp_row(const Matrix& w, int64_t row) { return smaller_of(row, w.rows - 1); }

// Products of a block of float weight rows `wide` [BLOCK_ROWS][padded] with all tiles.
inline void multiply_floats(const Matrix& w, const float* wide, const Tiles& x, int64_t first,
                            int64_t last, float* y, int64_t stride) {
  constexpr int ROWS = LANES == 16 ? 8 : 4;
  const int64_t K = x.columns, step = padded(K);
  for (int64_t t = 0; t < x.count; t += 2) {
    const int64_t next = smaller_of(t + 1, x.count - 1);
    const float *left = x.values + t * step * LANES, *right = x.values + next * step * LANES;
    F products[2][BLOCK_ROWS];
    for (int r = 0; r < BLOCK_ROWS; r += ROWS) {
      F total[ROWS][2] = {};
      const float* row = wide + r * step;
      for (int64_t k = 0; k < K; k++) {
        const F a = load(left + k * LANES), b = load(right + k * LANES);
        TS_UNROLL for (int i = 0; i < ROWS; i++) {
          const F weight = splat(row[i * step + k]);
          total[i][0] = fma(weight, a, total[i][0]);
          total[i][1] = fma(weight, b, total[i][1]);
        }
      }
      for (int i = 0; i < ROWS; i++) {
        const float added = w.added ? w.added[clamp_row(w, first + r + i)] : 0.0f;
        products[0][r + i] = total[i][0] + added;
        products[1][r + i] = total[i][1] + added;
      }
    }
    for (int side = 0; side < 2 && t + side < x.count; side++) {
      const int64_t row = (t + side) * LANES;
      store_tile(products[side], smaller_of(LANES, x.rows - row), smaller_of(BLOCK_ROWS, last - first),
                 y + row * stride + first, stride);
    }
  }
}

}  // namespace ts
