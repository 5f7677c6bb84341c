// Rows of a block index: a copy of the cache's tail, in which M new rows hold their raw keys, and
// the key of the block that ends there: norm of the mean of its R rows, rotated where the block
// begins; zeros where none ends. A threadgroup of 32 a row of the tail. numbers: eps, magnitude.
SHARED float normed[D];
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int place = static_cast<int>(threadgroup_position_in_grid.x);
const int boundary = lengths[0];
const int start = lengths[1];
const int position = boundary + place;
const int fresh = position - start;
const int stride = static_cast<int>(raw_strides[0]);
const bool is_new = fresh >= 0 && fresh < M;
const bool ends = is_new && position % R == R - 1;

float mean[PARTS];
float square_sum = 0.0f;
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = lane + 32 * p;
  mean[p] = 0.0f;
  if (ends && d < D) {
    float total = 0.0f;
    for (int at = position - (R - 1); at <= position; at++) {
      if (at >= start) {
        total += static_cast<float>(raw[(at - start) * stride + d]);
      } else if (at >= boundary) {
        total += static_cast<float>(tail_k[(at - boundary) * D + d]);
      } else {
        total += static_cast<float>(sealed_k[at * D + d]);
      }
    }
    mean[p] = static_cast<float>(static_cast<T>(total / static_cast<float>(R)));
  }
  square_sum = metal::fma(mean[p], mean[p], square_sum);
}
square_sum = simd_sum(square_sum);
const float scale = metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(D)) + numbers[0]);
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = lane + 32 * p;
  if (d < D) {
    const float factor = static_cast<float>(weight[d]);
    normed[d] = static_cast<float>(static_cast<T>(mean[p] * scale * factor));
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = lane + 32 * p;
  if (d < D) {
    float value = normed[d];
    if (ends && d < 2 * PAIRS) {
      const int pair = d % PAIRS;
      const float angle = static_cast<float>(position - (R - 1)) * frequencies[pair];
      const Floats<2> turn = rotation(angle, numbers[1]);
      const float other = d < PAIRS ? -normed[pair + PAIRS] : normed[pair];
      value = metal::fma(value, turn.v[0], other * turn.v[1]);
    }
    const int at = place * D + d;
    const T old_k = tail_k[at];
    const T old_v = tail_v[at];
    new_k[at] = is_new ? static_cast<T>(raw[metal::max(fresh, 0) * (is_new ? stride : 0) + d]) : old_k;
    new_v[at] = is_new ? static_cast<T>(ends ? value : 0.0f) : old_v;
  }
}
