// Joins the partials of attention_partials: y = sum(weight partial) / sum(weight total), where a
// chunk's weight is exp(its top - the largest top). A threadgroup (THREADS, 1, 1) a query, grid y.
// Chunks are dealt to threads by their absolute number, so a row does not depend on its neighbours.
SHARED float joined[D];
SHARED float group_total[KEY_GROUPS];
SHARED float group_top[THREADS / 32];
const float masked = -3.0e38f;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int query = static_cast<int>(threadgroup_position_in_grid.y);
const int first_chunk = lengths[0] / CHUNK;
const int splits = lengths[5];

float top = HAS_SINKS ? static_cast<float>(sinks[query % HEADS]) : masked;
const float sink = top;
for (int split = thread_index; split < splits; split += THREADS) {
  top = metal::max(top, tops[split * M * HEADS + query]);
}
top = simd_max(top);
if (thread_index_in_simdgroup == 0) {
  group_top[simdgroup_index_in_threadgroup] = top;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  top = metal::max(top, group_top[group]);
}

const int key_group = thread_index / (D / 4);
const int column = thread_index % (D / 4) * 4;
const int turn = (key_group + KEY_GROUPS - first_chunk % KEY_GROUPS) % KEY_GROUPS;
float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
float total = 0.0f;
if (key_group < KEY_GROUPS) {
  for (int split = turn; split < splits; split += KEY_GROUPS) {
    const int n = split * M * HEADS + query;
    const float weight = tops[n] == masked ? 0.0f : metal::fast::exp(tops[n] - top);
    const Pack<float, 4> partial = load_pack<4>(partials + n * D + column);
    total = metal::fma(weight, totals[n], total);
    UNROLL for (int i = 0; i < 4; i++) { sum[i] = metal::fma(weight, partial.v[i], sum[i]); }
  }
  if (column == 0) {
    group_total[key_group] = total;
  }
}
for (int group = 0; group < KEY_GROUPS; group++) {
  if (key_group == group) {
    UNROLL for (int i = 0; i < 4; i++) {
      joined[column + i] = group == 0 ? sum[i] : joined[column + i] + sum[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
total = HAS_SINKS ? metal::fast::exp(sink - top) : 0.0f;
UNROLL for (int group = 0; group < KEY_GROUPS; group++) { total += group_total[group]; }
const float inverse = 1.0f / total;
for (int d = thread_index; d < D; d += THREADS) {
  y[query * D + d] = static_cast<T>(joined[d] * inverse);
}
