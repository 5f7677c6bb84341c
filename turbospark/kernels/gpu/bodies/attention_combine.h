// Joins the partials of a chunk each: y = sum(weight partial) / sum(weight total), where a chunk's
// weight is exp(its top - the largest top); times sigmoid(gate) if HAS_GATE,
// where the numbers of two heads lie GATE_STEP apart, and 1 is one number a head. Threadgroup
// (THREADS, 1, 1); grid y: query; grid z: LANES times four columns. Chunks are dealt to groups of
// threads by their absolute number, so a row does not depend on its neighbours.
SHARED float group_sum[THREADS * 4];
SHARED float group_total[THREADS / LANES];
SHARED float group_top[THREADS / 32];
const float masked = -3.0e38f;
const int key_groups = THREADS / LANES;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int query = static_cast<int>(threadgroup_position_in_grid.y);
const int column = static_cast<int>(threadgroup_position_in_grid.z) * 4 * LANES;
const int start = lengths[1];
const int begin = WINDOW == 0 ? 0 : metal::max(0, start + 1 - WINDOW);
const int first_chunk = chunk_of(begin, CHUNK, FIRST, DOUBLINGS);
const int splits = chunk_of(start + M - 1, CHUNK, FIRST, DOUBLINGS) - first_chunk + 1;

float top = HAS_SINKS ? static_cast<float>(sinks[query % HEADS]) : masked;
const float sink = top;
for (int split = thread_index; split < splits; split += THREADS) {
  top = metal::max(top, parts[(split * M * HEADS + query) * (D + 4) + D]);
}
top = simd_max(top);
if (thread_index_in_simdgroup == 0) {
  group_top[simdgroup_index_in_threadgroup] = top;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  top = metal::max(top, group_top[group]);
}

const int key_group = thread_index / LANES;
const int within = thread_index % LANES * 4;
float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
float total = 0.0f;
for (int split = (key_group - first_chunk) & (key_groups - 1); split < splits;
     split += key_groups) {
  const int n = (split * M * HEADS + query) * (D + 4);
  const Pack<float, 2> own = load_pack<2>(parts + n + D);  // maximum and sum
  const float weight = own.v[0] == masked ? 0.0f : metal::fast::exp(own.v[0] - top);
  const Pack<float, 4> partial = load_pack<4>(parts + n + column + within);
  total = metal::fma(weight, own.v[1], total);
  UNROLL for (int i = 0; i < 4; i++) { sum[i] = metal::fma(weight, partial.v[i], sum[i]); }
}
UNROLL for (int i = 0; i < 4; i++) { group_sum[4 * thread_index + i] = sum[i]; }
if (within == 0) {
  group_total[key_group] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index < 4 * LANES) {
  total = HAS_SINKS ? metal::fast::exp(sink - top) : 0.0f;
  float value = 0.0f;
  for (int group = 0; group < key_groups; group++) {
    total += group_total[group];
    value += group_sum[group * 4 * LANES + thread_index];
  }
  value = value * (1.0f / total);
  const int d = column + thread_index;
  if (HAS_GATE) {
    const int row = query / HEADS;
    const int place = (query - row * HEADS) * GATE_STEP + (GATE_STEP == 1 ? 0 : d);
    const int row_place = row * static_cast<int>(gate_strides[0]);
    value = gated(value, static_cast<float>(gate[row_place + place]));
  }
  y[query * D + d] = static_cast<T>(value);
}
