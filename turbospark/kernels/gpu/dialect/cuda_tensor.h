// Helpers of bodies that only CUDA has: tensor cores and what feeds them.

// sum[16, 8] += a[16, 16] b[16, 8] in float32. A lane holds four, eight and four of their numbers.
template <typename T>
struct Tensor;

template <>
struct Tensor<__nv_bfloat16> {
  FUNC static void multiply(float (&sum)[4], const Pack<uint, 4>& a, uint b0, uint b1, int) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Tensor<__half> {
  FUNC static void multiply(float (&sum)[4], const Pack<uint, 4>& a, uint b0, uint b1, int) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b0), "r"(b1));
  }
};

// Two 16-bit floats in a word, the first in its low half.
template <typename T>
FUNC uint word_of(T low, T high) {
  const Pack<T, 2> pair = {{low, high}};
  return *reinterpret_cast<const uint*>(&pair);
}

// The low halves of two words, or their high halves.
FUNC uint halves_of(int high, uint a, uint b) {
  return __byte_perm(a, b, high == 0 ? 0x5410u : 0x7632u);
}

// Eight 16-bit floats from any address, two a word.
template <typename T>
FUNC Pack<uint, 4> load_eight(const T* p) {
  if (VECTOR_ALIGNED(p, 16)) {
    return *reinterpret_cast<const Pack<uint, 4>*>(p);
  }
  return {{word_of(p[0], p[1]), word_of(p[2], p[3]), word_of(p[4], p[5]), word_of(p[6], p[7])}};
}

// N words from an address that is a multiple of their size. They are not read again soon.
template <int N, typename T>
FUNC Pack<uint, N> load_words(const T* p) {
  Pack<uint, N> words;
  if constexpr (N == 4) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
    words = {{v.x, v.y, v.z, v.w}};
  } else {
    static_assert(N == 2, "8 or 16 bytes");
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
    words = {{v.x, v.y}};
  }
  return words;
}

// Bring 128 bytes near, to be read soon.
template <typename T>
FUNC void fetch_line(const T* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
