// The place of the largest of PARTS values of a row, the lowest of several; see argmax_parts.
// Threadgroup (32, 1, 1); grid y: row.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(threadgroup_position_in_grid.y);
int top = -0x7fffffff;
int place = V;
for (int part = lane; part < PARTS; part += 32) {
  const int other = tops[row * PARTS + part];
  if (other > top) {  // parts rise, so the first of several stays
    top = other;
    place = places[row * PARTS + part];
  }
}
const int simd_top = simd_max(top);
place = -simd_max(top == simd_top ? -place : -V);
if (lane == 0) {
  tokens[row] = place;
}
