// y[M, C] = (h + norm(norm_a(a) + norm_b(b))) * factor of sums[M, 2, C], a row's a and b one behind
// the other. A threadgroup of THREADS a row, VALUES numbers a thread. numbers: eps of a, of b and of
// both together.
SHARED float partial[3 * THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int row = static_cast<int>(threadgroup_position_in_grid.x);
const int part = thread_index / 32;
float a[VALUES];
float b[VALUES];
float a_squares = 0.0f;
float b_squares = 0.0f;
UNROLL for (int i = 0; i < VALUES; i++) {
  const int c = i * THREADS + thread_index;
  a[i] = c < C ? sums[row * 2 * C + c] : 0.0f;
  b[i] = c < C ? sums[(row * 2 + 1) * C + c] : 0.0f;
  a_squares = metal::fma(a[i], a[i], a_squares);
  b_squares = metal::fma(b[i], b[i], b_squares);
}
a_squares = simd_sum(a_squares);
b_squares = simd_sum(b_squares);
if (thread_index_in_simdgroup == 0) {
  partial[part] = a_squares;
  partial[THREADS / 32 + part] = b_squares;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
a_squares = 0.0f;
b_squares = 0.0f;
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  a_squares += partial[group];
  b_squares += partial[THREADS / 32 + group];
}
const float each = 1.0f / static_cast<float>(C);
const float a_scale = metal::precise::rsqrt(metal::fma(a_squares, each, numbers[0]));
const float b_scale = metal::precise::rsqrt(metal::fma(b_squares, each, numbers[1]));
float squares = 0.0f;
UNROLL for (int i = 0; i < VALUES; i++) {
  const int c = i * THREADS + thread_index;
  if (c < C) {
    const float left = a[i] * a_scale * static_cast<float>(a_weight[c]);
    a[i] = left + b[i] * b_scale * static_cast<float>(b_weight[c]);
  }
  squares = metal::fma(a[i], a[i], squares);
}
squares = simd_sum(squares);
if (thread_index_in_simdgroup == 0) { partial[2 * THREADS / 32 + part] = squares; }
threadgroup_barrier(mem_flags::mem_threadgroup);
squares = 0.0f;
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  squares += partial[2 * THREADS / 32 + group];
}
const float scale = metal::precise::rsqrt(metal::fma(squares, each, numbers[2]));
UNROLL for (int i = 0; i < VALUES; i++) {
  const int c = i * THREADS + thread_index;
  if (c < C) {
    const float sum = static_cast<float>(h[row * C + c]) + a[i] * scale * static_cast<float>(weight[c]);
    y[row * C + c] = static_cast<T>(sum * factor[0]);
  }
}
