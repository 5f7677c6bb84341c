// A delta-net layer between its projections, for M rows: filter, silu and lengths of the heads,
// gates, the delta rule, gated norm. Threadgroup (32 * SIMDGROUPS, 1, 1), one a value head.
//
// A value row of the state is dealt to LANES lanes, QUADS times four values each; a SIMD-group has
// HELD times 32 / LANES of them in registers for all M rows, and takes TURNS turns. numbers: eps.
// What lies in memory cold is asked for early: first small arrays, all at once, then the state.
// M is at most SIMDGROUPS.
WIDE_SHARED float made[M * (2 * DK + DV)];
SHARED float read[M * DV];
SHARED float gates[2 * M];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int head = static_cast<int>(threadgroup_position_in_grid.x);
const int key_head = head / (HV / HK);
const bool is_first = head % (HV / HK) == 0;
const int within = lane % LANES;
const int first_row = simdgroup * (32 / LANES) + lane / LANES;
const int step = SIMDGROUPS * (32 / LANES);
const int channels = 2 * HK * DK + HV * DV;
const int stride = static_cast<int>(qkv_strides[0]);
const int items = 3 * M;
const int N = ((DK > DV ? DK : DV) + 31) / 32;

FilterInputs<TAPS, N, TYPE_qkv, TYPE_conv> given[EARLY];
UNROLL for (int turn = 0; turn < EARLY; turn++) {
  const int item = simdgroup + turn * SIMDGROUPS;
  const int part = item / M;
  if (item < items) {
    given[turn] = filter_inputs<TAPS, N>(qkv, stride, tail, conv, channels, item - part * M,
                                         first_channel<HK, DK, DV>(part, key_head, head),
                                         part < 2 ? DK : DV, lane);
  }
}
TYPE_a raw_a;
TYPE_b raw_b;
TYPE_dt_bias raw_bias;
TYPE_log_rate raw_rate;
const bool is_gating = simdgroup == SIMDGROUPS / 2;
if (is_gating) {
  const int m = metal::min(lane, M - 1);
  raw_a = a[m * static_cast<int>(a_strides[0]) + head];
  raw_b = b[m * static_cast<int>(b_strides[0]) + head];
  raw_bias = dt_bias[head];
  raw_rate = log_rate[head];
}
const int normed_row = SIMDGROUPS - 1 - simdgroup;
TYPE_z raw_z[(DV + 31) / 32];
TYPE_norm_weight raw_weight[(DV + 31) / 32];
float eps = 0.0f;
if (normed_row < M) {
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    const int d = metal::min(lane + 32 * i, DV - 1);
    raw_z[i] = z[normed_row * static_cast<int>(z_strides[0]) + head * DV + d];
    raw_weight[i] = norm_weight[d];
  }
  eps = numbers[0];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Registers of all that is asked for become ready together, as compilers have it: what a SIMD-group
// got first is taken before it asks for its part of the state, which others may already do.
if (lane < HELD && (simdgroup < items || is_gating || normed_row < M)) {
  const int row = simdgroup * (32 / LANES) + lane * step;
  if (row + 32 / LANES <= DV) {
    fetch_ahead<32 / LANES * DK>(state + (head * DV + row) * DK);
  }
}
Floats<N> total[EARLY];
UNROLL for (int turn = 0; turn < EARLY; turn++) {
  const int item = simdgroup + turn * SIMDGROUPS;
  if (item < items) { total[turn] = totals_of(given[turn], item - item / M * M); }
}
if (is_gating && lane < M) {
  const float left = decay_of(static_cast<float>(raw_a), static_cast<float>(raw_bias),
                              static_cast<float>(raw_rate));
  const float strength = sigmoid_of(static_cast<float>(raw_b));
  gates[lane] = left;
  gates[M + lane] = strength;
#if RECORD
  decay[lane * HV + head] = left;
  beta[lane * HV + head] = strength;
#endif
}
Floats<(DV + 31) / 32> opened;  // what the gates of the normed row let through
if (normed_row < M) {
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) { opened.v[i] = static_cast<float>(raw_z[i]); }
  const Floats<(DV + 31) / 32> shares = sigmoids_of(opened);
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    opened.v[i] = (SILU ? opened.v[i] : 1.0f) * shares.v[i];
  }
}

Floats<4 * QUADS> S[HELD];
UNROLL for (int set = 0; set < HELD; set++) {
  const int row = metal::min(first_row + set * step, DV - 1);
  S[set] = load_state<LANES, 4 * QUADS>(state + (head * DV + row) * DK, within);
}

const float query_scale = metal::precise::rsqrt(static_cast<float>(DK));
UNROLL for (int turn = 0; turn < (items + SIMDGROUPS - 1) / SIMDGROUPS; turn++) {
  const int item = simdgroup + turn * SIMDGROUPS;
  const int part = item / M;
  const int m = item - part * M;
  const int width = part < 2 ? DK : DV;
  const int held = turn < EARLY ? turn : 0;
  if (item < items) {
    if (turn >= EARLY) {
      given[held] = filter_inputs<TAPS, N>(qkv, stride, tail, conv, channels, m,
                                           first_channel<HK, DK, DV>(part, key_head, head), width,
                                           lane);
      total[held] = totals_of(given[held], m);
    }
    const Floats<N> x = silu_of(total[held]);
    float scale = 1.0f;
    if (part < 2) {
      scale = inverse_root(square_sum<DK>(x, lane) + 1e-6f);
      if (part == 0) { scale = scale * query_scale; }
    }
    UNROLL for (int i = 0; i < N; i++) {
      const int d = lane + 32 * i;
      if (d < width) {
        made[(part < 2 ? item * DK : 2 * M * DK + m * DV) + d] = x.v[i] * scale;
#if RECORD
        if (part == 1 && is_first) {
          k[(m * HK + key_head) * DK + d] = x.v[i] * scale;
        }
        if (part == 2) {
          v[(m * HV + head) * DV + d] = x.v[i];
        }
#endif
      }
    }
    if (m == M - 1 && (part == 2 || is_first)) {
      UNROLL for (int i = 0; i < N; i++) {
        const int d = lane + 32 * i;
        if (d < width) {
          const int channel = first_channel<HK, DK, DV>(part, key_head, head) + d;
          UNROLL for (int tap = 1; tap < TAPS; tap++) {
            new_tail[(tap - 1) * channels + channel] = raw_value(given[held], m, tap, i);
          }
        }
      }
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Few rows leave SIMD-groups idle in the last phase: they store the state meanwhile.
const bool is_late = 2 * M <= SIMDGROUPS;
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
      const Pack<float, 4> key_part = load_shared(made + M * DK + at);
      const Pack<float, 4> query_part = load_shared(made + at);
      UNROLL for (int x = 0; x < 4; x++) {
        key.v[4 * c + x] = key_part.v[x];
        query.v[4 * c + x] = query_part.v[x];
      }
    }
    const float left = gates[m];
    const float strength = gates[M + m];
    Floats<HELD> value;
    Floats<HELD> out;
    UNROLL for (int set = 0; set < HELD; set++) {
      const int row = metal::min(turn_row + set * step, DV - 1);
      value.v[set] = made[2 * M * DK + m * DV + row];
    }
    UNROLL for (int set = 0; set < HELD; set++) {
      S[set] = faded(S[set], left);
      out.v[set] = dot_part(S[set], key);
    }
    out = sums_of<LANES>(out);
    UNROLL for (int set = 0; set < HELD; set++) {
      const float delta = (value.v[set] - out.v[set]) * strength;
      S[set] = written(S[set], delta, key);
      out.v[set] = dot_part(S[set], query);
    }
    out = sums_of<LANES>(out);
    UNROLL for (int set = 0; set < HELD; set++) {
      const int row = turn_row + set * step;
      if (within == 0 && row < DV) {
        read[m * DV + row] = out.v[set];
      }
    }
  }
  if (turn < TURNS - 1 || !is_late) {
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
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (normed_row < M) {
  Floats<(DV + 31) / 32> x;
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    x.v[i] = read[normed_row * DV + metal::min(lane + 32 * i, DV - 1)];
  }
  const float squares = square_sum<DV>(x, lane);
  const float scale = inverse_root(metal::fma(squares, 1.0f / static_cast<float>(DV), eps));
  UNROLL for (int i = 0; i < (DV + 31) / 32; i++) {
    const int d = lane + 32 * i;
    if (d < DV) {
      const float normed = x.v[i] * scale * static_cast<float>(raw_weight[i]);
      y[(normed_row * HV + head) * DV + d] = static_cast<T>(normed * opened.v[i]);
    }
  }
}
if (is_late) {
  UNROLL for (int set = 0; set < HELD; set++) {
    const int row = first_row + ((TURNS - 1) * HELD + set) * step;
    if (row < DV) {
      UNROLL for (int c = 0; c < QUADS; c++) {
        const int at = (head * DV + row) * DK + 4 * (within + c * LANES);
        store_pack<4>(new_state + at, state_part(S[set], c));
      }
    }
  }
}
