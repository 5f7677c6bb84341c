// The two products of an IntegerProduct, whichever instruction set it is made of.
#pragma once

namespace ts {

template <int BITS, int GROUP, bool PAIR>
void integer_decode(const Matrix& w, const Rows& x, int64_t first, int64_t last,
                    float* y, int64_t stride) {
  decode_rows(IntegerProduct<BITS, GROUP, PAIR>(w), w, x, first, last, y, stride);
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
      for (int r = 0; r < BLOCK_ROWS; r += Kind::ROWS) {
        if (w.biases)
          product.template some_rows<true>(unpacked, r, x, t, products + r);
        else
          product.template some_rows<false>(unpacked, r, x, t, products + r);
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
  return BLOCK_ROWS * padded(columns) * 2 + BlockScales::bytes(columns, GROUP);
}

}  // namespace ts
