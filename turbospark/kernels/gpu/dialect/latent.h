// Helpers of latent attention: rows of the matrix that keys and values are made with. CODED precedes
// this text: 1 where its numbers are 4-bit codes in MLX's affine layout, 0 where they are floats.
#if CODED
template <int K, int GROUP, bool HAS_BIASES, int ZERO, typename S, typename B>
FUNC Floats<8> weight_eight(const GLOBAL uint* codes, const GLOBAL S* scales,
                            const GLOBAL B* biases, int row, int k) {
  const uint word = codes[row * (K / 8) + k / 8];
  const int group = row * (K / GROUP) + k / GROUP;
  const float scale = static_cast<float>(scales[group]);
  const float offset =
      HAS_BIASES ? static_cast<float>(biases[group]) : scale * -static_cast<float>(ZERO);
  Floats<8> made;
  UNROLL for (int i = 0; i < 8; i++) {
    made.v[i] = metal::fma(scale, small_to_float((word >> (4 * i)) & 15u), offset);
  }
  return made;
}
#else
template <int K, int GROUP, bool HAS_BIASES, int ZERO, typename W, typename S, typename B>
FUNC Floats<8> weight_eight(const GLOBAL W* matrix, const GLOBAL S*, const GLOBAL B*, int row,
                            int k) {
  return load_floats<8>(matrix + row * K + k);
}
#endif

FUNC float inverse_root(float x) { return metal::precise::rsqrt(x); }
