// Norms and rotates the heads of M rows, a SIMD-group a head; the rows of keys and values go into a
// copy of the cache's tail. Each of q, k, v has a norm (0 none, 1 without a weight, 2 with one).
//
// Angles are float32 products, as models were trained. lengths: first position of the tail, position
// of the first row. numbers: eps of q, k, v, then the factor of cosines and sines. Threadgroup
// (32 * SIMDGROUPS, 1, 1); grid x: first the heads, then COPIES threadgroups of COPY_ROWS rows each.
// Rows of the new tail that no position names are left unwritten.
const int kinds = HAS_KV ? HEADS + 2 * KV_HEADS : HEADS;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int group = static_cast<int>(threadgroup_position_in_grid.x);
const int start = lengths[1];
const int held = start - lengths[0];
const int item = group * SIMDGROUPS + static_cast<int>(simdgroup_index_in_threadgroup);

if (group < HEAD_GROUPS) {
  const int row = metal::min(item / kinds, M - 1);
  const int among = item - item / kinds * kinds;
  const bool is_query = among < HEADS;
  const bool is_key = !is_query && among < HEADS + KV_HEADS;
  const int head = is_query ? among : is_key ? among - HEADS : among - HEADS - KV_HEADS;
  const int q_from = row * static_cast<int>(q_strides[0]) + head * Q_STEP;
  const int k_from = HAS_KV ? row * static_cast<int>(k_strides[0]) + head * D : 0;
  const int v_from = HAS_KV ? row * static_cast<int>(v_strides[0]) + head * D : 0;
  const int norm = is_query ? Q_NORM : is_key ? K_NORM : V_NORM;

  // Dimensions of this lane: both of each of its pairs, then those that do not rotate.
  float value[2 * TURNS + RESTS];
  float factor[2 * TURNS + RESTS];
  float square_sum = 0.0f;
  UNROLL for (int j = 0; j < 2 * TURNS + RESTS; j++) {
    const int pair = lane + j % TURNS * 32;
    const int rotated = IS_TRADITIONAL ? 2 * pair + j / TURNS : pair + j / TURNS * PAIRS;
    const int d = j < 2 * TURNS ? rotated : 2 * PAIRS + lane + (j - 2 * TURNS) * 32;
    const bool is_held = j < 2 * TURNS ? pair < PAIRS : d < D;
    value[j] = 0.0f;
    factor[j] = 1.0f;
    if (is_held) {
      value[j] = is_query ? static_cast<float>(q[q_from + d])
                 : is_key ? static_cast<float>(k[k_from + d])
                          : static_cast<float>(v[v_from + d]);
      if (norm == 2) {
        factor[j] = is_query ? static_cast<float>(q_weight[d])
                    : is_key ? static_cast<float>(k_weight[d])
                             : static_cast<float>(v_weight[d]);
      }
    }
    square_sum = metal::fma(value[j], value[j], square_sum);
  }
  square_sum = simd_sum(square_sum);
  if (norm != 0) {
    const float eps = is_query ? numbers[0] : is_key ? numbers[1] : numbers[2];
    const float scale =
        metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(D)) + eps);
    UNROLL for (int j = 0; j < 2 * TURNS + RESTS; j++) { value[j] *= scale * factor[j]; }
  }
  UNROLL for (int j = 0; j < TURNS; j++) {
    if ((is_query || is_key) && lane + j * 32 < PAIRS) {
      const float angle = static_cast<float>(start + row) * frequencies[lane + j * 32];
      const Floats<2> turn = rotation(angle, numbers[3]);
      const float first = value[j];
      const float second = value[j + TURNS];
      value[j] = first * turn.v[0] - second * turn.v[1];
      value[j + TURNS] = second * turn.v[0] + first * turn.v[1];
    }
  }
  const int to = is_query ? (row * HEADS + head) * D : (head * TAIL + held + row) * D;
  if (item < M * kinds) {
    UNROLL for (int j = 0; j < 2 * TURNS + RESTS; j++) {
      const int pair = lane + j % TURNS * 32;
      const int rotated = IS_TRADITIONAL ? 2 * pair + j / TURNS : pair + j / TURNS * PAIRS;
      const int d = j < 2 * TURNS ? rotated : 2 * PAIRS + lane + (j - 2 * TURNS) * 32;
      const bool is_held = j < 2 * TURNS ? pair < PAIRS : d < D;
      if (is_held && is_query) {
        y[to + d] = static_cast<T>(value[j]);
      }
      if (is_held && is_key) {
        new_k[to + d] = static_cast<KV>(value[j]);
      }
      if (is_held && !is_query && !is_key) {
        new_v[to + d] = static_cast<KV>(value[j]);
      }
    }
  }
} else {
  const int copy = group - HEAD_GROUPS;
  const bool is_key = copy < COPIES / 2;
  const int block = is_key ? copy : copy - COPIES / 2;
  const int head = block / COPIES_A_HEAD;
  const int first = (block - head * COPIES_A_HEAD) * COPY_ROWS;
  const int from = (head * TAIL + first) * D;
  const int count = metal::min(COPY_ROWS, held - first) * D;
  for (int n = 4 * thread_index; n < count; n += 4 * 32 * SIMDGROUPS) {
    const Pack<KV, 4> values = is_key ? load_pack<4>(tail_k + from + n)
                                      : load_pack<4>(tail_v + from + n);
    if (is_key) {
      store_pack<4>(new_k + from + n, values);
    } else {
      store_pack<4>(new_v + from + n, values);
    }
  }
}
