// Activation rows packed for the products of one call.
#pragma once
#include "matmul.h"
#include "norm.h"
#include "pool.h"
#include "quantize.h"

namespace ts {

// What a call will do with its rows.
struct InputShape {
  int64_t rows, columns;
  int32_t forms;           // Form bits that its matrices need
  int32_t mode;            // Mode of the integer form
  bool biased;             // a matrix has biases, which want sums of activations
  bool prefill;
  int64_t product_scratch;  // bytes a thread's products need
};

// Carved by every thread of a region alike (see Carver); one thread's view of the packed rows.
class Inputs {
 public:
  Inputs(Carver& carver, const InputShape& shape, int thread, int threads);

  // Norms (if any) and packs rows [rows, columns]; with `from`, row m is x's row from[m]. Every
  // thread of the crew calls it; all may multiply when it returns. `x` must stay until then: one
  // row is packed at its first use.
  void pack(Crew& crew, const float* x, const Norm* norm, const int32_t* from = nullptr);

  // y[m * stride + n] for every row m and the weight rows n in [first, last).
  void multiply(const Matrix& w, int64_t first, int64_t last, float* y, int64_t stride);

  // The same for `count` rows from row `at` on, a multiple of LANES in prefill; y is row `at`'s.
  void multiply_part(const Matrix& w, int64_t at, int64_t count, int64_t first, int64_t last,
                     float* y, int64_t stride);

 private:
  const float* source(int64_t m) const { return x_ + (from_ ? from_[m] : m) * shape_.columns; }
  void pack_row(const float* x, const Norm* norm, int64_t at);
  void pack_tile(const Norm* norm, int64_t tile);
  void finish_row(int64_t at);

  bool integers() const { return shape_.forms & INTEGERS; }

  InputShape shape_;
  int64_t step_;           // padded columns
  int64_t own_;            // first of this thread's rows in packed_
  Rows packed_;            // decode: all rows; prefill: LANES rows a thread, then turned
  Tiles tiles_;
  float* normed_;          // [padded], this thread's
  int32_t* span_sums_;     // [packed rows][padded / 16]
  char* product_scratch_;  // this thread's
  const float* x_ = nullptr;
  const int32_t* from_ = nullptr;
  const float* waiting_ = nullptr;  // one row that this thread has not packed yet
  const Norm* waiting_norm_ = nullptr;
};

}  // namespace ts
