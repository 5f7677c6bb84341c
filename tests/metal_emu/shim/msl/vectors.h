// Scalar and vector types, their constructors, as_type.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define EMU_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
EMU_VECTORS(float)
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
EMU_VECTORS(bool)

#define EMU_PACKED_VECTORS(T)                                                      \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
EMU_PACKED_VECTORS(float)
EMU_PACKED_VECTORS(half)
EMU_PACKED_VECTORS(int)
EMU_PACKED_VECTORS(uint)

template <class T>
struct emu_vector {
  typedef T element;
  static constexpr int size = 1;
};
template <class T, int N>
struct emu_vector<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int size = N;
};

template <class T, int N, class A>
EMU_UNCHECKED inline void emu_append(vec<T, N>& to, int& at, A value) {
  if constexpr (emu_vector<A>::size == 1) {
    to[at++] = (T)value;
  } else {
    for (int k = 0; k < emu_vector<A>::size; k++) to[at++] = (T)value[k];
  }
}

// Every vector constructor of MSL: from one scalar, or from scalars and shorter vectors.
template <class T, int N, class... A>
inline vec<T, N> emu_make(A... values) {
  constexpr int given = (0 + ... + emu_vector<A>::size);
  vec<T, N> made{};
  if constexpr (given == 1) {
    for (int i = 0; i < N; i++) made[i] = (T)((values, ...));
  } else if constexpr (given > 1) {
    static_assert(given == N, "wrong number of elements in a vector constructor");
    int at = 0;
    (emu_append<T, N>(made, at, values), ...);
  }
  return made;
}

template <class To, class From>
EMU_UNCHECKED inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, value);
}
}  // namespace metal

// clang has no call syntax for ext_vector_type, so `float4(...)` is a macro.
#define float2(...) emu_make<float, 2>(__VA_ARGS__)
#define float3(...) emu_make<float, 3>(__VA_ARGS__)
#define float4(...) emu_make<float, 4>(__VA_ARGS__)
#define half2(...) emu_make<half, 2>(__VA_ARGS__)
#define half3(...) emu_make<half, 3>(__VA_ARGS__)
#define half4(...) emu_make<half, 4>(__VA_ARGS__)
#define bfloat2(...) emu_make<bfloat, 2>(__VA_ARGS__)
#define bfloat4(...) emu_make<bfloat, 4>(__VA_ARGS__)
#define short2(...) emu_make<short, 2>(__VA_ARGS__)
#define short3(...) emu_make<short, 3>(__VA_ARGS__)
#define short4(...) emu_make<short, 4>(__VA_ARGS__)
#define ushort2(...) emu_make<ushort, 2>(__VA_ARGS__)
#define ushort4(...) emu_make<ushort, 4>(__VA_ARGS__)
#define uchar2(...) emu_make<uchar, 2>(__VA_ARGS__)
#define uchar4(...) emu_make<uchar, 4>(__VA_ARGS__)
#define int2(...) emu_make<int, 2>(__VA_ARGS__)
#define int3(...) emu_make<int, 3>(__VA_ARGS__)
#define int4(...) emu_make<int, 4>(__VA_ARGS__)
#define uint2(...) emu_make<uint, 2>(__VA_ARGS__)
#define uint3(...) emu_make<uint, 3>(__VA_ARGS__)
#define uint4(...) emu_make<uint, 4>(__VA_ARGS__)
#define long2(...) emu_make<long, 2>(__VA_ARGS__)
#define ulong2(...) emu_make<ulong, 2>(__VA_ARGS__)
#define ulong3(...) emu_make<ulong, 3>(__VA_ARGS__)
