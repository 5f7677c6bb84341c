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

// Dot product of eight 4-bit floats (sign, two bits of exponent, one of mantissa) in a word with
// values that `fp4_ready` gave, times FP4_UNIT. Such a number's bits, put where a float has them,
// are its value times 2^-126; half of that factor is taken off before, the other half after.
#define FP4_UNIT 9.2233720368547758e18f
FUNC float fp4_ready(float value) { return value * FP4_UNIT; }
FUNC float fp4_value(uint word, int place) {
  const uint bits = place < 6 ? word << (22 - 4 * place) : word >> (4 * place - 22);
  return __uint_as_float(((word << (28 - 4 * place)) & 0x80000000u) | (bits & 0x01c00000u));
}
