// attention_partials on tensor cores, for keys and values of the queries' own 16-bit type. The
// queries of a key/value head, QUERY_TILES times 16 of them, are the rows of each product.
//
// A step takes KEYS keys. For the scores a warp has KEY_TILES times 8 of them; for the weighted
// values it has DIMS columns and the keys of its group. Columns and keys are numbered so that a
// lane's share of an operand is contiguous in memory: nothing is staged. Weights are split in two
// 16-bit parts, so that they keep float32's precision. ROTATES and WRITES as there.
//
// With IS_AHEAD, registers that a step is done with take the next one's numbers at once: keys behind
// the scores, values behind their products, so that memory waits for neither products nor barriers.
constexpr int KEYS = WARPS * 8 * KEY_TILES;
constexpr int DIM_GROUPS = D / DIMS;
constexpr int KEY_GROUPS = WARPS / DIM_GROUPS;
constexpr int VALUE_TILES = KEYS / KEY_GROUPS / 16;
constexpr int WIDTH = DIMS / 8;  // contiguous columns of a lane
constexpr int ROWS = 16 * QUERY_TILES;
constexpr int QUERY_PARTS = ROWS * D / 8;  // of four words
constexpr int WEIGHT_PARTS = ROWS * KEYS / 4;
constexpr int JOINED_PARTS = KEY_GROUPS > 1 ? ROWS * D / 4 : 1;
static_assert(VALUE_TILES * KEY_GROUPS * 16 == KEYS, "a warp has whole tiles");
constexpr int STEP_PARTS = QUERY_PARTS + WEIGHT_PARTS;
constexpr int ALL_PARTS = STEP_PARTS > JOINED_PARTS ? STEP_PARTS : JOINED_PARTS;
SHARED uint4 memory[ALL_PARTS];
SHARED float warp_value[WARPS * ROWS];
SHARED float row_weight[ROWS];
SHARED float row_share[ROWS];
#ifdef WRITES
SHARED uint4 own_memory[2 * M * D / 8];  // keys of the step's own rows, then values
SHARED_PTR T* const own_rows = reinterpret_cast<SHARED_PTR T*>(own_memory);
#endif
SHARED_PTR Pack<uint, 4>* const query_parts = reinterpret_cast<SHARED_PTR Pack<uint, 4>*>(memory);
SHARED_PTR Pack<uint, 4>* const weight_parts = query_parts + QUERY_PARTS;
SHARED_PTR Pack<uint, 2>* const weight_halves =
    reinterpret_cast<SHARED_PTR Pack<uint, 2>*>(weight_parts);
SHARED_PTR float* const joined = reinterpret_cast<SHARED_PTR float*>(query_parts);
const float masked = -3.0e38f;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int lane_row = lane / 4;
const int lane_pair = lane % 4;
#ifdef ROTATES
// What norms and rotation read is small and far away: it is asked for before keys and values are.
if (32 * thread_index < PAIRS) { fetch_line(frequencies + 32 * thread_index); }
if (Q_NORM == 2 && 32 * thread_index < D) { fetch_line(q_weight + 32 * thread_index); }
#ifdef WRITES
if (K_NORM == 2 && 32 * thread_index < D) { fetch_line(k_weight + 32 * thread_index); }
#endif
#endif
const int kv_head = static_cast<int>(threadgroup_position_in_grid.y) / TILES;
const int first_query = static_cast<int>(threadgroup_position_in_grid.y) % TILES * ROWS;
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
  const int width = 16 / static_cast<int>(sizeof(T));
  const int tile = static_cast<int>(threadgroup_position_in_grid.y) % TILES;
  const int first = ((depth - splits) * TILES + tile) * COPY_ROWS;
  const int from = (tail_from + first) * D;
  const int count = metal::min(COPY_ROWS, start - boundary - first) * D;
  for (int n = width * thread_index; n < count; n += width * 32 * WARPS) {
    const Pack<T, width> old_key = load_pack<width>(tail_k + from + n);
    const Pack<T, width> old_value = load_pack<width>(tail_v + from + n);
    store_pack<width>(new_k + from + n, old_key);
    store_pack<width>(new_v + from + n, old_value);
  }
} else
#endif
if (low < high) {
  const int sealed_capacity = sealed_k_shape[1];
  const int low_slot = low % sealed_capacity - low;
  const int sealed_head = kv_head * sealed_capacity;
  const int tail_head = kv_head * TAIL - boundary;
  const int dim_group = warp % DIM_GROUPS;
  const int key_group = warp / DIM_GROUPS;
  const int first_column = dim_group * DIMS + lane_row * WIDTH;
  const int first_step = chunk + (low - chunk) / KEYS * KEYS;

  // Keys and values that no query sees are read from a row that one does.
  auto seen = [&](int place) { return metal::min(metal::max(place, low), high - 1); };
  auto row_of = [&](const GLOBAL T* sealed, const GLOBAL T* tail, int p) {
    const int slot = low_slot + p;
    const int sealed_row = sealed_head + (slot < sealed_capacity ? slot : slot - sealed_capacity);
    return p < boundary ? sealed + sealed_row * D : tail + (tail_head + p) * D;
  };
  // Whether a step's rows follow each other in memory.
  auto is_run = [&](int step) {
    const int slot = low_slot + step;
    const bool is_unbroken = slot >= sealed_capacity || slot + KEYS <= sealed_capacity;
    const bool is_sealed = step + KEYS <= boundary && is_unbroken;
    return step >= low && step + KEYS <= high && (step >= boundary || is_sealed);
  };
  // Where key j and value x of tile s of a lane stand in a step.
  auto key_place = [&](int j) { return (warp * KEY_TILES + j) * 8 + lane_row; };
  auto value_place = [&](int s, int x) {
    return (key_group * VALUE_TILES + s) * 16 + 2 * lane_pair + x % 2 + x / 2 * 8;
  };

  // A part of the queries: 8 columns of one of the 16 rows of a tile.
  for (int part = thread_index; part < ROWS * D / 8; part += 32 * WARPS) {
    const int half_row = part / 32 % 2;
    const int block = part / 64 % (D / 32);
    const int i = first_query + part / (2 * D) * 16 + half_row * 8 + part % 32 / 4;
    Pack<uint, 4> words = {{0u, 0u, 0u, 0u}};
#ifdef ROTATES
    if (i >= M * SHARE) {
      query_parts[part] = words;
    }
#else
    if (i < M * SHARE) {
      const int head = kv_head * SHARE + i % SHARE;
      words = load_eight(q + ((i / SHARE) * HEADS + head) * D + block * 32 + part % 4 * 8);
    }
    query_parts[part] = words;
#endif
  }
#ifdef ROTATES
  // The first keys and values are on their way while heads are normed and rotated: of two steps
  // where few threadgroups share a multiprocessor.
  constexpr int LINES = (D + 63) / 64;
  constexpr int NEAR = IS_AHEAD ? 2 * KEYS : KEYS;
  for (int n = thread_index; n < NEAR * LINES; n += 32 * WARPS) {
    const int p = seen(first_step + n / LINES);
    fetch_line(row_of(sealed_k, tail_k, p) + n % LINES * 64);
    fetch_line(row_of(sealed_v, tail_v, p) + n % LINES * 64);
  }
  const int queries = metal::min(ROWS, M * SHARE - first_query);
  SHARED_PTR T* const query_numbers = reinterpret_cast<SHARED_PTR T*>(query_parts);
  const int group = warp;
  const int groups = WARPS;
  const int at_once = M * SHARE + OWN > WARPS ? 2 : 1;
#define PUT_QUERY(item, d, number)                                             \
  const int line = item / 16 * (D / 32) + d / 32;                              \
  const int part = (line * 2 + item / 8 % 2) * 32 + item % 8 * 4 + d % 32 / 8; \
  query_numbers[8 * part + d % 8] = number
#include "../rotated_heads.h"
  const float score_factor = numbers[4];
#else
  const float score_factor = scale[0];
#endif

  Pack<uint, 4> key[KEY_TILES][D / 32];
  Pack<uint, WIDTH / 2> value[VALUE_TILES][4];
  auto load_keys = [&](int step) {
    if (IS_AHEAD && is_run(step)) {
      const GLOBAL T* first = row_of(sealed_k, tail_k, step) + key_place(0) * D + 8 * lane_pair;
      UNROLL for (int j = 0; j < KEY_TILES; j++) {
        UNROLL for (int b = 0; b < D / 32; b++) {
          key[j][b] = load_words<4>(first + 8 * j * D + 32 * b);
        }
      }
    } else {
      UNROLL for (int j = 0; j < KEY_TILES; j++) {
        const GLOBAL T* row = row_of(sealed_k, tail_k, seen(step + key_place(j)));
        UNROLL for (int b = 0; b < D / 32; b++) {
          key[j][b] = load_words<4>(row + 32 * b + 8 * lane_pair);
        }
      }
    }
  };
  auto load_values = [&](int step) {
    if (IS_AHEAD && is_run(step)) {
      const GLOBAL T* first = row_of(sealed_v, tail_v, step) + value_place(0, 0) * D + first_column;
      UNROLL for (int s = 0; s < VALUE_TILES; s++) {
        UNROLL for (int x = 0; x < 4; x++) {
          value[s][x] = load_words<WIDTH / 2>(first + (16 * s + x % 2 + x / 2 * 8) * D);
        }
      }
    } else {
      UNROLL for (int s = 0; s < VALUE_TILES; s++) {
        UNROLL for (int x = 0; x < 4; x++) {
          const GLOBAL T* row = row_of(sealed_v, tail_v, seen(step + value_place(s, x)));
          value[s][x] = load_words<WIDTH / 2>(row + first_column);
        }
      }
    }
  };
  if (IS_AHEAD) {
    load_keys(first_step);
    load_values(first_step);
  }

  float sum[QUERY_TILES][WIDTH][4];
  float top[QUERY_TILES][2];
  float total[QUERY_TILES][2];
  UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
    UNROLL for (int i = 0; i < WIDTH; i++) {
      UNROLL for (int x = 0; x < 4; x++) { sum[tile][i][x] = 0.0f; }
    }
    UNROLL for (int h = 0; h < 2; h++) {
      top[tile][h] = masked;
      total[tile][h] = 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int step = first_step; step < high; step += KEYS) {
    const int next = step + KEYS;
    if (!IS_AHEAD) {
      load_keys(step);
      load_values(step);
    }
#ifdef WRITES
    // Once both are on their way.
    if (step + KEYS > start) {
      UNROLL for (int j = 0; j < KEY_TILES; j++) {
        const int own = seen(step + key_place(j)) - start;
        if (own >= 0) {
          UNROLL for (int b = 0; b < D / 32; b++) {
            key[j][b] = *reinterpret_cast<SHARED_PTR Pack<uint, 4>*>(own_rows + own * D +
                                                                     32 * b + 8 * lane_pair);
          }
        }
      }
      UNROLL for (int s = 0; s < VALUE_TILES; s++) {
        UNROLL for (int x = 0; x < 4; x++) {
          const int own = seen(step + value_place(s, x)) - start;
          if (own >= 0) {
            value[s][x] = *reinterpret_cast<SHARED_PTR Pack<uint, WIDTH / 2>*>(
                own_rows + (M + own) * D + first_column);
          }
        }
      }
    }
#endif

    float score[QUERY_TILES][KEY_TILES][4];
    UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
      UNROLL for (int j = 0; j < KEY_TILES; j++) {
        UNROLL for (int x = 0; x < 4; x++) { score[tile][j][x] = 0.0f; }
      }
    }
    UNROLL for (int b = 0; b < D / 32; b++) {
      UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
        const Pack<uint, 4> upper = query_parts[((tile * (D / 32) + b) * 2) * 32 + lane];
        const Pack<uint, 4> lower = query_parts[((tile * (D / 32) + b) * 2 + 1) * 32 + lane];
        UNROLL for (int j = 0; j < KEY_TILES; j++) {
          UNROLL for (int h = 0; h < 2; h++) {
            const Pack<uint, 4> a = {{upper.v[2 * h], lower.v[2 * h], upper.v[2 * h + 1],
                                      lower.v[2 * h + 1]}};
            const Pack<uint, 4> keys = key[j][b];
            Tensor<T>::multiply(score[tile][j], a, keys.v[2 * h], keys.v[2 * h + 1], lane);
          }
        }
      }
    }
    if (IS_AHEAD && next < high) { load_keys(next); }
    UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
      UNROLL for (int h = 0; h < 2; h++) {
        const int position = start + (first_query + tile * 16 + h * 8 + lane_row) / SHARE;
        float best = masked;
        UNROLL for (int j = 0; j < KEY_TILES; j++) {
          UNROLL for (int x = 2 * h; x < 2 * h + 2; x++) {
            const int p = step + (warp * KEY_TILES + j) * 8 + 2 * lane_pair + x % 2;
            const bool is_seen = p <= position && (WINDOW == 0 || p > position - WINDOW);
            score[tile][j][x] = is_seen ? score[tile][j][x] * score_factor : masked;
            best = metal::max(best, score[tile][j][x]);
          }
        }
        best = metal::max(best, simd_shuffle_xor(best, 1));
        best = metal::max(best, simd_shuffle_xor(best, 2));
        if (lane_pair == 0) {
          warp_value[warp * ROWS + tile * 16 + h * 8 + lane_row] = best;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
      UNROLL for (int h = 0; h < 2; h++) {
        float best = top[tile][h];
        UNROLL for (int w = 0; w < WARPS; w++) {
          best = metal::max(best, warp_value[w * ROWS + tile * 16 + h * 8 + lane_row]);
        }
        const float fade = metal::fast::exp(top[tile][h] - best);
        top[tile][h] = best;
        total[tile][h] *= fade;
        UNROLL for (int i = 0; i < WIDTH; i++) {
          sum[tile][i][2 * h] *= fade;
          sum[tile][i][2 * h + 1] *= fade;
        }
      }
      UNROLL for (int j = 0; j < KEY_TILES; j++) {
        T coarse[4];
        T fine[4];
        UNROLL for (int x = 0; x < 4; x++) {
          const float value = score[tile][j][x];
          const float weight = value == masked ? 0.0f : metal::fast::exp(value - top[tile][x / 2]);
          total[tile][x / 2] += weight;
          coarse[x] = static_cast<T>(weight);
          fine[x] = static_cast<T>(weight - static_cast<float>(coarse[x]));
        }
        const int n = warp * KEY_TILES + j;
        const int part = ((tile * (KEYS / 16) + n / 2) * 2 * 32 + lane) * 2 + n % 2;
        weight_halves[part] = {{word_of(coarse[0], coarse[1]), word_of(coarse[2], coarse[3])}};
        weight_halves[part + 64] = {{word_of(fine[0], fine[1]), word_of(fine[2], fine[3])}};
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL for (int s = 0; s < VALUE_TILES; s++) {
      UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
        const int part =
            (tile * (KEYS / 16) + key_group * VALUE_TILES + s) * 2 * 32 + lane;
        const Pack<uint, 4> coarse = weight_parts[part];
        const Pack<uint, 4> fine = weight_parts[part + 32];
        UNROLL for (int i = 0; i < WIDTH; i++) {
          const uint b0 = halves_of(i & 1, value[s][0].v[i / 2], value[s][1].v[i / 2]);
          const uint b1 = halves_of(i & 1, value[s][2].v[i / 2], value[s][3].v[i / 2]);
          Tensor<T>::multiply(sum[tile][i], coarse, b0, b1, lane);
          Tensor<T>::multiply(sum[tile][i], fine, b0, b1, lane);
        }
      }
    }
    if (IS_AHEAD && next < high) { load_values(next); }
  }

  // Sums of weights over lanes and warps; weighted values over the groups of keys.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
    UNROLL for (int h = 0; h < 2; h++) {
      float part = total[tile][h];
      part += simd_shuffle_xor(part, 1);
      part += simd_shuffle_xor(part, 2);
      if (lane_pair == 0) {
        warp_value[warp * ROWS + tile * 16 + h * 8 + lane_row] = part;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
    UNROLL for (int h = 0; h < 2; h++) {
      const int row = tile * 16 + h * 8 + lane_row;
      const int i = first_query + row;
      if (warp == 0 && lane_pair == 0 && i < M * SHARE) {
        float all = 0.0f;
        UNROLL for (int w = 0; w < WARPS; w++) { all += warp_value[w * ROWS + row]; }
        const int head = kv_head * SHARE + i % SHARE;
        if (IS_WHOLE) {
          const float sink = HAS_SINKS ? static_cast<float>(sinks[head]) : masked;
          const Floats<2> share = lone_chunk(top[tile][h], all, HAS_SINKS, sink);
          row_weight[row] = share.v[0];
          row_share[row] = share.v[1];
        } else {
          const int place = ((split * M + i / SHARE) * HEADS + head) * (D + 4) + D;
          y[place] = static_cast<Y>(top[tile][h]);
          y[place + 1] = static_cast<Y>(all);
        }
      }
    }
  }
  if (IS_WHOLE && KEY_GROUPS == 1) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  UNROLL for (int turn = 0; turn < KEY_GROUPS; turn++) {
    if (key_group == turn) {
      UNROLL for (int tile = 0; tile < QUERY_TILES; tile++) {
        UNROLL for (int x = 0; x < 4; x++) {
          const int row = tile * 16 + x / 2 * 8 + lane_row;
          const int i = first_query + row;
          const int column = dim_group * DIMS + (2 * lane_pair + x % 2) * WIDTH;
          UNROLL for (int c = 0; c < WIDTH; c++) {
            if (KEY_GROUPS == 1) {
              if (i < M * SHARE) {
                const int place = (split * M + i / SHARE) * HEADS + kv_head * SHARE + i % SHARE;
                const float value = sum[tile][c][x];
                if (IS_WHOLE) {
                  float weighted = metal::fma(row_weight[row], value, 0.0f) * row_share[row];
#ifdef GATED
                  const int from = i / SHARE * static_cast<int>(gate_strides[0]);
                  const int head = kv_head * SHARE + i % SHARE;
                  const int at = from + head * GATE_STEP + (GATE_STEP == 1 ? 0 : column + c);
                  weighted = gated(weighted, static_cast<float>(gate[at]));
#endif
                  y[place * D + column + c] = static_cast<Y>(weighted);
                } else {
                  y[place * (D + 4) + column + c] = static_cast<Y>(value);
                }
              }
            } else {
              const int n = row * D + column + c;
              joined[n] = turn == 0 ? sum[tile][c][x] : joined[n] + sum[tile][c][x];
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (KEY_GROUPS > 1) {
    for (int n = thread_index; n < ROWS * D; n += 32 * WARPS) {
      const int i = first_query + n / D;
      if (i < M * SHARE) {
        const int place = (split * M + i / SHARE) * HEADS + kv_head * SHARE + i % SHARE;
        if (IS_WHOLE) {
          float value = metal::fma(row_weight[n / D], joined[n], 0.0f) * row_share[n / D];
#ifdef GATED
          const int from = i / SHARE * static_cast<int>(gate_strides[0]);
          const int head = kv_head * SHARE + i % SHARE;
          const int at = from + head * GATE_STEP + (GATE_STEP == 1 ? 0 : n % D);
          value = gated(value, static_cast<float>(gate[at]));
#endif
          y[place * D + n % D] = static_cast<Y>(value);
        } else {
          y[place * (D + 4) + n % D] = static_cast<Y>(joined[n]);
        }
      }
    }
  }
}
