// scores[M, N] = matrix y + bias, y = norm(x) of M rows; the matrix [N, K] has BITS bits a code in
// MLX's affine layout, or is dense if BITS is 0. If SUMS, x is not the row but what norm(branch) is
// added to, with that norm's weight and eps in branch_norm[K + 1], and the row, rounded as a stream
// is, goes into whole[M, K].
// A threadgroup (32, SPLIT, 1) makes COLUMNS columns of a row; grid z: row. Its SIMD-groups share
// out the row, STEPS times eight values a lane, and ask for all they need before they sum up.
// numbers: eps.
SHARED float shares[SPLIT * (COLUMNS + 2)];
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int member = static_cast<int>(simdgroup_index_in_threadgroup);
const int row = static_cast<int>(threadgroup_position_in_grid.z);
const int place = static_cast<int>(threadgroup_position_in_grid.y);
Floats<8> value[STEPS];
Floats<8> factor[STEPS];
#if SUMS
Floats<8> added[STEPS];
Floats<8> added_factor[STEPS];
#endif
#if BITS == 0
Pack<TYPE_matrix, 8> weights[STEPS * COLUMNS];
#else
Pack<uint, BITS / 4> words[STEPS * COLUMNS];
float scale[STEPS * COLUMNS];
float offset[STEPS * COLUMNS];
#endif
UNROLL for (int j = 0; j < STEPS * COLUMNS; j++) {
  const int k = metal::min(256 * (j / COLUMNS * SPLIT + member) + 8 * lane, K - 8);
  const int at = metal::min(place * COLUMNS + j % COLUMNS, N - 1);
#if BITS == 0
  weights[j] = load_pack<8>(matrix + at * K + k);
#else
  const int group = at * (K / GROUP) + k / GROUP;
  words[j] = load_pack<BITS / 4>(matrix + at * (K * BITS / 32) + k * BITS / 32);
  scale[j] = static_cast<float>(scales[group]);
  offset[j] = HAS_BIASES ? static_cast<float>(biases[group]) : scale[j] * -static_cast<float>(ZERO);
#endif
}
UNROLL for (int step = 0; step < STEPS; step++) {
  const int k = metal::min(256 * (step * SPLIT + member) + 8 * lane, K - 8);
#if SUMS
  added[step] = floats_of(load_pack<8>(branch + row * K + k));
  added_factor[step] = floats_of(load_pack<8>(branch_norm + k));
#endif
  if (HAS_NORM_WEIGHT) { factor[step] = floats_of(load_pack<8>(norm_weight + k)); }
}
const int own = metal::min(256 * member + 8 * lane, K - 8);
const Floats<8 * STEPS> given = load_many<STEPS>(x + row * K + own, 256 * SPLIT, K - 8 - own);
UNROLL for (int j = 0; j < 8 * STEPS; j++) { value[j / 8].v[j % 8] = given.v[j]; }
const float none = none_when_asked();
#if SUMS
float added_squares = none;
UNROLL for (int step = 0; step < STEPS; step++) {
  const bool is_there = 256 * (step * SPLIT + member) + 8 * lane < K;
  UNROLL for (int i = 0; i < 8; i++) {
    added[step].v[i] = is_there ? added[step].v[i] : 0.0f;
    added_squares = metal::fma(added[step].v[i], added[step].v[i], added_squares);
  }
}
added_squares = simd_sum(added_squares);
if (lane == 0) { shares[SPLIT * (COLUMNS + 1) + member] = added_squares; }
threadgroup_barrier(mem_flags::mem_threadgroup);
added_squares = 0.0f;
UNROLL for (int part = 0; part < SPLIT; part++) {
  added_squares += shares[SPLIT * (COLUMNS + 1) + part];
}
const float root = metal::precise::rsqrt(
    added_squares * (1.0f / static_cast<float>(K)) + branch_norm[K]);
UNROLL for (int step = 0; step < STEPS; step++) {
  const int k = 256 * (step * SPLIT + member) + 8 * lane;
  Pack<TYPE_x, 8> rounded;
  UNROLL for (int i = 0; i < 8; i++) {
    const float normed = added[step].v[i] * root * added_factor[step].v[i];
    rounded.v[i] = static_cast<TYPE_x>(value[step].v[i] + normed);
    value[step].v[i] = static_cast<float>(rounded.v[i]);
  }
  if (place == 0 && k < K) {
    store_pack<8>(whole + row * K + k, rounded);
  }
}
#endif
float dot[COLUMNS];
float squares = none;
UNROLL for (int c = 0; c < COLUMNS; c++) { dot[c] = none; }
UNROLL for (int step = 0; step < STEPS; step++) {
  const bool is_there = 256 * (step * SPLIT + member) + 8 * lane < K;
  UNROLL for (int i = 0; i < 8; i++) {
    value[step].v[i] = is_there ? value[step].v[i] : 0.0f;
    squares = metal::fma(value[step].v[i], value[step].v[i], squares);
    if (HAS_NORM_WEIGHT) { value[step].v[i] = value[step].v[i] * factor[step].v[i]; }
  }
#if BITS != 0
  const float sum = sum_of(value[step]);
#endif
#if BITS == 4
  const Floats<8> ready = ready_of<0>(value[step]);
#endif
  UNROLL for (int c = 0; c < COLUMNS; c++) {
#if BITS == 0
    UNROLL for (int i = 0; i < 8; i++) {
      const float weight = static_cast<float>(weights[step * COLUMNS + c].v[i]);
      dot[c] = metal::fma(weight, value[step].v[i], dot[c]);
    }
#else
    const int j = step * COLUMNS + c;
    float codes = 0.0f;
#if BITS == 8
    UNROLL for (int i = 0; i < 8; i++) {
      const uint code = (words[j].v[i / 4] >> (8 * (i % 4))) & 255u;
      codes = metal::fma(value[step].v[i], small_to_float(code), codes);
    }
#else
    codes = add_codes<0>(words[j].v[0], ready, codes);
#endif
    dot[c] = metal::fma(scale[j], codes, metal::fma(offset[j], sum, dot[c]));
#endif
  }
}
squares = simd_sum(squares);
UNROLL for (int c = 0; c < COLUMNS; c++) {
  const float share = simd_sum(dot[c]);
  if (lane == 0) { shares[c * SPLIT + member] = share; }
}
if (lane == 0) { shares[COLUMNS * SPLIT + member] = squares; }
threadgroup_barrier(mem_flags::mem_threadgroup);
const int column = place * COLUMNS + lane;
if (member == 0 && lane < COLUMNS && column < N) {
  float score = 0.0f;
  float all_squares = 0.0f;
  UNROLL for (int part = 0; part < SPLIT; part++) {
    score += shares[lane * SPLIT + part];
    all_squares += shares[COLUMNS * SPLIT + part];
  }
  const float mean = metal::fma(all_squares, 1.0f / static_cast<float>(K), numbers[0]);
  score = score * (NORM ? metal::precise::rsqrt(mean) : 1.0f);
  scores[row * N + column] =
      static_cast<S>(HAS_BIAS ? score + static_cast<float>(bias[column]) : score);
}
