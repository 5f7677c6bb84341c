// Attention of M query rows over one chunk of keys, for QUERIES queries that share a key/value
// head: softmax weights against the chunk's own maximum, and the weighted values. A query is a pair
// of row and head; those of one key/value head are numbered row by row.
//
// A SIMD-group takes every SIMDGROUPS-th block of 32 keys: LANES lanes a key, QUADS times four
// values each, the softmax once a block. Chunks and blocks are cut at absolute positions, so that a
// row's partials do not depend on its neighbours.
//
// lengths: first position of the tail, position of the first query. Threadgroup
// (32 * SIMDGROUPS, 1, 1); grid y: key/value head and tile of queries; grid z: chunk, the newest
// first, as they may be the longest. A query's row of y holds its D values, the maximum and the sum
// of the weights, and two numbers that are left unwritten, as are chunks that no query sees; or, if
// IS_WHOLE, the one chunk holds all keys, and the row is the result that attention_combine gives.
//
// With ROTATES the queries come as head_norm_rope takes them, and each threadgroup norms and
// rotates its own, with the same bits. With WRITES so do keys and values, which those threadgroups
// whose chunk they lie in read from threadgroup memory; the first tile of queries writes them into
// the new tail, and the last COPIES of grid z copy COPY_ROWS of its old rows each, a tile. numbers:
// as head_norm_rope's, then the factor of the scores. With GATED the gate is as
// attention_combine's.
SHARED float block_weight[SIMDGROUPS * 32 * QUERIES];
SHARED float joined[QUERIES * D];
SHARED float group_top[SIMDGROUPS * QUERIES];
SHARED float group_total[SIMDGROUPS * QUERIES];
SHARED float query_weight[QUERIES];
SHARED float query_share[QUERIES];
#ifdef WRITES
SHARED KV own_rows[2 * M * D];  // keys, then values
#endif
const float masked = -3.0e38f;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int within = lane % LANES;
const int beside = lane / LANES * LANES;  // the block's key of this lane's first turn
const int kv_head = static_cast<int>(threadgroup_position_in_grid.y) / TILES;
const int first_query = static_cast<int>(threadgroup_position_in_grid.y) % TILES * QUERIES;
const int depth = static_cast<int>(threadgroup_position_in_grid.z);
const int splits = static_cast<int>(threadgroups_per_grid.z) - COPIES;
const int split = metal::max(splits - 1 - depth, 0);
const int boundary = lengths[0];
const int start = lengths[1];
const int begin = WINDOW == 0 ? 0 : metal::max(0, start + 1 - WINDOW);
const int chunk_index = chunk_of(begin, CHUNK, FIRST, DOUBLINGS) + split;
const int chunk = chunk_start(chunk_index, CHUNK, FIRST, DOUBLINGS);
const int low = metal::max(begin, chunk);
const int high = metal::min(start + M, chunk_start(chunk_index + 1, CHUNK, FIRST, DOUBLINGS));

#ifdef WRITES
const int tail_from = kv_head * TAIL;
if (depth >= splits) {
  const int width = 16 / static_cast<int>(sizeof(KV));
  const int tile = static_cast<int>(threadgroup_position_in_grid.y) % TILES;
  const int first = ((depth - splits) * TILES + tile) * COPY_ROWS;
  const int from = (tail_from + first) * D;
  const int count = metal::min(COPY_ROWS, start - boundary - first) * D;
  for (int n = width * thread_index; n < count; n += width * 32 * SIMDGROUPS) {
    const Pack<KV, width> old_key = load_pack<width>(tail_k + from + n);
    const Pack<KV, width> old_value = load_pack<width>(tail_v + from + n);
    store_pack<width>(new_k + from + n, old_key);
    store_pack<width>(new_v + from + n, old_value);
  }
} else
#endif
if (low < high) {
  // Sealed row of a position p >= low is low_slot + p - low, less the capacity where a ring wraps.
  const int sealed_capacity = sealed_k_shape[1];
  const int low_slot = low % sealed_capacity - low;
  const int sealed_head = kv_head * sealed_capacity;
  const int tail_head = kv_head * TAIL - boundary;

#ifdef ROTATES
  const int group = simdgroup;
  const int groups = SIMDGROUPS;
  const int queries = QUERIES;
  const int at_once = QUERIES + OWN > SIMDGROUPS ? 2 : 1;
#define PUT_QUERY(item, d, number) joined[item * D + d] = static_cast<float>(number)
#include "rotated_heads.h"
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float score_factor = numbers[4];
#else
  const float score_factor = scale[0];
#endif

  float query[QUERIES][QUADS * 4];
  float sum[QUERIES][QUADS * 4];
  float top[QUERIES];
  float total[QUERIES];
  UNROLL for (int t = 0; t < QUERIES; t++) {
    UNROLL for (int c = 0; c < QUADS; c++) {
      const int d = 4 * (within + c * LANES);
#ifdef ROTATES
      UNROLL for (int x = 0; x < 4; x++) { query[t][4 * c + x] = joined[t * D + d + x]; }
#else
      const int i = first_query + t < M * SHARE ? first_query + t : 0;
      const int head = kv_head * SHARE + i % SHARE;
      const Floats<4> value = load_floats<4>(q + ((i / SHARE) * HEADS + head) * D + d);
      UNROLL for (int x = 0; x < 4; x++) { query[t][4 * c + x] = value.v[x]; }
#endif
      UNROLL for (int x = 0; x < 4; x++) {
        query[t][4 * c + x] *= score_factor;
        sum[t][4 * c + x] = 0.0f;
      }
    }
    top[t] = masked;
    total[t] = 0.0f;
  }

  for (int block = chunk + 32 * simdgroup; block < high; block += 32 * SIMDGROUPS) {
    if (block + 32 <= low) {
      continue;
    }
    float score[QUERIES];
    UNROLL for (int t = 0; t < QUERIES; t++) { score[t] = masked; }
    for (int turn = 0; turn < LANES; turn += BATCH) {
      Pack<KV, 4> key[BATCH][QUADS];
      UNROLL for (int b = 0; b < BATCH; b++) {
        const int p = metal::min(metal::max(block + beside + turn + b, low), high - 1);
        const int slot = low_slot + p;
        const int sealed_row =
            sealed_head + (slot < sealed_capacity ? slot : slot - sealed_capacity);
        const GLOBAL KV* row =
            p < boundary ? sealed_k + sealed_row * D : tail_k + (tail_head + p) * D;
        UNROLL for (int c = 0; c < QUADS; c++) {
          key[b][c] = load_pack<4>(row + 4 * (within + c * LANES));
        }
      }
#ifdef WRITES
      if (block + 32 > start) {
        UNROLL for (int b = 0; b < BATCH; b++) {
          const int p = metal::min(metal::max(block + beside + turn + b, low), high - 1);
          const int own = p - start;
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              if (own >= 0) {
                key[b][c].v[x] = own_rows[(own) * D + 4 * (within + c * LANES) + x];
              }
            }
          }
        }
      }
#endif
      UNROLL for (int b = 0; b < BATCH; b++) {
        UNROLL for (int t = 0; t < QUERIES; t++) {
          float dot = 0.0f;
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              dot = metal::fma(static_cast<float>(key[b][c].v[x]), query[t][4 * c + x], dot);
            }
          }
          for (int mask = 1; mask < LANES; mask *= 2) { dot += simd_shuffle_xor(dot, mask); }
          score[t] = within == turn + b ? dot : score[t];
        }
      }
    }

    // The score of the block's key `lane` is in this lane.
    const int p = block + lane;
    UNROLL for (int t = 0; t < QUERIES; t++) {
      const int position = start + (first_query + t) / SHARE;
      const bool is_seen = p <= position && (WINDOW == 0 || p > position - WINDOW);
      const float value = is_seen ? score[t] : masked;
      const float new_top = metal::max(top[t], simd_max(value));
      const float fade = metal::fast::exp(top[t] - new_top);
      const float weight = is_seen ? metal::fast::exp(value - new_top) : 0.0f;
      top[t] = new_top;
      total[t] = metal::fma(total[t], fade, weight);
      block_weight[(simdgroup * 32 + lane) * QUERIES + t] = weight;
      UNROLL for (int c = 0; c < QUADS * 4; c++) { sum[t][c] *= fade; }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    for (int turn = 0; turn < LANES; turn += BATCH) {
      Pack<KV, 4> value[BATCH][QUADS];
      UNROLL for (int b = 0; b < BATCH; b++) {
        const int p = metal::min(metal::max(block + beside + turn + b, low), high - 1);
        const int slot = low_slot + p;
        const int sealed_row =
            sealed_head + (slot < sealed_capacity ? slot : slot - sealed_capacity);
        const GLOBAL KV* row =
            p < boundary ? sealed_v + sealed_row * D : tail_v + (tail_head + p) * D;
        UNROLL for (int c = 0; c < QUADS; c++) {
          value[b][c] = load_pack<4>(row + 4 * (within + c * LANES));
        }
      }
#ifdef WRITES
      if (block + 32 > start) {
        UNROLL for (int b = 0; b < BATCH; b++) {
          const int p = metal::min(metal::max(block + beside + turn + b, low), high - 1);
          const int own = p - start;
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              if (own >= 0) {
                value[b][c].v[x] = own_rows[(M + own) * D + 4 * (within + c * LANES) + x];
              }
            }
          }
        }
      }
#endif
      UNROLL for (int b = 0; b < BATCH; b++) {
        UNROLL for (int t = 0; t < QUERIES; t++) {
          const float weight =
              block_weight[(simdgroup * 32 + beside + turn + b) * QUERIES + t];
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              sum[t][4 * c + x] =
                  metal::fma(weight, static_cast<float>(value[b][c].v[x]), sum[t][4 * c + x]);
            }
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Join the lanes that took other keys, then the SIMD-groups, one after another.
  UNROLL for (int t = 0; t < QUERIES; t++) {
    UNROLL for (int c = 0; c < QUADS * 4; c++) {
      for (int mask = LANES; mask < 32; mask *= 2) {
        sum[t][c] += simd_shuffle_xor(sum[t][c], mask);
      }
    }
    total[t] = simd_sum(total[t]);
    if (lane == 0) {
      group_top[simdgroup * QUERIES + t] = top[t];
      group_total[simdgroup * QUERIES + t] = total[t];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float chunk_total[QUERIES];
  UNROLL for (int t = 0; t < QUERIES; t++) {
    const float own = top[t];
    UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
      top[t] = metal::max(top[t], group_top[s * QUERIES + t]);
    }
    chunk_total[t] = 0.0f;
    UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
      const float fade = metal::fast::exp(group_top[s * QUERIES + t] - top[t]);
      chunk_total[t] = metal::fma(group_total[s * QUERIES + t], fade, chunk_total[t]);
    }
    if (IS_WHOLE && thread_index == 0) {
      const int head = kv_head * SHARE + (first_query + t) % SHARE;
      const float sink = HAS_SINKS ? static_cast<float>(sinks[head]) : masked;
      const Floats<2> share = lone_chunk(top[t], chunk_total[t], HAS_SINKS, sink);
      query_weight[t] = share.v[0];
      query_share[t] = share.v[1];
    }
    const float fade = metal::fast::exp(own - top[t]);
    UNROLL for (int c = 0; c < QUADS * 4; c++) { sum[t][c] *= fade; }
  }
  for (int turn = 0; turn < SIMDGROUPS; turn++) {
    if (simdgroup == turn && beside == 0) {
      UNROLL for (int t = 0; t < QUERIES; t++) {
        UNROLL for (int c = 0; c < QUADS; c++) {
          UNROLL for (int x = 0; x < 4; x++) {
            const int n = t * D + 4 * (within + c * LANES) + x;
            joined[n] = turn == 0 ? sum[t][4 * c + x] : joined[n] + sum[t][4 * c + x];
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int n = thread_index; n < QUERIES * D; n += 32 * SIMDGROUPS) {
    const int i = first_query + n / D;
    if (i < M * SHARE) {
      const int place = (split * M + i / SHARE) * HEADS + kv_head * SHARE + i % SHARE;
      if (IS_WHOLE) {
        float value = metal::fma(query_weight[n / D], joined[n], 0.0f) * query_share[n / D];
#ifdef GATED
        const int row = i / SHARE * static_cast<int>(gate_strides[0]);
        const int head = kv_head * SHARE + i % SHARE;
        const int at = row + head * GATE_STEP + (GATE_STEP == 1 ? 0 : n % D);
        value = gated(value, static_cast<float>(gate[at]));
#endif
        y[place * D + n % D] = static_cast<Y>(value);
      } else {
        y[place * (D + 4) + n % D] = static_cast<Y>(joined[n]);
      }
    }
  }
  UNROLL for (int t = 0; t < QUERIES; t++) {
    const int i = first_query + t;
    if (!IS_WHOLE && thread_index == 0 && i < M * SHARE) {
      const int place = (split * M + i / SHARE) * HEADS + kv_head * SHARE + i % SHARE;
      y[place * (D + 4) + D] = static_cast<Y>(top[t]);
      y[place * (D + 4) + D + 1] = static_cast<Y>(chunk_total[t]);
    }
  }
}
