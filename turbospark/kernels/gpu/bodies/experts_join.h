// y[T, N] = the sum over TOP ranks, in their order, of weights[T, TOP] times rows of outs[n, N]: those
// at places[T, TOP]. A thread makes eight columns of a row, N a multiple of 8; grid y: row.
const int column = static_cast<int>(thread_position_in_grid.x) * 8;
const int row = static_cast<int>(thread_position_in_grid.y);
if (column < N) {
  Floats<8> total;
  UNROLL for (int i = 0; i < 8; i++) { total.v[i] = 0.0f; }
  UNROLL for (int rank = 0; rank < TOP; rank++) {
    const int place = static_cast<int>(places[row * TOP + rank]);
    const float weight = static_cast<float>(weights[row * TOP + rank]);
    const Floats<8> value = load_floats<8>(outs + place * N + column);
    UNROLL for (int i = 0; i < 8; i++) {
      total.v[i] = metal::fma(weight, value.v[i], total.v[i]);
    }
  }
  Pack<T, 8> result;
  UNROLL for (int i = 0; i < 8; i++) { result.v[i] = static_cast<T>(total.v[i]); }
  store_pack<8>(y + row * N + column, result);
}
