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

// Counters in global memory that start at 0. Each number is taken once, in order.
FUNC int take_number(const int* counter) { return atomicAdd(const_cast<int*>(counter), 1); }

// Adds to a counter; who waits for it sees what this thread, or others of its block before their
// last barrier, wrote to global memory.
FUNC void announce(const int* counter, int count) {
  __threadfence();
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

FUNC void wait_until(const int* counter, int count) {
  int seen = 0;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if (seen < count) { __nanosleep(20); }
  } while (seen < count);
}

// A number in shared memory that warps tell each other without a barrier.
FUNC int peek(const int* told) { return *reinterpret_cast<const volatile int*>(told); }
FUNC void tell(int* told, int number) { *reinterpret_cast<volatile int*>(told) = number; }

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
