// y[M, N] = x[M, K] times the transpose of a 4-bit weight [N, K] in MLX's affine layout.
// A SIMD-group makes ROWS columns of y for all M rows; threadgroup (32, SIMDGROUPS, 1). Each lane
// takes WORDS words of 8 codes at a time, so the order of sums depends on K and WORDS alone and
// every row of x gets the bits it would get by itself.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int first = static_cast<int>(thread_position_in_grid.y) * ROWS;

float total[M][ROWS];
UNROLL for (int m = 0; m < M; m++) {
  UNROLL for (int r = 0; r < ROWS; r++) { total[m][r] = 0.0f; }
}

for (int k = lane * 8 * WORDS; k < K; k += 32 * 8 * WORDS) {
  Pack<uint, WORDS> words[ROWS];
  float scale[ROWS];
  float offset[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    const int row = metal::min(first + r, N - 1);
    const int group = row * (K / GROUP) + k / GROUP;
    words[r] = load_pack<WORDS>(codes + row * (K / 8) + k / 8);
    scale[r] = static_cast<float>(scales[group]);
    offset[r] = HAS_BIASES ? static_cast<float>(biases[group])
                           : scale[r] * -static_cast<float>(ZERO);
  }
  UNROLL for (int w = 0; w < WORDS; w++) {
    // A code stays where it lies in its half word; x is divided by that power of two instead.
    float code[ROWS][8];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const uint low = words[r].v[w] & 0xffffu;
      const uint high = words[r].v[w] >> 16;
      UNROLL for (int i = 0; i < 4; i++) {
        code[r][i] = small_to_float(low & (15u << (4 * i)));
        code[r][i + 4] = small_to_float(high & (15u << (4 * i)));
      }
    }
    UNROLL for (int m = 0; m < M; m++) {
      const Floats<8> value = load_floats<8>(x + m * K + k + 8 * w);
      float shifted[8];
      float sum = 0.0f;
      UNROLL for (int i = 0; i < 8; i++) {
        sum += value.v[i];
        shifted[i] = value.v[i] * (1.0f / static_cast<float>(1 << (4 * (i & 3))));
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        float dot = 0.0f;
        UNROLL for (int i = 0; i < 8; i++) { dot = metal::fma(shifted[i], code[r][i], dot); }
        total[m][r] = metal::fma(scale[r], dot, metal::fma(offset[r], sum, total[m][r]));
      }
    }
  }
}

UNROLL for (int m = 0; m < M; m++) {
  UNROLL for (int r = 0; r < ROWS; r++) {
    const float result = simd_sum(total[m][r]);
    if (lane == 0 && first + r < N) {
      y[m * N + first + r] = static_cast<T>(result);
    }
  }
}
