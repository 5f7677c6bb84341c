// hidden[M * TOP, I] = act(gate y) * (up y) of the experts that `ids` names for each of M rows, y the
// row, normed if NORM; 4-bit weights [E, I, K] in MLX's affine layout. A SIMD-group makes ROWS
// columns; threadgroup (32, SIMDGROUPS, 1); grid z: row and rank. numbers: eps.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int slot = static_cast<int>(thread_position_in_grid.z);
const int first = static_cast<int>(thread_position_in_grid.y) * ROWS;
const int expert = metal::max(0, metal::min(static_cast<int>(ids[slot]), E - 1)) * I;
const int x_row = slot / TOP * K;

float gate[ROWS];
float up[ROWS];
float squares = 0.0f;
UNROLL for (int r = 0; r < ROWS; r++) {
  gate[r] = 0.0f;
  up[r] = 0.0f;
}
for (int start = 0; start < K; start += 32 * 8 * WORDS) {
  const int k = start + lane * 8 * WORDS;
  if (k < K) {
    Pack<uint, WORDS> gate_words[ROWS];
    Pack<uint, WORDS> up_words[ROWS];
    float gate_scale[ROWS];
    float gate_offset[ROWS];
    float up_scale[ROWS];
    float up_offset[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int column = expert + metal::min(first + r, I - 1);
      const int group = column * (K / GROUP) + k / GROUP;
      gate_words[r] = load_pack<WORDS>(gate_codes + column * (K / 8) + k / 8);
      up_words[r] = load_pack<WORDS>(up_codes + column * (K / 8) + k / 8);
      gate_scale[r] = static_cast<float>(gate_scales[group]);
      up_scale[r] = static_cast<float>(up_scales[group]);
      gate_offset[r] = HAS_BIASES ? static_cast<float>(gate_biases[group])
                                  : gate_scale[r] * -static_cast<float>(ZERO);
      up_offset[r] = HAS_BIASES ? static_cast<float>(up_biases[group])
                                : up_scale[r] * -static_cast<float>(ZERO);
    }
    UNROLL for (int w = 0; w < WORDS; w++) {
      Floats<8> value = load_floats<8>(x + x_row + k + 8 * w);
      Floats<8> factor;
      if (HAS_NORM_WEIGHT) { factor = load_floats<8>(norm_weight + k + 8 * w); }
      UNROLL for (int i = 0; i < 8; i++) {
        if (NORM) { squares = metal::fma(value.v[i], value.v[i], squares); }
        if (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[i]; }
      }
      const float sum = sum_of(value);
      const Floats<8> shifted = shifted_of(value);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const float gate_dot = dot_word(gate_words[r].v[w], shifted);
        const float up_dot = dot_word(up_words[r].v[w], shifted);
        gate[r] = metal::fma(gate_scale[r], gate_dot, metal::fma(gate_offset[r], sum, gate[r]));
        up[r] = metal::fma(up_scale[r], up_dot, metal::fma(up_offset[r], sum, up[r]));
      }
    }
  }
}
float inverse = 1.0f;
if (NORM) {
  const float mean = metal::fma(simd_sum(squares), 1.0f / static_cast<float>(K), numbers[0]);
  inverse = metal::precise::rsqrt(mean);
}
UNROLL for (int r = 0; r < ROWS; r++) {
  const float gate_value = simd_sum(gate[r]) * inverse;
  const float up_value = simd_sum(up[r]) * inverse;
  if (lane == 0 && first + r < I) {
    hidden[slot * I + first + r] = activated<ACTIVATION>(gate_value) * up_value;
  }
}
