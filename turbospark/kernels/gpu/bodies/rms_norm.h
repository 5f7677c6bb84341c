// y = (residual + x / sqrt(mean(x^2) + eps) * weight) * multiple for rows of D values: a threadgroup
// of THREADS a row, PARTS times eight values a thread, all of which are loaded before the only
// barrier. Row r has weights r % GROUPS. WIDE is 1 where D is a multiple of 8, so that eight values
// are one load.
SHARED float partial[THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int row = static_cast<int>(threadgroup_position_in_grid.x);
const int start = row * D;
const int weight_start = row % GROUPS * D;

float value[PARTS][8];
float factor[PARTS][8];
float base[PARTS][8];
float square_sum = 0.0f;
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = (p * THREADS + thread_index) * 8;
  UNROLL for (int i = 0; i < 8; i++) {
    value[p][i] = 0.0f;
    factor[p][i] = 1.0f;
    base[p][i] = 0.0f;
  }
  if (d < D) {
#if WIDE
    const Floats<8> values = load_floats<8>(x + start + d);
    UNROLL for (int i = 0; i < 8; i++) { value[p][i] = values.v[i]; }
    if (HAS_WEIGHT) {
      const Floats<8> factors = load_floats<8>(weight + weight_start + d);
      UNROLL for (int i = 0; i < 8; i++) { factor[p][i] = factors.v[i]; }
    }
    if (HAS_RESIDUAL) {
      const Floats<8> addends = load_floats<8>(residual + start + d);
      UNROLL for (int i = 0; i < 8; i++) { base[p][i] = addends.v[i]; }
    }
#else
    UNROLL for (int i = 0; i < 8; i++) {
      if (d + i < D) {
        value[p][i] = static_cast<float>(x[start + d + i]);
        factor[p][i] = HAS_WEIGHT ? static_cast<float>(weight[weight_start + d + i]) : 1.0f;
        base[p][i] = HAS_RESIDUAL ? static_cast<float>(residual[start + d + i]) : 0.0f;
      }
    }
#endif
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

const float whole = HAS_MULTIPLE ? static_cast<float>(multiple[0]) : 1.0f;
const float scale = metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(D)) + eps[0]);
UNROLL for (int p = 0; p < PARTS; p++) {
  const int d = (p * THREADS + thread_index) * 8;
  Pack<T, 8> result;
  UNROLL for (int i = 0; i < 8; i++) {
    if (d + i < D) {
      const float normed = value[p][i] * scale * (factor[p][i] + ADDED);
      result.v[i] = static_cast<T>((base[p][i] + normed) * whole);
#if !WIDE
      y[start + d + i] = result.v[i];
#endif
    }
  }
#if WIDE
  if (d < D) {
    store_pack<8>(y + start + d, result);
  }
#endif
}
