// The TOP largest of E scores in rank order, the lower expert first among equals, and their shares
// of the softmax: over these alone if RENORMALISE, else over all; times a scale each if HAS_SCALE.
// A SIMD-group a row; threadgroup (32, 1, 1). A lane has the experts lane + 32 i.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.y);
const float lowest = -3.4e38f;
float score[VALUES];
UNROLL for (int i = 0; i < VALUES; i++) {
  score[i] = static_cast<float>(scores[row * E + metal::min(lane + 32 * i, E - 1)]);
}
uint taken = 0u;
float own = 0.0f;
float top = 0.0f;
int chosen = 0;
for (int rank = 0; rank < TOP; rank++) {
  float best = lowest;
  int index = E - 1;
  UNROLL for (int i = 0; i < VALUES; i++) {
    const bool is_free = lane + 32 * i < E && ((taken >> i) & 1u) == 0u;
    if (is_free && score[i] > best) {
      best = score[i];
      index = lane + 32 * i;
    }
  }
  const float highest = simd_max(best);
  index = -simd_max(best == highest ? -index : -(E - 1));
  if (index % 32 == lane) { taken = taken | (1u << (index / 32)); }
  if (rank == 0) { top = highest; }
  if (rank == lane) {
    own = highest;
    chosen = index;
  }
}
const float share = lane < TOP ? metal::precise::exp(own - top) : 0.0f;
float part = share;
if (!RENORMALISE) {
  part = 0.0f;
  UNROLL for (int i = 0; i < VALUES; i++) {
    if (lane + 32 * i < E) { part += exponential(score[i] - top); }
  }
}
const float total = simd_sum(part);
if (lane < TOP) {
  ids[row * TOP + lane] = chosen;
  weights[row * TOP + lane] =
      HAS_SCALE ? share / total * static_cast<float>(scale[chosen]) : share / total;
}
