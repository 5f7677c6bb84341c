// y[T, C] = rows of a 4-bit table [V, C] that tokens name, times a factor. A thread makes the 8
// values of a word; threadgroup (THREADS, 1, 1), a row of the grid a token.
const int word_index = static_cast<int>(thread_position_in_grid.x);
const int row = static_cast<int>(thread_position_in_grid.y);
if (word_index < C / 8) {
  const int token = metal::max(0, metal::min(static_cast<int>(tokens[row]), V - 1));
  const int group = token * (C / GROUP) + word_index / (GROUP / 8);
  const float scale = static_cast<float>(scales[group]);
  const float offset = HAS_BIASES ? static_cast<float>(biases[group])
                                  : scale * -static_cast<float>(ZERO);
  const uint word = codes[token * (C / 8) + word_index];
  UNROLL for (int i = 0; i < 8; i++) {
    const float code = small_to_float((word >> (4 * i)) & 15u);
    const float value = metal::fma(scale, code, offset) * factor[0];
    y[row * C + word_index * 8 + i] = static_cast<T>(value);
  }
}
