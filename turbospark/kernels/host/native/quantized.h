// Scales and biases of quantized matrices.
#pragma once
#include "matmul.h"

namespace ts {

// Scale of a group at a time, 16 of them loaded at once for each of four rows.
constexpr int SCALE_WINDOW = 16;

struct QuantizedRows {
  const uint8_t* codes[4];
  int64_t first_group[4];
  int64_t groups;

  QuantizedRows(const Matrix& w, int64_t row, int bits, int group)
      : groups(w.columns / group) {
    for (int i = 0; i < 4; i++) {
      const int64_t r = smaller_of(row + i, w.rows - 1);  // beyond the last: read it again
      codes[i] = w.data + r * (w.columns * bits / 8);
      first_group[i] = r * groups;
    }
  }
};

// Up to SCALE_WINDOW scales or biases from `index` on, then zeros.
inline void load_window(const void* from, int32_t element, int64_t index, int64_t count,
                        float* to) {
  for (int j = 0; j < SCALE_WINDOW; j += LANES) {
    const int64_t left = count - j < 0 ? 0 : smaller_of(LANES, count - j);
    store(to + j, load_elements(from, index + j, element, (int)left));
  }
}

// Adds the part that the biases contribute: bias of a group times the sum of its activations.
inline F add_biases(const Matrix& w, int64_t first_group, int64_t groups, const float* sums,
                    F total) {
  for (int64_t g = 0; g < groups; g += LANES) {
    const int count = (int)smaller_of(LANES, groups - g);
    const F bias = load_elements(w.biases, first_group + g, w.element, count);
    total = fma(bias, load_first(sums + g, count), total);
  }
  return total;
}

// Adds up the lanes of four rows' totals and stores those that exist.
inline void store_four(const Matrix& w, const F* totals, int64_t row, int64_t last, float* y) {
  float found[4];
  sum_four(totals[0], totals[1], totals[2], totals[3], found);
  const int count = (int)smaller_of(4, last - row);
  for (int i = 0; i < count; i++) y[row + i] = found[i] + (w.added ? w.added[row + i] : 0.0f);
}

constexpr int64_t PREFETCH_BYTES = 4096;  // ahead of the codes being read: a page, measured

}  // namespace ts
