// Joins the partials of latent attention and reads a head's values off the latents: y[M, HEADS, V] =
// rows N..N+V-1 of the head's HEAD_ROWS rows of the matrix [.., L], times the joined latents
// sum(weight partial) / sum(weight total), where a chunk's weight is exp(its top - the largest top).
//
// Threadgroup (32 * SIMDGROUPS, 1, 1); grid y: query; grid z: SIMDGROUPS * ROWS values of a head.
// Chunks are dealt to groups of threads by their number, so a row does not depend on its neighbours.
SHARED float context[L];
SHARED float group_sum[GROUPS * L];
SHARED float group_total[GROUPS];
SHARED float group_top[SIMDGROUPS];
const float masked = -3.0e38f;
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int query = static_cast<int>(threadgroup_position_in_grid.y);
const int head = query % HEADS;
const int splits = chunk_of(lengths[1] + M - 1, CHUNK, FIRST, DOUBLINGS) + 1;

float top = masked;
for (int split = thread_index; split < splits; split += 32 * SIMDGROUPS) {
  top = metal::max(top, parts[(split * M * HEADS + query) * (L + 4) + L]);
}
top = simd_max(top);
if (lane == 0) {
  group_top[simdgroup] = top;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int s = 0; s < SIMDGROUPS; s++) { top = metal::max(top, group_top[s]); }

const int group = thread_index / (L / 4);
const int column = (thread_index - group * (L / 4)) * 4;
if (group < GROUPS) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float total = 0.0f;
  for (int split = group; split < splits; split += GROUPS) {
    const int n = (split * M * HEADS + query) * (L + 4);
    const Pack<float, 2> own = load_pack<2>(parts + n + L);  // maximum and sum
    const float weight = own.v[0] == masked ? 0.0f : metal::fast::exp(own.v[0] - top);
    const Pack<float, 4> partial = load_pack<4>(parts + n + column);
    total = metal::fma(weight, own.v[1], total);
    UNROLL for (int i = 0; i < 4; i++) { sum[i] = metal::fma(weight, partial.v[i], sum[i]); }
  }
  UNROLL for (int i = 0; i < 4; i++) { group_sum[group * L + column + i] = sum[i]; }
  if (column == 0) {
    group_total[group] = total;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float whole = 0.0f;
UNROLL for (int g = 0; g < GROUPS; g++) { whole += group_total[g]; }
const float inverse = 1.0f / whole;
for (int d = thread_index; d < L; d += 32 * SIMDGROUPS) {
  float value = 0.0f;
  UNROLL for (int g = 0; g < GROUPS; g++) { value += group_sum[g * L + d]; }
  context[d] = value * inverse;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int first = (static_cast<int>(threadgroup_position_in_grid.z) * SIMDGROUPS + simdgroup) * ROWS;
float dot[ROWS];
UNROLL for (int r = 0; r < ROWS; r++) { dot[r] = 0.0f; }
UNROLL for (int step = 0; step < (L + 255) / 256; step++) {
  const int k = 256 * step + 8 * lane;
  if (k < L) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int at = head * HEAD_ROWS + N + metal::min(first + r, V - 1);
      const Floats<8> weight =
          weight_eight<L, GROUP, HAS_BIASES, ZERO>(codes, scales, biases, at, k);
      UNROLL for (int i = 0; i < 8; i++) {
        dot[r] = metal::fma(weight.v[i], context[k + i], dot[r]);
      }
    }
  }
}
UNROLL for (int r = 0; r < ROWS; r++) {
  const float value = simd_sum(dot[r]);
  if (lane == 0 && first + r < V) {
    y[query * V + first + r] = static_cast<T>(value);
  }
}
