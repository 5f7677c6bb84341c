// after = h + share * said for residual streams of D values, GROUPS a row, and the norm of each
// stream by itself: after / sqrt(mean(after^2) + eps) * weight. A threadgroup of THREADS a stream,
// PARTS times eight values a thread. The norm is that of the values as they are stored.
SHARED float partial[THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int stream = static_cast<int>(threadgroup_position_in_grid.x);
const int start = stream * D;
const int said_start = stream / GROUPS * D;
const int weight_start = stream % GROUPS * D;
const float share = static_cast<float>(shares[stream]);

float value[PARTS][8];
float square_sum = 0.0f;
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = (p * THREADS + thread_index) * 8;
  UNROLL for (int i = 0; i < 8; i++) {
    value[p][i] = 0.0f;
    if (d + i < D) {
      const float added = static_cast<float>(said[said_start + d + i]);
      const float sum = metal::fma(share, added, static_cast<float>(h[start + d + i]));
      const T stored = static_cast<T>(sum);
      after[start + d + i] = stored;
      value[p][i] = static_cast<float>(stored);
    }
  }
  UNROLL for (int i = 0; i < 8; i++) {
    square_sum = metal::fma(value[p][i], value[p][i], square_sum);
  }
}
square_sum = simd_sum(square_sum);
if (THREADS > 32) {
  if (thread_index_in_simdgroup == 0) {
    partial[simdgroup_index_in_threadgroup] = square_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  square_sum = 0.0f;
  UNROLL for (int group = 0; group < THREADS / 32; group++) { square_sum += partial[group]; }
}

const float scale = metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(D)) + eps[0]);
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = (p * THREADS + thread_index) * 8;
  UNROLL for (int i = 0; i < 8; i++) {
    if (d + i < D) {
      const float factor = static_cast<float>(weight[weight_start + d + i]);
      normed[start + d + i] = static_cast<T>(value[p][i] * scale * factor);
    }
  }
}
