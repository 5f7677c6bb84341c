// y[M, N] = x[M, K] times the transpose of 4-bit weights [N, K] in MLX's affine layout.
// A SIMD-group makes ROWS columns of y for all M rows; threadgroup (32, SIMDGROUPS, 1). Each lane
// takes WORDS words of 8 codes at a time, so the order of sums depends on K and WORDS alone and
// every row of x gets the bits it would get by itself. Of a pair it makes ROWS columns of both.
const int lane = static_cast<int>(thread_index_in_simdgroup);
int unit = static_cast<int>(thread_position_in_grid.y);
int part = 0;
UNROLL for (int i = 0; i < PARTS - 1; i++) {
  if (part == i && unit >= UNITS(PART(N, i), ROWS)) {
    unit -= UNITS(PART(N, i), ROWS);
    part = i + 1;
  }
}
const int first = unit * ROWS;
const int columns = PART(N, part);

float total[M][MATRICES * ROWS];
float squares[M];
UNROLL for (int m = 0; m < M; m++) {
  squares[m] = 0.0f;
  UNROLL for (int r = 0; r < MATRICES * ROWS; r++) { total[m][r] = 0.0f; }
}

for (int k = lane * 8 * WORDS; k < K; k += 32 * 8 * WORDS) {
  Pack<uint, WORDS> words[MATRICES * ROWS];
  float scale[MATRICES * ROWS];
  float offset[MATRICES * ROWS];
  UNROLL for (int r = 0; r < MATRICES * ROWS; r++) {
    const GLOBAL auto* codes = MATRIX(codes, part, r / ROWS);
    const GLOBAL auto* scales = MATRIX(scales, part, r / ROWS);
    const GLOBAL auto* biases = MATRIX(biases, part, r / ROWS);
    const int row = metal::min(first + r % ROWS, columns - 1);
    const int group = row * (K / GROUP) + k / GROUP;
    words[r] = load_pack<WORDS>(codes + row * (K / 8) + k / 8);
    scale[r] = static_cast<float>(scales[group]);
    offset[r] = HAS_BIASES ? static_cast<float>(biases[group])
                           : scale[r] * -static_cast<float>(ZERO);
  }
  UNROLL for (int w = 0; w < WORDS; w++) {
    // A code stays where it lies in its half word; x is divided by that power of two instead.
    float code[MATRICES * ROWS][8];
    UNROLL for (int r = 0; r < MATRICES * ROWS; r++) {
      const uint low = words[r].v[w] & 0xffffu;
      const uint high = words[r].v[w] >> 16;
      UNROLL for (int i = 0; i < 4; i++) {
        code[r][i] = small_to_float(low & (15u << (4 * i)));
        code[r][i + 4] = small_to_float(high & (15u << (4 * i)));
      }
    }
    Floats<8> factor;
    if (HAS_NORM_WEIGHT) { factor = load_floats<8>(norm_weight + k + 8 * w); }
    UNROLL for (int m = 0; m < M; m++) {
      Floats<8> value = load_floats<8>(x + m * K + k + 8 * w);
      float shifted[8];
      float sum = 0.0f;
      UNROLL for (int i = 0; i < 8; i++) {
        if (NORM) { squares[m] = metal::fma(value.v[i], value.v[i], squares[m]); }
        if (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[i]; }
        sum += value.v[i];
        shifted[i] = value.v[i] * (1.0f / static_cast<float>(1 << (4 * (i & 3))));
      }
      UNROLL for (int r = 0; r < MATRICES * ROWS; r++) {
        float dot = 0.0f;
        UNROLL for (int i = 0; i < 8; i++) { dot = metal::fma(shifted[i], code[r][i], dot); }
        total[m][r] = metal::fma(scale[r], dot, metal::fma(offset[r], sum, total[m][r]));
      }
    }
  }
}

UNROLL for (int m = 0; m < M; m++) {
  const float inverse = NORM ? inverse_root_mean(simd_sum(squares[m]), K, numbers[0]) : 1.0f;
  UNROLL for (int r = 0; r < MATRICES * ROWS; r++) {
    total[m][r] = simd_sum(total[m][r]) * inverse;
  }
  UNROLL for (int r = 0; r < ROWS; r++) {
    const int n = first + r;
    if (lane == 0 && n < columns) {
      float result[MATRICES];
      UNROLL for (int matrix = 0; matrix < MATRICES; matrix++) {
        result[matrix] = total[m][matrix * ROWS + r];
        if (((HAS_BIAS >> (MATRICES == 2 ? matrix : part)) & 1) != 0) {
          result[matrix] += MATRIX_VALUE(bias, part, matrix, n);
        }
      }
      float value = result[0];
      if (MATRICES == 2) { value = activate<ACTIVATION>(value) * result[MATRICES - 1]; }
      if (SOFTCAP) { value = soft_cap(value, numbers[1]); }
      if (RESIDUAL) { value += static_cast<float>(residual[m * N0 + n]); }
      PART(y, part)[m * columns + n] = static_cast<T>(value);
    }
  }
}
