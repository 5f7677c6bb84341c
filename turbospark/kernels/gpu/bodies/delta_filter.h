// What a delta net makes of its projections before the delta rule, for any number of rows: filter,
// silu, lengths of queries and keys, gates; and the rows that the next pass begins with.
// A SIMD-group makes a head of a row; threadgroup (32 * SIMDGROUPS, 1, 1).
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int rows = qkv_shape[0];
const int heads = 2 * HK + HV;
const int item = static_cast<int>(threadgroup_position_in_grid.x) * SIMDGROUPS +
                 static_cast<int>(simdgroup_index_in_threadgroup);
const int row = metal::min(item / heads, rows - 1);
const int among = item - item / heads * heads;
const bool is_held = item < rows * heads;
const bool is_key = among < 2 * HK;
const int head = among - 2 * HK;
const int first = is_key ? among * DK : 2 * HK * DK + head * DV;
const int channels = 2 * HK * DK + HV * DV;
const int stride = static_cast<int>(qkv_strides[0]);
if (is_key) {
  const Floats<(DK + 31) / 32> x =
      filtered<TAPS, DK>(qkv, stride, tail, conv, channels, row, first, lane);
  float scale = inverse_root(square_sum<DK>(x, lane) + 1e-6f);
  if (among < HK) { scale = scale * metal::precise::rsqrt(static_cast<float>(DK)); }
  UNROLL for (int i = 0; i < (DK + 31) / 32; i++) {
    const int d = lane + 32 * i;
    if (is_held && d < DK) {
      if (among < HK) {
        q[(row * HK + among) * DK + d] = x.v[i] * scale;
      } else {
        k[(row * HK + among - HK) * DK + d] = x.v[i] * scale;
      }
    }
  }
} else {
  const Floats<(DV + 31) / 32> x =
      filtered<TAPS, DV>(qkv, stride, tail, conv, channels, row, first, lane);
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    const int d = lane + 32 * i;
    if (is_held && d < DV) {
      v[(row * HV + head) * DV + d] = x.v[i];
    }
  }
  if (is_held && lane == 0) {
    const float a_value = static_cast<float>(a[row * static_cast<int>(a_strides[0]) + head]);
    const float b_value = static_cast<float>(b[row * static_cast<int>(b_strides[0]) + head]);
    decay[row * HV + head] = decay_of(a_value, static_cast<float>(dt_bias[head]),
                                      static_cast<float>(log_rate[head]));
    beta[row * HV + head] = sigmoid_of(b_value);
  }
}
if (is_held && row == 0) {
  for (int slot = 0; slot < TAPS - 1; slot++) {
    const int from = rows + slot - (TAPS - 1);
    for (int channel = first + lane; channel < first + (is_key ? DK : DV); channel += 32) {
      new_tail[slot * channels + channel] =
          raw_row<TAPS>(qkv, stride, tail, channels, from, channel);
    }
  }
}
