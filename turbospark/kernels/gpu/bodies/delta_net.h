// A delta-net layer between its projections, for M rows: filter, silu and lengths of the heads,
// gates, the delta rule, gated norm. Threadgroup (32 * SIMDGROUPS, 1, 1), one a value head.
//
// A value row of the state is dealt to LANES lanes, QUADS times four values each; a SIMD-group has
// HELD times 32 / LANES of them in registers for all M rows, and takes TURNS turns. numbers: eps.
WIDE_SHARED float queries[M * DK];
WIDE_SHARED float keys[M * DK];
SHARED float values[M * DV];
SHARED float read[M * DV];
SHARED float gates[2 * M];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int head = static_cast<int>(threadgroup_position_in_grid.x);
const int key_head = head / (HV / HK);
const int within = lane % LANES;
const int first_row = simdgroup * (32 / LANES) + lane / LANES;
const int step = SIMDGROUPS * (32 / LANES);
const int channels = 2 * HK * DK + HV * DV;

Floats<4 * QUADS> S[HELD];
UNROLL for (int set = 0; set < HELD; set++) {
  const int row = metal::min(first_row + set * step, DV - 1);
  S[set] = load_state<LANES, 4 * QUADS>(state + (head * DV + row) * DK, within);
}

const int stride = static_cast<int>(qkv_strides[0]);
const float query_scale = metal::precise::rsqrt(static_cast<float>(DK));
for (int item = simdgroup; item < 3 * M; item += SIMDGROUPS) {
  const int part = item / M;
  const int m = item - part * M;
  const bool is_key = part < 2;
  const int first = is_key ? (part * HK + key_head) * DK : 2 * HK * DK + head * DV;
  if (is_key) {
    const Floats<(DK + 31) / 32> x =
        filtered<TAPS, DK>(qkv, stride, tail, conv, channels, m, first, lane);
    float scale = inverse_root(square_sum<DK>(x, lane) + 1e-6f);
    if (part == 0) { scale = scale * query_scale; }
    UNROLL for (int i = 0; i < (DK + 31) / 32; i++) {
      const int d = lane + 32 * i;
      if (d < DK) {
        if (part == 0) {
          queries[m * DK + d] = x.v[i] * scale;
        } else {
          keys[m * DK + d] = x.v[i] * scale;
#if RECORD
          if (head % (HV / HK) == 0) {
            k[(m * HK + key_head) * DK + d] = x.v[i] * scale;
          }
#endif
        }
      }
    }
  } else {
    const Floats<(DV + 31) / 32> x =
        filtered<TAPS, DV>(qkv, stride, tail, conv, channels, m, first, lane);
    UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
      const int d = lane + 32 * i;
      if (d < DV) {
        values[m * DV + d] = x.v[i];
#if RECORD
        v[(m * HV + head) * DV + d] = x.v[i];
#endif
      }
    }
  }
  if (m == 0 && (!is_key || head % (HV / HK) == 0)) {
    for (int slot = 0; slot < TAPS - 1; slot++) {
      const int from = M + slot - (TAPS - 1);
      for (int channel = first + lane; channel < first + (is_key ? DK : DV); channel += 32) {
        new_tail[slot * channels + channel] =
            raw_row<TAPS>(qkv, stride, tail, channels, from, channel);
      }
    }
  }
}
if (thread_index < M) {
  const int m = thread_index;
  const float a_value = static_cast<float>(a[m * static_cast<int>(a_strides[0]) + head]);
  const float b_value = static_cast<float>(b[m * static_cast<int>(b_strides[0]) + head]);
  const float left = decay_of(a_value, static_cast<float>(dt_bias[head]),
                              static_cast<float>(log_rate[head]));
  gates[m] = left;
  gates[M + m] = sigmoid_of(b_value);
#if RECORD
  decay[m * HV + head] = left;
  beta[m * HV + head] = sigmoid_of(b_value);
#endif
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int turn = 0; turn < TURNS; turn++) {
  const int turn_row = first_row + turn * HELD * step;
  if (turn > 0) {
    UNROLL for (int set = 0; set < HELD; set++) {
      const int row = metal::min(turn_row + set * step, DV - 1);
      S[set] = load_state<LANES, 4 * QUADS>(state + (head * DV + row) * DK, within);
    }
  }
  for (int m = 0; m < M; m++) {
    Floats<4 * QUADS> key;
    Floats<4 * QUADS> query;
    UNROLL for (int c = 0; c < QUADS; c++) {
      const int at = m * DK + 4 * (within + c * LANES);
      const Pack<float, 4> key_part = load_shared(keys + at);
      const Pack<float, 4> query_part = load_shared(queries + at);
      UNROLL for (int x = 0; x < 4; x++) {
        key.v[4 * c + x] = key_part.v[x];
        query.v[4 * c + x] = query_part.v[x];
      }
    }
    UNROLL for (int set = 0; set < HELD; set++) {
      const int row = turn_row + set * step;
      S[set] = faded(S[set], gates[m]);
      const float value = values[m * DV + metal::min(row, DV - 1)];
      const float delta = (value - dot_of<LANES>(S[set], key)) * gates[M + m];
      S[set] = written(S[set], delta, key);
      const float out = dot_of<LANES>(S[set], query);
      if (within == 0 && row < DV) {
        read[m * DV + row] = out;
      }
    }
  }
  UNROLL for (int set = 0; set < HELD; set++) {
    const int row = turn_row + set * step;
    if (row < DV) {
      UNROLL for (int c = 0; c < QUADS; c++) {
        const int at = (head * DV + row) * DK + 4 * (within + c * LANES);
        store_pack<4>(new_state + at, state_part(S[set], c));
      }
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int m = simdgroup; m < M; m += SIMDGROUPS) {
  Floats<(DV + 31) / 32> x;
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    x.v[i] = read[m * DV + metal::min(lane + 32 * i, DV - 1)];
  }
  const float squares = square_sum<DV>(x, lane);
  const float scale =
      inverse_root(metal::fma(squares, 1.0f / static_cast<float>(DV), numbers[0]));
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    const int d = lane + 32 * i;
    if (d < DV) {
      const float gate = static_cast<float>(z[m * static_cast<int>(z_strides[0]) + head * DV + d]);
      const float normed = x.v[i] * scale * static_cast<float>(norm_weight[d]);
      y[(m * HV + head) * DV + d] = static_cast<T>(normed * ((SILU ? gate : 1.0f) * sigmoid_of(gate)));
    }
  }
}
