// The delta rule for any number of rows, in the arithmetic of delta_net. A SIMD-group has HELD times
// 32 / LANES value rows of the state in registers from the first row to the last. Threadgroup
// (32 * SIMDGROUPS, 1, 1); grid y: value head. Keys, queries, values and gates of BLOCK rows are
// fetched while those of the rows before are used.
WIDE_SHARED float staged[2 * BLOCK * WIDTH * 4];
SHARED float staged_values[2 * BLOCK * ROWS];
SHARED float gates[2 * BLOCK * 2];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int head = static_cast<int>(threadgroup_position_in_grid.y);
const int key_head = head / (HV / HK);
const int within = lane % LANES;
const int base = static_cast<int>(threadgroup_position_in_grid.x) * ROWS;
const int own = simdgroup * (32 / LANES) + lane / LANES;
const int step = SIMDGROUPS * (32 / LANES);
const int rows = k_shape[0];
const int threads = 32 * SIMDGROUPS;

Floats<4 * QUADS> S[HELD];
UNROLL for (int set = 0; set < HELD; set++) {
  const int row = metal::min(base + own + set * step, DV - 1);
  S[set] = load_state<LANES, 4 * QUADS>(state + (head * DV + row) * DK, within);
}

Pack<float, 4> fetched[PACKS];
float fetched_value[VALUES];
float fetched_gate = 0.0f;
for (int start = -BLOCK; start < rows; start += BLOCK) {
  // Fetch the next rows; they are put where the rows before the present ones were.
  const int next = start + BLOCK;
  const int buffer = (next / BLOCK) & 1;
  UNROLL for (int i = 0; i < PACKS; i++) {
    const int n = thread_index + i * threads;
    const int t = metal::min(next + n / WIDTH, rows - 1);
    const int at = (t * HK + key_head) * DK;
    const int among = n % WIDTH;
#if FOLD
    fetched[i] = load_pack<4>(k + at + 4 * among);
#else
    fetched[i] = among < DK / 4 ? load_pack<4>(k + at + 4 * among)
                                : load_pack<4>(q + at + 4 * (among - DK / 4));
#endif
  }
  UNROLL for (int i = 0; i < VALUES; i++) {
    const int n = thread_index + i * threads;
    const int t = metal::min(next + n / ROWS, rows - 1);
    fetched_value[i] = values[(t * HV + head) * DV + metal::min(base + n % ROWS, DV - 1)];
  }
  if (thread_index < 2 * BLOCK) {
    const int t = metal::min(next + thread_index / 2, rows - 1);
    fetched_gate = thread_index % 2 == 0 ? decay[t * HV + head] : beta[t * HV + head];
  }
  const int present = 1 - buffer;
  const int count = start < 0 ? 0 : metal::min(BLOCK, rows - start);
  for (int t = 0; t < count; t++) {
    const int from = (present * BLOCK + t) * WIDTH + within;
    Floats<4 * QUADS> key;
    UNROLL for (int c = 0; c < QUADS; c++) {
      const Pack<float, 4> part = load_shared(staged + 4 * (from + c * LANES));
      UNROLL for (int x = 0; x < 4; x++) { key.v[4 * c + x] = part.v[x]; }
    }
#if !FOLD
    Floats<4 * QUADS> query;
    UNROLL for (int c = 0; c < QUADS; c++) {
      const Pack<float, 4> part = load_shared(staged + 4 * (from + DK / 4 + c * LANES));
      UNROLL for (int x = 0; x < 4; x++) { query.v[4 * c + x] = part.v[x]; }
    }
#endif
    const float left = gates[(present * BLOCK + t) * 2];
    const float strength = gates[(present * BLOCK + t) * 2 + 1];
    UNROLL for (int set = 0; set < HELD; set++) {
      S[set] = faded(S[set], left);
      const float value = staged_values[(present * BLOCK + t) * ROWS + own + set * step];
      const float delta = (value - dot_of<LANES>(S[set], key)) * strength;
      S[set] = written(S[set], delta, key);
#if !FOLD
      const float out = dot_of<LANES>(S[set], query);
      const int row = base + own + set * step;
      if (within == 0 && row < DV) {
        y[((start + t) * HV + head) * DV + row] = out;
      }
#endif
    }
  }
  UNROLL for (int i = 0; i < PACKS; i++) {
    const int n = thread_index + i * threads;
    if (n < BLOCK * WIDTH) { store_shared(staged + 4 * (buffer * BLOCK * WIDTH + n), fetched[i]); }
  }
  UNROLL for (int i = 0; i < VALUES; i++) {
    const int n = thread_index + i * threads;
    if (n < BLOCK * ROWS) { staged_values[buffer * BLOCK * ROWS + n] = fetched_value[i]; }
  }
  if (thread_index < 2 * BLOCK) { gates[buffer * BLOCK * 2 + thread_index] = fetched_gate; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

UNROLL for (int set = 0; set < HELD; set++) {
  const int row = base + own + set * step;
  if (row < DV) {
    UNROLL for (int c = 0; c < QUADS; c++) {
      const int at = (head * DV + row) * DK + 4 * (within + c * LANES);
      store_pack<4>(new_state + at, state_part(S[set], c));
    }
  }
}
