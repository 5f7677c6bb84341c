// y[M, N] = the sum over TOP experts of weight * (down h), h their hidden rows [M * TOP, I], 4-bit
// weights [E, N, I] in MLX's affine layout; plus sigmoid(gate) * shared if HAS_SHARED. A SIMD-group
// makes ROWS columns of a row, BATCH experts at a time in rank order; threadgroup
// (32, SIMDGROUPS, 1); grid z: row.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.z);
const int first = static_cast<int>(thread_position_in_grid.y) * ROWS;
// Asked for first: an array this small may lie in the host's memory.
const float score = HAS_SHARED ? static_cast<float>(gate[row]) : 0.0f;
float total[ROWS];
UNROLL for (int r = 0; r < ROWS; r++) { total[r] = 0.0f; }
for (int rank = 0; rank < TOP; rank += BATCH) {
  int expert[BATCH];
  float part[BATCH * ROWS];
  UNROLL for (int b = 0; b < BATCH; b++) {
    expert[b] = metal::max(0, metal::min(static_cast<int>(ids[row * TOP + rank + b]), E - 1)) * N;
    UNROLL for (int r = 0; r < ROWS; r++) { part[b * ROWS + r] = 0.0f; }
  }
  for (int start = 0; start < I; start += 32 * 8 * WORDS) {
    const int k = start + lane * 8 * WORDS;
    if (k < I) {
      Pack<uint, WORDS> words[BATCH * ROWS];
      float scale[BATCH * ROWS];
      float offset[BATCH * ROWS];
      UNROLL for (int j = 0; j < BATCH * ROWS; j++) {
        const int column = expert[j / ROWS] + metal::min(first + j % ROWS, N - 1);
        const int group = column * (I / GROUP) + k / GROUP;
        words[j] = load_pack<WORDS>(codes + column * (I / 8) + k / 8);
        scale[j] = static_cast<float>(scales[group]);
        offset[j] = HAS_BIASES ? static_cast<float>(biases[group])
                               : scale[j] * -static_cast<float>(ZERO);
      }
      UNROLL for (int b = 0; b < BATCH; b++) {
        UNROLL for (int w = 0; w < WORDS; w++) {
          const int from = (row * TOP + rank + b) * I + k + 8 * w;
          const Floats<8> value = load_floats<8>(hidden + from);
          const float sum = sum_of(value);
          const Floats<8> shifted = shifted_of(value);
          UNROLL for (int r = 0; r < ROWS; r++) {
            const int j = b * ROWS + r;
            const float dot = dot_word(words[j].v[w], shifted);
            part[j] = metal::fma(scale[j], dot, metal::fma(offset[j], sum, part[j]));
          }
        }
      }
    }
  }
  UNROLL for (int b = 0; b < BATCH; b++) {
    const float share = weights[row * TOP + rank + b];
    UNROLL for (int r = 0; r < ROWS; r++) {
      total[r] = metal::fma(share, part[b * ROWS + r], total[r]);
    }
  }
}
const float opening = 1.0f / (1.0f + metal::precise::exp(-score));
UNROLL for (int r = 0; r < ROWS; r++) {
  const int n = first + r;
  float value = simd_sum(total[r]);
  if (lane == 0 && n < N) {
    if (HAS_SHARED) {
      value = metal::fma(opening, static_cast<float>(shared[row * N + n]), value);
    }
    y[row * N + n] = static_cast<T>(value);
  }
}
