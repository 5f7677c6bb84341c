// Scales and biases of quantized matrices.
#pragma once
#include "matmul.h"

namespace ts {

// Scale of a group at a time, 16 of them loaded at once for each of four rows.
constexpr int SCALE_WINDOW = 16;

// Sizes of a quantized matrix, worked out once before its rows are walked.
struct Layout {
  int64_t groups, row_bytes, chunks, last_row, rest_bytes;
  int64_t ahead;         // bytes from a code to the one that is prefetched meanwhile
  int64_t scales_ahead;  // the same for scales, counted in groups

  Layout(const Matrix& w, int bits, int group)
      : groups(w.columns / group),
        row_bytes(w.columns * bits / 8),
        chunks(padded(w.columns) / CHUNK),
        last_row(w.rows - 1),
        rest_bytes(row_bytes - (chunks - 1) * bits * 8) {
    const int64_t rows_ahead = prefetched_rows(row_bytes);
    ahead = rows_ahead * row_bytes;
    scales_ahead = rows_ahead * groups;
  }
};

inline void prefetch_scales(const Matrix& w, int64_t index) {
  prefetch(static_cast<const char*>(w.scales) + index * element_bytes(w.element));
}

struct QuantizedRows {
  const uint8_t* codes[4];
  int64_t first_group[4];
  int64_t groups;

  QuantizedRows(const Matrix& w, const Layout& layout, int64_t row) : groups(layout.groups) {
    TS_UNROLL for (int i = 0; i < 4; i++) {
      const int64_t r = smaller_of(row + i, layout.last_row);  // beyond the last: read it again
      codes[i] = w.data + r * layout.row_bytes;
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

// Adds the part that the biases of four rows contribute: bias of a group times its activations.
inline void add_biases(const Matrix& w, const QuantizedRows& rows, const float* sums, F* totals) {
  for (int64_t g = 0; g < rows.groups; g += LANES) {
    const int count = (int)smaller_of(LANES, rows.groups - g);
    const F sum = load_first(sums + g, count);
    TS_UNROLL for (int i = 0; i < 4; i++) {
      const F bias = load_elements(w.biases, rows.first_group[i] + g, w.element, count);
      totals[i] = fma(bias, sum, totals[i]);
    }
  }
}

// Adds up the lanes of four rows' totals and stores those that exist.
inline void store_four(const Matrix& w, const F* totals, int64_t row, int64_t last, float* y) {
  float found[4];
  sum_four(totals[0], totals[1], totals[2], totals[3], found);
  if (w.added == nullptr && row + 4 <= last) {
    memcpy(y + row, found, sizeof found);
    return;
  }
  for (int64_t r = row; r < last && r < row + 4; r++)
    y[r] = found[r - row] + (w.added ? w.added[r] : 0.0f);
}

// Scales and biases of a block of prefill as floats, [BLOCK_ROWS][step].
struct BlockScales {
  float *scales, *biases;
  int64_t groups, step;

  BlockScales(char* scratch, int64_t columns, int group)
      : groups(columns / group), step((groups + LANES - 1) / LANES * LANES) {
    scales = reinterpret_cast<float*>(scratch);
    biases = scales + BLOCK_ROWS * step;
  }

  static int64_t bytes(int64_t columns, int group) {
    return 2 * BLOCK_ROWS * (columns / group + LANES) * (int64_t)sizeof(float);
  }

  void load_row(const Matrix& w, int64_t row, int to_row) const {
    for (int64_t g = 0; g < groups; g += LANES) {
      const int count = (int)smaller_of(LANES, groups - g);
      const int64_t to = to_row * step + g, from = row * groups + g;
      store(scales + to, load_elements(w.scales, from, w.element, count));
      if (w.biases) store(biases + to, load_elements(w.biases, from, w.element, count));
    }
  }
};


}  // namespace ts
