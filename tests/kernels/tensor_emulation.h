// What dialect/cuda_tensor.h has, in Metal: a tensor instruction is made of shuffles.
template <typename T>
METAL_FUNC uint word_of(T low, T high) {
  return static_cast<uint>(as_type<ushort>(low)) | (static_cast<uint>(as_type<ushort>(high)) << 16);
}

METAL_FUNC uint halves_of(int high, uint a, uint b) {
  return high == 0 ? (a & 0xffffu) | (b << 16) : (a >> 16) | (b & 0xffff0000u);
}

template <typename T>
METAL_FUNC Pack<uint, 4> load_eight(const device T* p) {
  return {{word_of(p[0], p[1]), word_of(p[2], p[3]), word_of(p[4], p[5]), word_of(p[6], p[7])}};
}

template <int N, typename T>
METAL_FUNC Pack<uint, N> load_words(const device T* p) {
  return *reinterpret_cast<const device Pack<uint, N>*>(p);
}

template <typename T>
METAL_FUNC T fetch_line(const device T* p) {
  return *p;
}

template <typename T>
METAL_FUNC float half_of(uint word, int high) {
  const uint half_word = high == 0 ? word & 0xffffu : word >> 16;
  return static_cast<float>(as_type<T>(static_cast<ushort>(half_word)));
}

template <typename T>
struct Tensor {
  // Rows of a lane are lane / 4 and that plus 8; its columns 2 * (lane % 4) and the next.
  static METAL_FUNC void multiply(thread float (&sum)[4], const thread Pack<uint, 4>& a, uint b0,
                                  uint b1, int lane) {
    for (int k = 0; k < 16; k++) {
      const int pair = k % 8 / 2;
      const int upper = k / 8 * 2;
      for (int x = 0; x < 4; x++) {
        const ushort own = static_cast<ushort>(lane / 4 * 4 + pair);
        const ushort other = static_cast<ushort>((2 * (lane % 4) + x % 2) * 4 + pair);
        const float left = half_of<T>(simd_shuffle(a.v[upper + x / 2], own), k % 2);
        const float right = half_of<T>(simd_shuffle(k < 8 ? b0 : b1, other), k % 2);
        sum[x] = metal::fma(left, right, sum[x]);
      }
    }
  }
};
