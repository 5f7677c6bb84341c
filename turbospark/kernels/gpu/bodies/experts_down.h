// y[M, N] = the sum over TOP experts of weight * (down h + bias), 4-bit weights [E, N, I]. Of each
// row hidden[M, WIDTH] holds theirs, the hidden row of a shared expert, IS values, all of them where
// `hidden_place` says, weights, ids and a score. The shared one's down h is added: SHARED_EXPERT 1
// multiplies it by sigmoid of the score, 2 adds it as it is, 3 writes it to a row of its own,
// y[M, 2, N]. Then comes residual if RESIDUAL.
// A threadgroup (32, SIMDGROUPS, 1) makes COLUMNS columns of a row; grid z: row. A hidden row has
// PARTS parts, a shared one SHARED_PARTS, of 256 * WORDS values. A SIMD-group holds one part at a
// time while the columns' codes pass by, AHEAD columns at once; the sums of parts meet in the end.
SHARED float sums[(TOP * PARTS + SHARED_PARTS) * COLUMNS];
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int member = static_cast<int>(simdgroup_index_in_threadgroup);
const int row = static_cast<int>(threadgroup_position_in_grid.z);
const int first = static_cast<int>(threadgroup_position_in_grid.y) * COLUMNS;
const int notes = row * WIDTH + TOP * I + IS;
const int own_rank = metal::min(lane, TOP - 1);
const int noted = static_cast<int>(hidden[notes + TOP + own_rank]);
const int own_expert = metal::max(0, metal::min(noted, E - 1));
const float own_share = hidden[notes + own_rank];
const int own_column = metal::min(first + metal::min(lane, COLUMNS - 1), N - 1);
float base[TOP];
if (HAS_BIAS && member == 0) {
  UNROLL for (int rank = 0; rank < TOP; rank++) {
    const int expert = simd_broadcast(own_expert, static_cast<ushort>(rank));
    base[rank] = static_cast<float>(bias[expert * N + own_column]);
  }
}
#if SHARED_EXPERT
#define OF_DOWN(name) (is_shared ? shared_##name : name)
#else
#define OF_DOWN(name) name
#endif
for (int part = member; part < TOP * PARTS + SHARED_PARTS; part += SIMDGROUPS) {
  const int rank = metal::min(part / PARTS, TOP);
  const bool is_shared = rank == TOP;
  const int expert = simd_broadcast(own_expert, static_cast<ushort>(metal::min(rank, TOP - 1)));
  const int above = is_shared ? 0 : expert * N;
  const GLOBAL uint* codes_at = OF_DOWN(codes);
  const int width = is_shared ? IS : I;
  const int start = (part - rank * PARTS) * 256 * WORDS;
  const int lanes = metal::min(32, (width - start) / (8 * WORDS));
  const int own = metal::min(lane, lanes - 1);
  const int k = start + own * 8 * WORDS;
  Floats<8> ready[WORDS];
  float sum = 0.0f;
  UNROLL for (int w = 0; w < WORDS; w++) {
    Floats<8> value;
    UNROLL for (int half = 0; half < 2; half++) {
      const int quad = (2 * w + half) * lanes + own;
      const Pack<float, 4> four = load_pack<4>(hidden + row * WIDTH + rank * I + start + 4 * quad);
      UNROLL for (int i = 0; i < 4; i++) {
        value.v[4 * half + i] = lane < lanes ? four.v[i] : 0.0f;
      }
    }
    sum += sum_of(value);
    ready[w] = ready_of<MODE>(value);
  }
  for (int c = 0; c < COLUMNS; c += AHEAD) {
    Pack<uint, WORDS> words[AHEAD];
    float scale[AHEAD];
    float offset[AHEAD];
    Floats<AHEAD> made;
    UNROLL for (int j = 0; j < AHEAD; j++) {
      const int column = above + metal::min(first + c + j, N - 1);
      const int group = column * (width / GROUP) + k / GROUP;
      words[j] = load_pack<WORDS>(codes_at + column * (width / 8) + k / 8);
      scale[j] = scale_of<MODE>(OF_DOWN(scales)[group]);
      offset[j] = HAS_BIASES ? static_cast<float>(OF_DOWN(biases)[group])
                             : scale[j] * -static_cast<float>(ZERO);
    }
    const float none = none_when_asked();
    UNROLL for (int j = 0; j < AHEAD; j++) {
      float dot = none;
      UNROLL for (int w = 0; w < WORDS; w++) {
        dot = add_codes<MODE>(words[j].v[w], ready[w], dot);
      }
      made.v[j] = metal::fma(scale[j], dot, offset[j] * sum);
    }
    const float whole = sums_of(made, lane);
    if (lane < AHEAD) { sums[part * COLUMNS + c + place_of<AHEAD>(lane)] = whole; }
  }
}
#undef OF_DOWN
threadgroup_barrier(mem_flags::mem_threadgroup);
if (member == 0) {
  const int own = metal::min(lane, COLUMNS - 1);
  float value = 0.0f;
  UNROLL for (int rank = 0; rank < TOP; rank++) {
    float made = HAS_BIAS ? base[rank] : 0.0f;
    UNROLL for (int part = 0; part < PARTS; part++) {
      made += sums[(rank * PARTS + part) * COLUMNS + own];
    }
    value = metal::fma(simd_broadcast(own_share, static_cast<ushort>(rank)), made, value);
  }
  float other = 0.0f;
  UNROLL for (int part = 0; part < SHARED_PARTS; part++) {
    other += sums[(TOP * PARTS + part) * COLUMNS + own];
  }
#if SHARED_EXPERT == 1
  const float score = hidden[notes + 2 * TOP];
  value = metal::fma(1.0f / (1.0f + metal::precise::exp(-score)), other, value);
#elif SHARED_EXPERT == 2
  value = value + other;
#endif
  const int n = first + lane;
  if (lane < COLUMNS && n < N) {
#if SHARED_EXPERT == 3
    y[row * 2 * N + n] = static_cast<T>(value);
    y[(row * 2 + 1) * N + n] = static_cast<T>(other);
#else
    y[row * N + n] = static_cast<T>(
        RESIDUAL ? value + static_cast<float>(residual[row * N + n]) : value);
#endif
  }
}
