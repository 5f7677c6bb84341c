// Prelude for CUDA: the Metal names that bodies use. `device` and `constant` cannot be macros,
// since CUDA's own __device__ and __constant__ expand through them.
#define FUNC __device__ __forceinline__
#define GLOBAL
#define SHARED __shared__
#define WIDE_SHARED __align__(16) __shared__
#define SHARED_PTR
#define UNROLL _Pragma("unroll")
#define FOR_EACH_LANE 0xffffffffu

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;

// What a thread can see. Threadgroups are always whole here.
#define thread_position_in_threadgroup (uint3{threadIdx.x, threadIdx.y, threadIdx.z})
#define threadgroup_position_in_grid (uint3{blockIdx.x, blockIdx.y, blockIdx.z})
#define threadgroups_per_grid (uint3{gridDim.x, gridDim.y, gridDim.z})
#define thread_position_in_grid              \
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
         blockIdx.z * blockDim.z + threadIdx.z})
#define thread_index_in_threadgroup \
  (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)

// Barriers and SIMD-group functions; all 32 lanes take part.
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename T>
FUNC T simd_shuffle_xor(T value, uint mask) {
  return __shfl_xor_sync(FOR_EACH_LANE, value, mask);
}

template <typename T>
FUNC T simd_broadcast(T value, uint lane) {
  return __shfl_sync(FOR_EACH_LANE, value, lane);
}

// Neighbours first: 1, 2, 4, 8, 16.
template <typename T>
FUNC T simd_sum(T value) {
  for (int mask = 1; mask < 32; mask *= 2) {
    value += __shfl_xor_sync(FOR_EACH_LANE, value, mask);
  }
  return value;
}

template <typename T>
FUNC T simd_max(T value) {
  for (int mask = 1; mask < 32; mask *= 2) {
    T other = __shfl_xor_sync(FOR_EACH_LANE, value, mask);
    value = other > value ? other : value;
  }
  return value;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
FUNC int simd_max(int value) { return __reduce_max_sync(FOR_EACH_LANE, value); }
#endif

namespace metal {
FUNC float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FUNC float max(float a, float b) { return fmaxf(a, b); }
FUNC float min(float a, float b) { return fminf(a, b); }
FUNC int max(int a, int b) { return a > b ? a : b; }
FUNC int min(int a, int b) { return a < b ? a : b; }
namespace precise {
FUNC float exp(float x) { return expf(x); }
FUNC float log(float x) { return logf(x); }
FUNC float cos(float x) { return cosf(x); }
FUNC float sin(float x) { return sinf(x); }
FUNC float tanh(float x) { return tanhf(x); }
FUNC float rsqrt(float x) { return 1.0f / sqrtf(x); }
}  // namespace precise
namespace fast {
FUNC float exp(float x) { return __expf(x); }
}  // namespace fast
}  // namespace metal

// value as a float, for value < 65536: the code sits in the mantissa of 2^23, which is faster
// than an integer conversion here.
FUNC float small_to_float(uint value) {
  return __uint_as_float(value | 0x4b000000u) - 8388608.0f;
}

// Whether a pointer may be read as a vector of so many bytes.
#define VECTOR_ALIGNED(pointer, bytes) ((reinterpret_cast<size_t>(pointer) & ((bytes)-1)) == 0)

// The bits of a float as a number, and back.
FUNC int float_bits(float value) { return __float_as_int(value); }
FUNC float float_of(int bits) { return __int_as_float(bits); }

// (a & mask) | rest, which the compiler makes two instructions of.
FUNC uint masked(uint a, uint mask, uint rest) {
  uint made;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(made) : "r"(a), "r"(mask), "r"(rest));
  return made;
}

// Dot product of eight 4-bit codes in a word with values that `int4_ready` gave. Codes stay where
// they are, in the mantissa of 2^23, those of the last three 12 bits lower.
FUNC float int4_ready(float value, int place) {
  return value * (1.0f / static_cast<float>(1 << (place < 5 ? 4 * place : 4 * place - 12)));
}
FUNC float int4_value(uint word, int place) {
  const uint moved = place < 5 ? word : word >> 12;
  const uint mask = 15u << (place < 5 ? 4 * place : 4 * place - 12);
  return __uint_as_float(masked(moved, mask, 0x4b000000u)) - 8388608.0f;
}

// Dot product of eight 4-bit floats (sign, two bits of exponent, one of mantissa) in a word, times
// 1 / FP4_UNIT. Such a number's bits, put where a half has them, are its value times 2^-14; signs
// and the rest of four codes are parted at once, and two of them are the halves of a word.
#define FP4_UNIT 16384.0f
FUNC float fp4_ready(float value) { return value; }
FUNC float fp4_value(uint word, int place) {
  const uint signs = place % 2 == 0 ? 0x08080808u : 0x80808080u;
  uint parted;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;"
      : "=r"(parted) : "r"(word), "r"(signs), "r"(__funnelshift_r(word, word, 3)));
  const uint halves = __funnelshift_l(parted, parted, 12 - 4 * (place % 4)) & 0x8e008e00u;
  float value;
  if (place < 4) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
        : "=f"(value) : "r"(halves));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}"
        : "=f"(value) : "r"(halves));
  }
  return value;
}
