// The largest of SPAN values of a row of V floats, and where it stands first; where a value is not
// finite, -1, which comes before all others. Floats are compared as integers of the same order.
// Threadgroup (THREADS, 1, 1); grid x: part; grid y: row.
SHARED int group_top[THREADS / 32];
SHARED int group_place[THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int simdgroup = static_cast<int>(simdgroup_index_in_threadgroup);
const int part = static_cast<int>(threadgroup_position_in_grid.x);
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const int end = metal::min((part + 1) * SPAN, V);
const int infinite = 0x7f800000;
const int highest = 0x7fffffff;

int top = -highest;
int place = V;
for (int n = part * SPAN + thread_index; n < end; n += THREADS) {
  const int bits = bits_of(logits + row * V + n);
  const bool is_finite = (bits & infinite) != infinite;
  const int ordered = bits < 0 ? (bits ^ highest) + 1 : bits;  // both zeros are 0
  const int value = is_finite ? ordered : highest;
  if (value > top) {
    top = value;
    place = is_finite ? n : -1;
  }
}
const int simd_top = simd_max(top);
place = -simd_max(top == simd_top ? -place : -V);
if (thread_index_in_simdgroup == 0) {
  group_top[simdgroup] = simd_top;
  group_place[simdgroup] = place;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0) {
  top = group_top[0];
  place = group_place[0];
  for (int group = 1; group < THREADS / 32; group++) {
    const int other = group_top[group];
    if (other > top || (other == top && group_place[group] < place)) {
      top = other;
      place = group_place[group];
    }
  }
  tops[row * PARTS + part] = top;
  places[row * PARTS + part] = place;
}
