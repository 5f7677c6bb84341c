// What dialect/cuda_fragments.h has, for the emulator. Copies from global to shared memory arrive
// when they are waited for and no earlier; a tensor instruction looks at what all lanes post.
#define threadIdx (emu_index{static_cast<int>(emu_current_thread()->thread_index_in_threadgroup)})
#define blockIdx (emu_index{static_cast<int>(emu_current_thread()->threadgroup_position_in_grid[0])})
#define gridDim (emu_index{static_cast<int>(emu_current_thread()->threadgroups_per_grid[0])})
#define __syncthreads() threadgroup_barrier(mem_flags::mem_threadgroup)
#define __syncwarp() simdgroup_barrier(mem_flags::mem_threadgroup)
#define VECTOR_ALIGNED(pointer, bytes) ((reinterpret_cast<size_t>(pointer) & ((bytes) - 1)) == 0)

struct emu_index {
  int x;
};

struct emu_copy {
  uint to;
  const device uchar* from;
  int bytes;
};

struct emu_copies {
  emu_copy copies[256];
  int ends[64];
  int count, sets;
};

static emu_copies emu_pending[1024];
static threadgroup uchar* emu_shared;

EMU_UNCHECKED inline uint shared_address(threadgroup uchar* p) {
  emu_shared = p;
  emu_copies& own = emu_pending[threadIdx.x];
  own.count = own.sets = 0;
  return 0u;
}

EMU_UNCHECKED inline void emu_push(uint to, const device void* from, int bytes) {
  emu_copies& own = emu_pending[threadIdx.x];
  if (own.count == 256) { __builtin_trap(); }
  own.copies[own.count++] = {to, reinterpret_cast<const device uchar*>(from), bytes};
}

METAL_FUNC void copy_async(uint to, const device void* from) { emu_push(to, from, 16); }

template <int BYTES>
METAL_FUNC void copy_async_cached(uint to, const device void* from) { emu_push(to, from, BYTES); }

EMU_UNCHECKED inline void end_of_copies() {
  emu_copies& own = emu_pending[threadIdx.x];
  if (own.sets == 64) { __builtin_trap(); }
  own.ends[own.sets++] = own.count;
}

EMU_UNCHECKED inline threadgroup uchar* emu_at(uint address) { return emu_shared + address; }

EMU_UNCHECKED inline emu_copy emu_pop(int pending) {
  emu_copies& own = emu_pending[threadIdx.x];
  if (own.sets > pending && own.ends[0] == 0) {
    own.sets--;
    for (int i = 0; i < own.sets; i++) { own.ends[i] = own.ends[i + 1]; }
    return emu_pop(pending);
  }
  if (own.sets <= pending) { return {0u, nullptr, 0}; }
  const emu_copy first = own.copies[0];
  own.count--;
  for (int i = 0; i < own.count; i++) { own.copies[i] = own.copies[i + 1]; }
  for (int i = 0; i < own.sets; i++) { own.ends[i]--; }
  return first;
}

template <int PENDING>
METAL_FUNC void wait_for_copies() {
  for (emu_copy copy = emu_pop(PENDING); copy.bytes > 0; copy = emu_pop(PENDING)) {
    for (int i = 0; i < copy.bytes; i += 4) {
      *reinterpret_cast<threadgroup uint*>(emu_at(copy.to + i)) =
          *reinterpret_cast<const device uint*>(copy.from + i);
    }
  }
}

EMU_UNCHECKED inline int take_number(device int* counter) { return (*counter)++; }
EMU_UNCHECKED inline void announce(device int* counter, int count) { *counter += count; }

// Threadgroups run one after another here, so who has to wait would wait for ever.
EMU_UNCHECKED inline bool emu_is_reached(device int* counter, int count) { return *counter >= count; }
METAL_FUNC void wait_until(device int* counter, int count) {
  if (!emu_is_reached(counter, count)) { announce(counter, counter[1 << 20]); }
}

EMU_UNCHECKED inline int peek(threadgroup int* told) { return *told; }
EMU_UNCHECKED inline void tell(threadgroup int* told, int number) { *told = number; }

template <int THREADS>
METAL_FUNC void team_barrier(int) { __syncthreads(); }

template <typename T>
METAL_FUNC T load_shared(uint address) {
  T made;
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); i++) {
    made.v[i] = *reinterpret_cast<threadgroup uint*>(emu_at(address + 4 * i));
  }
  return made;
}

METAL_FUNC void store_shared(uint address, const thread Pack<uint, 4>& value) {
  for (int i = 0; i < 4; i++) {
    *reinterpret_cast<threadgroup uint*>(emu_at(address + 4 * i)) = value.v[i];
  }
}

template <typename X>
METAL_FUNC uint emu_word(X low, X high) {
  return static_cast<uint>(as_type<ushort>(low)) | (static_cast<uint>(as_type<ushort>(high)) << 16);
}

template <typename X>
EMU_UNCHECKED inline float emu_half(uint word, int high) {
  return static_cast<float>(as_type<X>(static_cast<ushort>(word >> (16 * high))));
}

template <typename X>
EMU_UNCHECKED inline void emu_multiply(thread float (&sums)[4], const thread uint (&a)[4], uint b0,
                                       uint b1) {
  const uint words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const emu_posted posted = emu_collective(words, sizeof words, "mma", 0);
  uint all[32][6];
  for (int l = 0; l < 32; l++) { __builtin_memcpy(all[l], posted.values[l], sizeof words); }
  const int lane = static_cast<int>(posted.lane);
  for (int i = 0; i < 4; i++) {
    for (int k = 0; k < 16; k++) {
      const float left = emu_half<X>(all[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + i / 2], k % 2);
      const float right = emu_half<X>(all[(2 * (lane % 4) + i % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
      sums[i] = metal::fma(left, right, sums[i]);
    }
  }
}

template <typename X>
struct Pair;

template <>
struct Pair<bfloat> {
  static constexpr constant uint ones = 0x3f803f80u;

  template <int I>
  static METAL_FUNC uint codes(uint word) {
    const uint moved = I == 0 ? word << 3 : word >> (I == 0 ? 0 : 4 * I - 3);
    return (moved & 0x00780078u) | 0x41804180u;
  }

  static METAL_FUNC uint pack(float low, float high) {
    return emu_word(static_cast<bfloat>(low), static_cast<bfloat>(high));
  }

  static METAL_FUNC void multiply(thread float (&sums)[4], const thread uint (&a)[4], uint b0,
                                  uint b1) {
    emu_multiply<bfloat>(sums, a, b0, b1);
  }
};

template <>
struct Pair<half> {
  static constexpr constant uint ones = 0x3c003c00u;

  template <int I>
  static METAL_FUNC uint codes(uint word) {
    const uint moved = I < 2 ? word << (I < 2 ? 6 - 4 * I : 0) : word >> (I < 2 ? 0 : 4 * I - 6);
    return (moved & 0x03c003c0u) | 0x4c004c00u;
  }

  static METAL_FUNC uint pack(float low, float high) {
    return emu_word(static_cast<half>(low), static_cast<half>(high));
  }

  static METAL_FUNC void multiply(thread float (&sums)[4], const thread uint (&a)[4], uint b0,
                                  uint b1) {
    emu_multiply<half>(sums, a, b0, b1);
  }
};

template <typename X>
METAL_FUNC Pack<uint, 4> load_eight(const device X* p) {
  return {{emu_word(p[0], p[1]), emu_word(p[2], p[3]), emu_word(p[4], p[5]), emu_word(p[6], p[7])}};
}

METAL_FUNC uint __byte_perm(uint a, uint b, uint selector) {
  uint made = 0u;
  for (uint i = 0u; i < 4u; i++) {
    const uint from = (selector >> (4u * i)) & 7u;
    made |= (((from < 4u ? a : b) >> (8u * (from & 3u))) & 255u) << (8u * i);
  }
  return made;
}
