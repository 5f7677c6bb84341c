// Latent attention of M query rows over one chunk of positions: softmax weights against the chunk's
// own maximum, and the weighted latents. A query is a pair of row and head, numbered row by row, and
// every head reads the same rows.
//
// A SIMD-group takes QUERIES queries and a block of 32 / QUERIES positions at a time, each row
// spread over all lanes, four turns a block. Then lane i has the score of the block's position
// (i & 3) * BATCH + (i >> 2) / QUERIES for its query (i >> 2) % QUERIES. Chunks and blocks are cut
// at absolute positions, so that a row's partials do not depend on its neighbours; a chunk is whole
// blocks.
//
// lengths: first position of the tail, position of the first query. Threadgroup
// (32 * SIMDGROUPS, 1, 1); grid y: tile of queries; grid z: chunk, the newest first, as they may be
// the longest. A query's row of y holds L sums, the maximum and the sum of the weights, and two
// numbers that are left unwritten, as are chunks that no query sees.
const float masked = -3.0e38f;
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int tile = static_cast<int>(threadgroup_position_in_grid.y) * SIMDGROUPS +
                 static_cast<int>(simdgroup_index_in_threadgroup);
const int first_query = tile * QUERIES;
const int chunk = static_cast<int>(threadgroups_per_grid.z - 1 - threadgroup_position_in_grid.z);
const int boundary = lengths[0];
const int start = lengths[1];
const int low = chunk_start(chunk, CHUNK, FIRST, DOUBLINGS);
const int high = metal::min(start + M, chunk_start(chunk + 1, CHUNK, FIRST, DOUBLINGS));

if (low < high && first_query < M * HEADS) {
  float query[QUERIES][QUADS * 4];
  float turned[QUERIES][PAIRS * 2];
  float sum[QUERIES][QUADS * 4];
  UNROLL for (int t = 0; t < QUERIES; t++) {
    const int from = metal::min(first_query + t, M * HEADS - 1) * (L + R);
    UNROLL for (int c = 0; c < QUADS; c++) {
      UNROLL for (int x = 0; x < 4; x++) {
        const int d = 4 * (lane + 32 * c) + x;
        query[t][4 * c + x] = d < L ? q[from + metal::min(d, L - 1)] : 0.0f;
        sum[t][4 * c + x] = 0.0f;
      }
    }
    UNROLL for (int c = 0; c < PAIRS; c++) {
      UNROLL for (int x = 0; x < 2; x++) {
        const int d = 2 * (lane + 32 * c) + x;
        turned[t][2 * c + x] = d < R ? q[from + L + metal::min(d, R - 1)] : 0.0f;
      }
    }
  }
  const int among = lane >> 2;
  const int own_query = metal::min(first_query + among % QUERIES, M * HEADS - 1);
  const int own_place = (lane & 3) * BATCH + among / QUERIES;
  const int position = start + own_query / HEADS;
  float top = masked;
  float total = 0.0f;

  for (int block = low; block < high; block += 4 * BATCH) {
    float score = masked;
    for (int turn = 0; turn < 4; turn++) {
      float dots[8];
      UNROLL for (int b = 0; b < BATCH; b++) {
        const int p = metal::min(block + turn * BATCH + b, high - 1);
        const GLOBAL KV* latents = p < boundary ? sealed_v + p * L : tail_v + (p - boundary) * L;
        const GLOBAL KV* keys = p < boundary ? sealed_k + p * R : tail_k + (p - boundary) * R;
        Pack<KV, 4> latent[QUADS];
        Pack<KV, 2> key[PAIRS];
        UNROLL for (int c = 0; c < QUADS; c++) {
          latent[c] = load_pack<4>(latents + metal::min(4 * (lane + 32 * c), L - 4));
        }
        UNROLL for (int c = 0; c < PAIRS; c++) {
          key[c] = load_pack<2>(keys + metal::min(2 * (lane + 32 * c), R - 2));
        }
        UNROLL for (int t = 0; t < QUERIES; t++) {
          float dot = 0.0f;
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              dot = metal::fma(static_cast<float>(latent[c].v[x]), query[t][4 * c + x], dot);
            }
          }
          UNROLL for (int c = 0; c < PAIRS; c++) {
            UNROLL for (int x = 0; x < 2; x++) {
              dot = metal::fma(static_cast<float>(key[c].v[x]), turned[t][2 * c + x], dot);
            }
          }
          dots[b * QUERIES + t] = dot;
        }
      }
      // Eight sums over 32 lanes: in each step a lane keeps half of them, its partner the others.
      UNROLL for (int half = 4; half >= 1; half /= 2) {
        const bool is_upper = (lane & (4 * half)) != 0;
        UNROLL for (int i = 0; i < half; i++) {
          const float sent = is_upper ? dots[i] : dots[i + half];
          const float kept = is_upper ? dots[i + half] : dots[i];
          dots[i] = kept + simd_shuffle_xor(sent, 4 * half);
        }
      }
      float dot = dots[0];
      dot += simd_shuffle_xor(dot, 2);
      dot += simd_shuffle_xor(dot, 1);
      score = (lane & 3) == turn ? dot : score;
    }

    const int p = block + own_place;
    const bool is_seen = p <= position;
    const float value = is_seen ? score : masked;
    float new_top = metal::max(top, value);
    for (int mask = 1; mask < 32; mask *= 2) {
      const float other = simd_shuffle_xor(new_top, mask);
      new_top = mask >= 4 && mask < 4 * QUERIES ? new_top : metal::max(new_top, other);
    }
    const float fade = metal::fast::exp(top - new_top);
    const float weight = is_seen ? metal::fast::exp(value - new_top) : 0.0f;
    top = new_top;
    total = metal::fma(total, fade, weight);
    UNROLL for (int t = 0; t < QUERIES; t++) {
      const float own_fade = simd_broadcast(fade, static_cast<ushort>(4 * t));
      UNROLL for (int c = 0; c < QUADS * 4; c++) { sum[t][c] *= own_fade; }
    }

    for (int turn = 0; turn < 4; turn++) {
      UNROLL for (int b = 0; b < BATCH; b++) {
        const int at = metal::min(block + turn * BATCH + b, high - 1);
        const GLOBAL KV* latents =
            at < boundary ? sealed_v + at * L : tail_v + (at - boundary) * L;
        Pack<KV, 4> latent[QUADS];
        UNROLL for (int c = 0; c < QUADS; c++) {
          latent[c] = load_pack<4>(latents + metal::min(4 * (lane + 32 * c), L - 4));
        }
        UNROLL for (int t = 0; t < QUERIES; t++) {
          const int from = turn + 4 * (b * QUERIES + t);
          const float share = simd_broadcast(weight, static_cast<ushort>(from));
          UNROLL for (int c = 0; c < QUADS; c++) {
            UNROLL for (int x = 0; x < 4; x++) {
              sum[t][4 * c + x] =
                  metal::fma(share, static_cast<float>(latent[c].v[x]), sum[t][4 * c + x]);
            }
          }
        }
      }
    }
  }

  for (int mask = 1; mask < 32; mask *= 2) {
    const float other = simd_shuffle_xor(total, mask);
    total = mask >= 4 && mask < 4 * QUERIES ? total : total + other;
  }
  UNROLL for (int t = 0; t < QUERIES; t++) {
    const float own_top = simd_broadcast(top, static_cast<ushort>(4 * t));
    const float own_total = simd_broadcast(total, static_cast<ushort>(4 * t));
    if (first_query + t < M * HEADS) {
      const int to = (chunk * M * HEADS + first_query + t) * (L + 4);
      UNROLL for (int c = 0; c < QUADS; c++) {
        const int d = 4 * (lane + 32 * c);
        if (d < L) {
          Pack<float, 4> part;
          UNROLL for (int x = 0; x < 4; x++) { part.v[x] = sum[t][4 * c + x]; }
          store_pack<4>(y + to + d, part);
        }
      }
      if (lane == 0) {
        Pack<float, 2> both;
        both.v[0] = own_top;
        both.v[1] = own_total;
        store_pack<2>(y + to + L, both);
      }
    }
  }
}
