#include "inputs.h"

#include "transpose.h"

namespace ts {

Inputs::Inputs(Carver& carver, const InputShape& shape, int thread, int threads)
    : shape_(shape), step_(padded(shape.columns)), packed_{}, tiles_{} {
  const bool own_rows = shape.prefill || shape.rows == 1;
  const int64_t each = shape.prefill ? LANES : 1;
  const int64_t rows = own_rows ? each * threads : shape.rows;
  own_ = own_rows ? each * thread : 0;
  packed_.columns = tiles_.columns = shape.columns;
  tiles_.rows = shape.rows;
  tiles_.count = shape.prefill ? (shape.rows + LANES - 1) / LANES : 0;
  const int64_t tile_rows = tiles_.count * LANES;

  Row& row = packed_.first;
  if (shape.forms & FLOATS) {
    row.values = carver.take<float>(rows * step_);
    tiles_.values = carver.take<float>(tile_rows * step_);
  }
  if (integers()) {
    if (EIGHT_BIT_DOTS) {
      row.high = carver.take<int8_t>(rows * step_);
      tiles_.high = carver.take<int8_t>(tile_rows * step_);
      if (shape.mode == PAIR) {
        row.low = carver.take<int8_t>(rows * step_);
        tiles_.low = carver.take<int8_t>(tile_rows * step_);
      }
      if (!shape.prefill) row.minus_quads = carver.take<int32_t>(rows * step_ / 4);
    } else {
      row.whole = carver.take<int16_t>(rows * step_);
      tiles_.whole = carver.take<int16_t>(tile_rows * step_);
    }
    row.scales = carver.take<float>(rows * step_ / SCALE_SPAN);
    tiles_.scales = carver.take<float>(tile_rows * step_ / SCALE_SPAN);
    tiles_.sums = carver.take<int32_t>(tile_rows * step_ / 16);
  }
  for (int size = 16; size <= 128; size *= 2)
    packed_.sums_step += Row::sums_length(shape.columns, size);
  if (!shape.prefill) row.sums = carver.take<float>(rows * packed_.sums_step);
  span_sums_ = carver.take<int32_t>(rows * step_ / 16);
  normed_ = carver.take<float>(threads * step_) + thread * step_;
  product_scratch_ = carver.take<char>(threads * shape.product_scratch);
  product_scratch_ += thread * shape.product_scratch;
}

void Inputs::pack(Crew& crew, const float* x, const Norm* norm, const int32_t* from) {
  x_ = x;
  from_ = from;
  if (shape_.prefill) {
    crew.share(tiles_.count, 1, [&](int64_t t, int64_t) { pack_tile(norm, t); });
  } else if (shape_.rows == 1) {  // cheaper to repeat than to wait for
    waiting_ = source(0);
    waiting_norm_ = norm;
  } else {
    crew.share(shape_.rows, 1, [&](int64_t m, int64_t) { pack_row(source(m), norm, m); });
  }
}

void Inputs::multiply(const Matrix& w, int64_t first, int64_t last, float* y, int64_t stride) {
  multiply_part(w, 0, shape_.rows, first, last, y, stride);
}

void Inputs::multiply_part(const Matrix& w, int64_t at, int64_t count, int64_t first, int64_t last,
                           float* y, int64_t stride) {
  if (waiting_) pack_row(waiting_, waiting_norm_, own_);
  waiting_ = nullptr;
  if (shape_.prefill) {
    const Tiles part = tiles_.part(at / LANES, count);
    w.product->prefill(w, part, first, last, y, stride, product_scratch_);
  } else {
    const Rows rows{count, shape_.columns, packed_[own_ + at], packed_.sums_step};
    w.product->decode(w, rows, first, last, y, stride);
  }
}

// Fills packed row `at` from one row of x.
void Inputs::pack_row(const float* x, const Norm* norm, int64_t at) {
  const int64_t K = shape_.columns;
  const Row row = packed_[at];
  float* values = row.values ? row.values : normed_;
  if (norm)
    norm_row(*norm, x, K, values);
  else
    memcpy(values, x, K * sizeof(float));
  memset(values + K, 0, (step_ - K) * sizeof(float));
  if (integers())
    round_row(values, step_, shape_.mode,
              {row.high, row.low, row.whole, row.minus_quads, row.scales,
               span_sums_ + at * (step_ / 16)});
  if (!shape_.prefill) finish_row(at);
}

// What decode's products read beyond the rounded values: sums of groups.
void Inputs::finish_row(int64_t at) {
  if (!shape_.biased) return;
  const Row row = packed_[at];
  const int32_t* sums = span_sums_ + at * (step_ / 16);
  float* to = row.sums;
  for (int64_t g = 0; g < shape_.columns / 16; g++) {
    if (integers()) {
      to[g] = row.scales[g * 16 / SCALE_SPAN] * (float)sums[g];
    } else {
      F total = F{};
      for (int j = 0; j < 16; j += LANES) total = total + load(row.values + g * 16 + j);
      to[g] = sum(total);
    }
  }
  for (int size = 32; size <= 128; size *= 2) {
    float* next = to + Row::sums_length(shape_.columns, size / 2);
    for (int64_t g = 0; g < shape_.columns / size; g++) next[g] = to[2 * g] + to[2 * g + 1];
    to = next;
  }
}

void Inputs::pack_tile(const Norm* norm, int64_t tile) {
  const int64_t first = tile * LANES;
  for (int64_t i = 0; i < LANES; i++) {
    // Rows beyond the last repeat it: their products are computed and thrown away.
    pack_row(source(smaller_of(first + i, shape_.rows - 1)), norm, own_ + i);
  }
  const Row row = packed_[own_];
  const auto turn = [&](const void* from, void* to, int64_t words) {
    if (from) transpose_words(from, words, static_cast<float*>(to) + tile * words * LANES, words);
  };
  turn(row.values, tiles_.values, step_);
  turn(row.high, tiles_.high, step_ / 4);
  turn(row.low, tiles_.low, step_ / 4);
  turn(row.whole, tiles_.whole, step_ / 2);
  if (!integers()) return;
  turn(row.scales, tiles_.scales, step_ / SCALE_SPAN);
  turn(span_sums_ + own_ * (step_ / 16), tiles_.sums, step_ / 16);
}

}  // namespace ts
