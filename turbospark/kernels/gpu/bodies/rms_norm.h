// y = x / sqrt(mean(x^2) + eps) * weight for rows of D values: a threadgroup of THREADS a row.
SHARED float partial[THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int start = static_cast<int>(threadgroup_position_in_grid.x) * D;

float square_sum = 0.0f;
for (int d = thread_index; d < D; d += THREADS) {
  const float value = static_cast<float>(x[start + d]);
  square_sum = metal::fma(value, value, square_sum);
}
square_sum = simd_sum(square_sum);
if (lane == 0) {
  partial[simdgroup_index_in_threadgroup] = square_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
square_sum = simd_sum(lane < THREADS / 32 ? partial[lane] : 0.0f);

const float scale = metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(D)) + eps[0]);
for (int d = thread_index; d < D; d += THREADS) {
  const float factor = HAS_WEIGHT ? static_cast<float>(weight[d]) : 1.0f;
  y[start + d] = static_cast<T>(static_cast<float>(x[start + d]) * scale * factor);
}
