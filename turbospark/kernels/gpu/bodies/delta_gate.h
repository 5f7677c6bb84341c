// y = rms_norm(x) * weight * gate(z), head by head, for any number of rows; gate is silu if SILU,
// else sigmoid. A SIMD-group makes a head of a row; threadgroup (32 * SIMDGROUPS, 1, 1).
// numbers: eps.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int rows = z_shape[0];
const int item = static_cast<int>(threadgroup_position_in_grid.x) * SIMDGROUPS +
                 static_cast<int>(simdgroup_index_in_threadgroup);
const int held = metal::min(item, rows * HV - 1);
const int row = held / HV;
const int head = held - row * HV;
Floats<(DV + 31) / 32> values;
UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
  values.v[i] = x[held * DV + metal::min(lane + 32 * i, DV - 1)];
}
const float squares = square_sum<DV>(values, lane);
const float scale = inverse_root(metal::fma(squares, 1.0f / static_cast<float>(DV), numbers[0]));
UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
  const int d = lane + 32 * i;
  if (item < rows * HV && d < DV) {
    const float gate = static_cast<float>(z[row * static_cast<int>(z_strides[0]) + head * DV + d]);
    const float normed = values.v[i] * scale * static_cast<float>(norm_weight[d]);
    y[held * DV + d] = static_cast<T>(normed * ((SILU ? gate : 1.0f) * sigmoid_of(gate)));
  }
}
