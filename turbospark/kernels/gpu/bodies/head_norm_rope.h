// Norms and rotates the heads of M rows, a SIMD-group a head; the rows of keys and values go into a
// copy of the cache's tail. Each of q, k, v has a norm (0 none, 1 without a weight, 2 with one).
//
// lengths: first position of the tail, position of the first row. numbers: eps of q, k, v, then the
// factor of cosines and sines. Threadgroup (32 * SIMDGROUPS, 1, 1); grid x: first the heads, then
// COPIES threadgroups of COPY_ROWS rows each. Rows of the new tail that no position names are left
// unwritten.
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

  Floats<SIZE> value;
  Floats<SIZE> factor = head_ones<SIZE>();
  if (is_query) {
    value = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(q + q_from, lane);
    if (Q_NORM == 2) {
      factor = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(q_weight, lane);
    }
  } else if (is_key) {
    value = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(k + k_from, lane);
    if (K_NORM == 2) {
      factor = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(k_weight, lane);
    }
  } else {
    value = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(v + v_from, lane);
    if (V_NORM == 2) {
      factor = head_numbers<D, PAIRS, SIZE, IS_TRADITIONAL>(v_weight, lane);
    }
  }
  if (norm != 0) {
    const float eps = is_query ? numbers[0] : is_key ? numbers[1] : numbers[2];
    value = normed_head<D>(value, factor, eps);
  }
  if (is_query || is_key) {
    const float position = static_cast<float>(start + row);
    value = rotated_head<TURNS>(
        value, head_turns<PAIRS, TURNS>(position, frequencies, numbers[3], lane));
  }
  const int to = is_query ? (row * HEADS + head) * D : (head * TAIL + held + row) * D;
  if (item < M * kinds) {
    UNROLL for (int j = 0; j < SIZE; j++) {
      const int d = head_place<D, PAIRS, IS_TRADITIONAL>(j, lane);
      if (d < D && is_query) {
        y[to + d] = static_cast<T>(value.v[j]);
      }
      if (d < D && is_key) {
        new_k[to + d] = static_cast<KV>(value.v[j]);
      }
      if (d < D && !is_query && !is_key) {
        new_v[to + d] = static_cast<KV>(value.v[j]);
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
