// y[M, N] = the sum over TOP experts of weight * (down h + bias), 4-bit weights [E, N, I]. Of each
// row hidden[M, WIDTH] holds theirs, the hidden row of a shared expert, IS values, weights, ids and
// a score. The shared one's down h is added: SHARED_EXPERT 1 multiplies it by sigmoid of the score,
// 2 adds it as it is, 3 writes it to a row of its own, y[M, 2, N]. Then comes residual if RESIDUAL.
// A SIMD-group makes ROWS columns of a row, BATCH experts at a time in rank order; threadgroup
// (32, SIMDGROUPS, 1); grid z: row.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.z);
const int first = static_cast<int>(thread_position_in_grid.y) * ROWS;
float total[ROWS];
float beside[ROWS];
int experts[TOP];
const int notes = row * WIDTH + TOP * I + IS;
UNROLL for (int rank = 0; rank < TOP; rank++) {
  const int expert = static_cast<int>(hidden[notes + TOP + rank]);
  experts[rank] = metal::max(0, metal::min(expert, E - 1)) * N;
}
const int own_rank = metal::min(lane, TOP - 1);
const int noted = static_cast<int>(hidden[notes + TOP + own_rank]);
const int own_expert = metal::max(0, metal::min(noted, E - 1));
const float own_share = lane < TOP ? hidden[notes + own_rank] : 0.0f;
UNROLL for (int r = 0; r < ROWS; r++) {
  total[r] = 0.0f;
  beside[r] = 0.0f;
  if (HAS_BIAS) {
    const int column = own_expert * N + metal::min(first + r, N - 1);
    total[r] = own_share * static_cast<float>(bias[column]);
  }
}
#if SHARED_EXPERT
const float score = hidden[notes + 2 * TOP];
for (int start = 0; start < IS; start += 32 * 8 * SHARED_WORDS) {
  const int k = start + lane * 8 * SHARED_WORDS;
  if (k < IS) {
    Pack<uint, SHARED_WORDS> words[ROWS];
    float scale[ROWS];
    float offset[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int column = metal::min(first + r, N - 1);
      const int group = column * (IS / GROUP) + k / GROUP;
      words[r] = load_pack<SHARED_WORDS>(shared_codes + column * (IS / 8) + k / 8);
      scale[r] = scale_of<MODE>(shared_scales[group]);
      offset[r] = HAS_BIASES ? static_cast<float>(shared_biases[group])
                             : scale[r] * -static_cast<float>(ZERO);
    }
    UNROLL for (int w = 0; w < SHARED_WORDS; w++) {
      const Floats<8> value = load_floats<8>(hidden + row * WIDTH + TOP * I + k + 8 * w);
      const float sum = sum_of(value);
      const Floats<8> ready = ready_of<MODE>(value);
      UNROLL for (int r = 0; r < ROWS; r++) {
        const float dot = dot_codes<MODE>(words[r].v[w], ready);
        beside[r] = metal::fma(scale[r], dot, metal::fma(offset[r], sum, beside[r]));
      }
    }
  }
}
#endif
UNROLL for (int rank = 0; rank < TOP; rank += BATCH) {
  float part[BATCH * ROWS];
  UNROLL for (int j = 0; j < BATCH * ROWS; j++) { part[j] = 0.0f; }
  for (int start = 0; start < I; start += 32 * 8 * WORDS) {
    const int k = start + lane * 8 * WORDS;
    if (k < I) {
      Pack<uint, WORDS> words[BATCH * ROWS];
      float scale[BATCH * ROWS];
      float offset[BATCH * ROWS];
      UNROLL for (int j = 0; j < BATCH * ROWS; j++) {
        const int column = experts[rank + j / ROWS] + metal::min(first + j % ROWS, N - 1);
        const int group = column * (I / GROUP) + k / GROUP;
        words[j] = load_pack<WORDS>(codes + column * (I / 8) + k / 8);
        scale[j] = scale_of<MODE>(scales[group]);
        offset[j] = HAS_BIASES ? static_cast<float>(biases[group])
                               : scale[j] * -static_cast<float>(ZERO);
      }
      UNROLL for (int b = 0; b < BATCH; b++) {
        UNROLL for (int w = 0; w < WORDS; w++) {
          const int from = row * WIDTH + (rank + b) * I + k + 8 * w;
          const Floats<8> value = load_floats<8>(hidden + from);
          const float sum = sum_of(value);
          const Floats<8> ready = ready_of<MODE>(value);
          UNROLL for (int r = 0; r < ROWS; r++) {
            const int j = b * ROWS + r;
            const float dot = dot_codes<MODE>(words[j].v[w], ready);
            part[j] = metal::fma(scale[j], dot, metal::fma(offset[j], sum, part[j]));
          }
        }
      }
    }
  }
  UNROLL for (int b = 0; b < BATCH; b++) {
    const float share = simd_broadcast(own_share, static_cast<ushort>(rank + b));
    UNROLL for (int r = 0; r < ROWS; r++) {
      total[r] = metal::fma(share, part[b * ROWS + r], total[r]);
    }
  }
}
#if SHARED_EXPERT == 1
const float opening = 1.0f / (1.0f + metal::precise::exp(-score));
#endif
UNROLL for (int r = 0; r < ROWS; r++) {
  const int n = first + r;
  float value = simd_sum(total[r]);
#if SHARED_EXPERT
  const float other = simd_sum(beside[r]);
#if SHARED_EXPERT == 1
  value = metal::fma(opening, other, value);
#elif SHARED_EXPERT == 2
  value = value + other;
#else
  if (lane == 0 && n < N) {
    y[(row * 2 + 1) * N + n] = static_cast<T>(other);
  }
#endif
#endif
  if (lane == 0 && n < N) {
#if SHARED_EXPERT == 3
    y[row * 2 * N + n] = static_cast<T>(value);
#else
    y[row * N + n] = static_cast<T>(
        RESIDUAL ? value + static_cast<float>(residual[row * N + n]) : value);
#endif
  }
}
