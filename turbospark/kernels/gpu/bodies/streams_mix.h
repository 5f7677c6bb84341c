// mixed = mean over GROUPS streams of sigmoid(up) * normed, D values a row; and where OPENS, a
// row's shares 2 * sigmoid(inject / GROUPS). A thread a column; grid y: row.
const int column = static_cast<int>(thread_position_in_grid.x);
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const float mean = 1.0f / static_cast<float>(GROUPS);
if (column < D) {
  float total = 0.0f;
  UNROLL for (int group = 0; group < GROUPS; group++) {
    const int at = (row * GROUPS + group) * D + column;
    total += gated(static_cast<float>(normed[at]), static_cast<float>(up[at]));
  }
  mixed[row * D + column] = static_cast<T>(total * mean);
}
#if OPENS
if (column < GROUPS) {
  const int at = row * GROUPS + column;
  opened[at] = static_cast<T>(gated(2.0f, static_cast<float>(inject[at]) * mean));
}
#endif
