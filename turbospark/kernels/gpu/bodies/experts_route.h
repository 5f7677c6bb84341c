// The TOP largest of E scores in rank order, the lower expert first among equals, and their shares
// of the softmax: over these alone if RENORMALISE, else over all; times a scale each if HAS_SCALE.
// A SIMD-group a row; threadgroup (32, 1, 1). A lane has the experts lane + 32 i.
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.y);
Floats<VALUES> score;
UNROLL for (int i = 0; i < VALUES; i++) {
  score.v[i] = static_cast<float>(scores[row * E + metal::min(lane + 32 * i, E - 1)]);
}
const Choice choice = ranked<E, TOP, VALUES, RENORMALISE, GROUPS, KEPT>(score, lane, TOP);
if (lane < TOP) {
  ids[row * TOP + lane] = choice.expert;
  weights[row * TOP + lane] =
      HAS_SCALE ? choice.share * static_cast<float>(scale[choice.expert]) : choice.share;
}
