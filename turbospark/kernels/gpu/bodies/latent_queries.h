// Queries that score latents as they are, of M rows and HEADS heads, and the rows' own latents and
// keys, which go into a copy of the cache's tail.
//
// Of a query [N + R] the first N numbers go through the head's matrix: rows 0..N-1 of its HEAD_ROWS
// rows of L numbers; the others rotate. y[M, HEADS, L + R] is both times the scores' factor. A row
// [L + R] is a latent before its norm and a key before its rotation.
//
// lengths: first position of the tail, position of the first row. numbers: eps, the factor of
// cosines and sines, that of scores. Threadgroup (32 * SIMDGROUPS, 1, 1), SIMDGROUPS being 8; grid
// x: SLICES of 256 columns of each head, one for the rows, then copies of COPY_ROWS rows each.
// Rows of the new tail that no position names are left unwritten.
SHARED float joined[SIMDGROUPS * 8 * 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int group = static_cast<int>(threadgroup_position_in_grid.x);
const int start = lengths[1];
const int held = start - lengths[0];

if (group < HEADS * SLICES) {
  const int head = group / SLICES;
  const int slice = group - head * SLICES;
  const int column = metal::min((slice * 32 + lane) * 8, L - 8);
  float total[M][8];
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int i = 0; i < 8; i++) { total[m][i] = 0.0f; }
  }
  UNROLL for (int turn = 0; turn < (N + SIMDGROUPS - 1) / SIMDGROUPS; turn++) {
    const int n = turn * SIMDGROUPS + simdgroup;
    if (n < N) {
      const Floats<8> weight = weight_eight<L, GROUP, HAS_BIASES, ZERO>(
          codes, scales, biases, head * HEAD_ROWS + n, column);
      UNROLL for (int m = 0; m < M; m++) {
        const float value = static_cast<float>(q[(m * HEADS + head) * (N + R) + n]);
        UNROLL for (int i = 0; i < 8; i++) {
          total[m][i] = metal::fma(value, weight.v[i], total[m][i]);
        }
      }
    }
  }
  const int own = slice * 256 + thread_index;
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int i = 0; i < 8; i++) {
      joined[(simdgroup * 8 + i) * 32 + lane] = total[m][i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
      sum += joined[(s * 8 + (thread_index & 7)) * 32 + (thread_index >> 3)];
    }
    if (own < L) {
      y[(m * HEADS + head) * (L + R) + own] = sum * numbers[2];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int m = simdgroup; m < M && slice == 0; m += SIMDGROUPS) {
    for (int pair = lane; pair < R / 2; pair += 32) {
      const int first = IS_TRADITIONAL ? 2 * pair : pair;
      const int second = IS_TRADITIONAL ? first + 1 : first + R / 2;
      const int from = (m * HEADS + head) * (N + R) + N;
      const int to = (m * HEADS + head) * (L + R) + L;
      const float position = static_cast<float>(start + m);
      const Floats<2> turn = rotation(position * frequencies[pair], numbers[1]);
      const float a = static_cast<float>(q[from + first]);
      const float b = static_cast<float>(q[from + second]);
      y[to + first] = (a * turn.v[0] - b * turn.v[1]) * numbers[2];
      y[to + second] = (b * turn.v[0] + a * turn.v[1]) * numbers[2];
    }
  }
} else if (group == HEADS * SLICES) {
  for (int m = simdgroup; m < M; m += SIMDGROUPS) {
    const int from = m * (L + R);
    float squares = 0.0f;
    for (int d = lane; d < L; d += 32) {
      const float value = static_cast<float>(row[from + d]);
      squares = metal::fma(value, value, squares);
    }
    const float mean = metal::fma(simd_sum(squares), 1.0f / static_cast<float>(L), numbers[0]);
    const float inverse = inverse_root(mean);
    for (int d = lane; d < L; d += 32) {
      const float value = static_cast<float>(row[from + d]) * inverse;
      new_v[(held + m) * L + d] = static_cast<KV>(value * static_cast<float>(norm_weight[d]));
    }
    for (int pair = lane; pair < R / 2; pair += 32) {
      const int first = IS_TRADITIONAL ? 2 * pair : pair;
      const int second = IS_TRADITIONAL ? first + 1 : first + R / 2;
      const float position = static_cast<float>(start + m);
      const Floats<2> turn = rotation(position * frequencies[pair], numbers[1]);
      const float a = static_cast<float>(row[from + L + first]);
      const float b = static_cast<float>(row[from + L + second]);
      new_k[(held + m) * R + first] = static_cast<KV>(a * turn.v[0] - b * turn.v[1]);
      new_k[(held + m) * R + second] = static_cast<KV>(b * turn.v[0] + a * turn.v[1]);
    }
  }
} else {
  const int first = (group - HEADS * SLICES - 1) * COPY_ROWS;
  const int count = metal::min(COPY_ROWS, held - first);
  for (int n = 4 * thread_index; n < count * L; n += 4 * 32 * SIMDGROUPS) {
    store_pack<4>(new_v + first * L + n, load_pack<4>(tail_v + first * L + n));
  }
  for (int n = 2 * thread_index; n < count * R; n += 2 * 32 * SIMDGROUPS) {
    store_pack<2>(new_k + first * R + n, load_pack<2>(tail_k + first * R + n));
  }
}
