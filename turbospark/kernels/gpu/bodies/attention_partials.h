// Attention of M query rows over one chunk of CHUNK keys, for QUERIES queries that share a
// key/value head: softmax weights against the chunk's own maximum, and the weighted values.
// A query is a pair of row and head; those of one key/value head are numbered row by row.
// Chunks are cut at multiples of CHUNK positions, so a row's partials do not depend on M.
//
// lengths: oldest key that any row sees, first position of the tail, positions written, rows of a
// sealed and of a tail head, chunks. Threadgroup (THREADS, 1, 1); grid y: key/value head and tile
// of queries; grid z: chunk.
SHARED float query[QUERIES * D];  // later the sums over keys
SHARED float score[QUERIES * CHUNK];
const float masked = -3.0e38f;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int kv_head = static_cast<int>(threadgroup_position_in_grid.y) / TILES;
const int first_query = static_cast<int>(threadgroup_position_in_grid.y) % TILES * QUERIES;
const int split = static_cast<int>(threadgroup_position_in_grid.z);
const int boundary = lengths[1];
const int end = lengths[2];
const int sealed_capacity = lengths[3];
const int chunk = (lengths[0] / CHUNK + split) * CHUNK;
const int low = metal::max(lengths[0], chunk);
const int high = metal::min(end, chunk + CHUNK);
// Sealed row of a position p >= low is low_slot + p - low, less the capacity where a ring wraps.
const int low_slot = low % sealed_capacity;
const int sealed_head = kv_head * sealed_capacity;
const int tail_head = kv_head * lengths[4] - boundary;

for (int n = thread_index; n < QUERIES * D; n += THREADS) {
  const int i = first_query + n / D;
  const int head = kv_head * SHARE + i % SHARE;
  query[n] = i < M * SHARE
                 ? static_cast<float>(q[((i / SHARE) * HEADS + head) * D + n % D]) * scale[0]
                 : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Scores: eight lanes a key.
for (int j = thread_index / 8; j < CHUNK; j += THREADS / 8) {
  const int p = chunk + j;
  const bool is_held = p >= low && p < high;
  float dot[QUERIES];
  UNROLL for (int t = 0; t < QUERIES; t++) { dot[t] = 0.0f; }
  if (is_held) {
    const int slot = low_slot + p - low;
    const int sealed_row = sealed_head + (slot < sealed_capacity ? slot : slot - sealed_capacity);
    const GLOBAL KV* row = p < boundary ? sealed_k + sealed_row * D : tail_k + (tail_head + p) * D;
    for (int d = 4 * (lane & 7); d < D; d += 32) {
      const Pack<KV, 4> key = load_pack<4>(row + d);
      UNROLL for (int t = 0; t < QUERIES; t++) {
        UNROLL for (int i = 0; i < 4; i++) {
          dot[t] = metal::fma(static_cast<float>(key.v[i]), query[t * D + d + i], dot[t]);
        }
      }
    }
  }
  UNROLL for (int t = 0; t < QUERIES; t++) {
    dot[t] += simd_shuffle_xor(dot[t], 1);
    dot[t] += simd_shuffle_xor(dot[t], 2);
    dot[t] += simd_shuffle_xor(dot[t], 4);
    const int position = end - M + (first_query + t) / SHARE;
    const bool is_seen = is_held && p <= position && (WINDOW == 0 || p > position - WINDOW);
    if ((lane & 7) == 0) {
      score[t * CHUNK + j] = is_seen ? dot[t] : masked;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Softmax weights: a SIMD-group a query.
for (int t = static_cast<int>(simdgroup_index_in_threadgroup); t < QUERIES; t += THREADS / 32) {
  float top = masked;
  for (int j = lane; j < CHUNK; j += 32) {
    top = metal::max(top, score[t * CHUNK + j]);
  }
  top = simd_max(top);
  float total = 0.0f;
  for (int j = lane; j < CHUNK; j += 32) {
    const float value = score[t * CHUNK + j];
    const float weight = value == masked ? 0.0f : metal::fast::exp(value - top);
    score[t * CHUNK + j] = weight;
    total += weight;
  }
  total = simd_sum(total);
  const int i = first_query + t;
  if (lane == 0 && i < M * SHARE) {
    const int n = (split * M + i / SHARE) * HEADS + kv_head * SHARE + i % SHARE;
    tops[n] = top;
    totals[n] = total;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Weighted values: a thread owns four columns; KEY_GROUPS groups of threads take turns at keys.
const int key_group = thread_index / (D / 4);
const int column = thread_index % (D / 4) * 4;
float sum[QUERIES][4];
UNROLL for (int t = 0; t < QUERIES; t++) {
  UNROLL for (int i = 0; i < 4; i++) { sum[t][i] = 0.0f; }
}
if (key_group < KEY_GROUPS) {
  for (int j = key_group; j < CHUNK; j += KEY_GROUPS) {
    const int p = chunk + j;
    if (p >= low && p < high) {
      const int slot = low_slot + p - low;
      const int sealed_row = sealed_head + (slot < sealed_capacity ? slot : slot - sealed_capacity);
      const GLOBAL KV* row =
          p < boundary ? sealed_v + sealed_row * D : tail_v + (tail_head + p) * D;
      const Pack<KV, 4> value = load_pack<4>(row + column);
      UNROLL for (int t = 0; t < QUERIES; t++) {
        const float weight = score[t * CHUNK + j];
        UNROLL for (int i = 0; i < 4; i++) {
          sum[t][i] = metal::fma(weight, static_cast<float>(value.v[i]), sum[t][i]);
        }
      }
    }
  }
}
for (int group = 0; group < KEY_GROUPS; group++) {
  if (key_group == group) {
    UNROLL for (int t = 0; t < QUERIES; t++) {
      UNROLL for (int i = 0; i < 4; i++) {
        const int n = t * D + column + i;
        query[n] = group == 0 ? sum[t][i] : query[n] + sum[t][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (int n = thread_index; n < QUERIES * D; n += THREADS) {
  const int i = first_query + n / D;
  if (i < M * SHARE) {
    const int head = kv_head * SHARE + i % SHARE;
    partials[((split * M + i / SHARE) * HEADS + head) * D + n % D] = query[n];
  }
}
