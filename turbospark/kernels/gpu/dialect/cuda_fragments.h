// Tensor cores and asynchronous copies of NVIDIA GPUs, for bodies that run there alone.
FUNC uint shared_address(const void* p) {
  return static_cast<uint>(__cvta_generic_to_shared(p));
}

// BYTES from global to shared memory, in the background; both addresses are multiples of BYTES.
FUNC void copy_async(uint to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// The same for fewer bytes, whose neighbours other warps of the block want at about that time.
template <int BYTES>
FUNC void copy_async_cached(uint to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
}

FUNC void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest PENDING sets of copies of this thread have arrived.
template <int PENDING>
FUNC void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A barrier of THREADS threads of a block that know it by the same number, 1 to 15.
template <int THREADS>
FUNC void team_barrier(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

template <typename T>
FUNC T load_shared(uint address) {
  T value;
  if constexpr (sizeof(T) == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.v[0]), "=r"(value.v[1]), "=r"(value.v[2]), "=r"(value.v[3])
                 : "r"(address));
  } else {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.v[0]), "=r"(value.v[1])
                 : "r"(address));
  }
  return value;
}

FUNC void store_shared(uint address, const Pack<uint, 4>& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.v[0]),
               "r"(value.v[1]), "r"(value.v[2]), "r"(value.v[3])
               : "memory");
}

// Two numbers side by side in a register, the first one low.
template <typename X>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static constexpr uint ones = 0x3f803f80u;

  // 16 + code, exactly, of codes I and I + 4 of a word: the codes lie in the mantissa of 16.
  template <int I>
  static FUNC uint codes(uint word) {
    const uint moved = I == 0 ? word << 3 : word >> (4 * I - 3);
    return (moved & 0x00780078u) | 0x41804180u;
  }

  static FUNC uint pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint*>(&pair);
  }

  // sums += a b for a [16, 16] and b [16, 8].
  static FUNC void multiply(float (&sums)[4], const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Pair<__half> {
  static constexpr uint ones = 0x3c003c00u;

  template <int I>
  static FUNC uint codes(uint word) {
    const uint moved = I < 2 ? word << (6 - 4 * I) : word >> (4 * I - 6);
    return (moved & 0x03c003c0u) | 0x4c004c00u;
  }

  static FUNC uint pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint*>(&pair);
  }

  static FUNC void multiply(float (&sums)[4], const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// sums += (16 + codes) x for eight codes of two rows of a weight, and the x that they meet.
template <typename X>
FUNC void multiply_words(float (&sums)[4], uint upper, uint lower, const Pack<uint, 4>& x) {
  const uint first[4] = {Pair<X>::template codes<0>(upper), Pair<X>::template codes<0>(lower),
                         Pair<X>::template codes<1>(upper), Pair<X>::template codes<1>(lower)};
  const uint second[4] = {Pair<X>::template codes<2>(upper), Pair<X>::template codes<2>(lower),
                          Pair<X>::template codes<3>(upper), Pair<X>::template codes<3>(lower)};
  Pair<X>::multiply(sums, first, x.v[0], x.v[1]);
  Pair<X>::multiply(sums, second, x.v[2], x.v[3]);
}

// Every row of sums += the sum of x.
template <typename X>
FUNC void add_words(float (&sums)[4], const Pack<uint, 4>& x) {
  const uint ones[4] = {Pair<X>::ones, Pair<X>::ones, Pair<X>::ones, Pair<X>::ones};
  Pair<X>::multiply(sums, ones, x.v[0], x.v[1]);
  Pair<X>::multiply(sums, ones, x.v[2], x.v[3]);
}

// Eight values side by side, from any address.
template <typename X>
FUNC Pack<uint, 4> load_eight(const X* p) {
  if (VECTOR_ALIGNED(p, 16)) {
    return load_pack<4>(reinterpret_cast<const uint*>(p));
  }
  Pack<uint, 4> words;
  const ushort* halves = reinterpret_cast<const ushort*>(p);
  UNROLL for (int i = 0; i < 4; i++) {
    words.v[i] = halves[2 * i] | (static_cast<uint>(halves[2 * i + 1]) << 16);
  }
  return words;
}

// The eight values in the order of the codes that they meet: 0 4 1 5 2 6 3 7.
FUNC Pack<uint, 4> in_code_order(const Pack<uint, 4>& x) {
  Pack<uint, 4> ordered;
  ordered.v[0] = __byte_perm(x.v[0], x.v[2], 0x5410);
  ordered.v[1] = __byte_perm(x.v[0], x.v[2], 0x7632);
  ordered.v[2] = __byte_perm(x.v[1], x.v[3], 0x5410);
  ordered.v[3] = __byte_perm(x.v[1], x.v[3], 0x7632);
  return ordered;
}

template <typename X>
FUNC Floats<8> to_floats(const Pack<uint, 4>& words) {
  Floats<8> wide;
  const X* values = reinterpret_cast<const X*>(words.v);
  UNROLL for (int i = 0; i < 8; i++) { wide.v[i] = static_cast<float>(values[i]); }
  return wide;
}

// COUNT scales side by side, from shared memory.
template <typename S, int COUNT>
FUNC void load_scales(float (&scale)[COUNT], uint address) {
  constexpr int WORDS = COUNT * static_cast<int>(sizeof(S)) / 4;
  uint words[WORDS];
  UNROLL for (int w = 0; w < WORDS; w += WORDS == 2 ? 2 : 4) {
    const auto pack = load_shared<Pack<uint, WORDS == 2 ? 2 : 4>>(address + 4 * w);
    UNROLL for (int i = 0; i < (WORDS == 2 ? 2 : 4); i++) { words[w + i] = pack.v[i]; }
  }
  const S* const values = reinterpret_cast<const S*>(words);
  UNROLL for (int i = 0; i < COUNT; i++) { scale[i] = static_cast<float>(values[i]); }
}
