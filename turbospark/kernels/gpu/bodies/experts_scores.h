// scores[M, N] = matrix y + bias, y = norm(x) of M rows; the matrix [N, K] has BITS bits a code in
// MLX's affine layout, or is dense if BITS is 0. A SIMD-group makes a column of a row; threadgroup
// (32, SIMDGROUPS, 1); grid z: row. numbers: eps.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.z);
const int column = static_cast<int>(thread_position_in_grid.y);
const int at = metal::min(column, N - 1);
float dot = 0.0f;
float squares = 0.0f;
UNROLL for (int step = 0; step < (K + 255) / 256; step++) {
  const int k = 256 * step + 8 * lane;
  if (k < K) {
    Floats<8> value = load_floats<8>(x + row * K + k);
    Floats<8> factor;
    if (HAS_NORM_WEIGHT) { factor = load_floats<8>(norm_weight + k); }
    UNROLL for (int i = 0; i < 8; i++) {
      squares = metal::fma(value.v[i], value.v[i], squares);
      if (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[i]; }
    }
#if BITS == 0
    const Floats<8> weight = load_floats<8>(matrix + at * K + k);
    UNROLL for (int i = 0; i < 8; i++) { dot = metal::fma(weight.v[i], value.v[i], dot); }
#else
    const int group = at * (K / GROUP) + k / GROUP;
    const float scale = static_cast<float>(scales[group]);
    const float offset =
        HAS_BIASES ? static_cast<float>(biases[group]) : scale * -static_cast<float>(ZERO);
#if BITS == 8
    const Pack<uint, 2> words = load_pack<2>(matrix + at * (K / 4) + k / 4);
    float codes = 0.0f;
    UNROLL for (int i = 0; i < 8; i++) {
      const uint code = (words.v[i / 4] >> (8 * (i % 4))) & 255u;
      codes = metal::fma(value.v[i], small_to_float(code), codes);
    }
#else
    const float codes = add_codes<0>(matrix[at * (K / 8) + k / 8], ready_of<0>(value), 0.0f);
#endif
    dot = metal::fma(scale, codes, metal::fma(offset, sum_of(value), dot));
#endif
  }
}
const float mean = metal::fma(simd_sum(squares), 1.0f / static_cast<float>(K), numbers[0]);
const float score = simd_sum(dot) * (NORM ? metal::precise::rsqrt(mean) : 1.0f);
if (lane == 0 && column < N) {
  const float result = HAS_BIAS ? score + static_cast<float>(bias[at]) : score;
  scores[row * N + column] = static_cast<S>(result);
}
