// Math on scalars and vectors. half and bfloat compute in float and round once; fast:: gives the
// same results as precise::, where a GPU is less exact.
#pragma once
#include "msl/traits.h"

namespace metal {
#define EMU_UNARY(name, expression)                   \
  inline float name(float x) { return expression; }   \
  inline half name(half v) {                          \
    float x = (float)v;                               \
    return (half)(expression);                        \
  }                                                   \
  inline bfloat name(bfloat v) {                      \
    float x = (float)v;                               \
    return (bfloat)(expression);                      \
  }                                                   \
  template <class T, int N>                           \
  EMU_UNCHECKED inline vec<T, N> name(vec<T, N> v) {  \
    for (int i = 0; i < N; i++) v[i] = name((T)v[i]); \
    return v;                                         \
  }

#define EMU_BINARY(name, expression)                              \
  inline float name(float x, float y) { return expression; }      \
  inline half name(half a, half b) {                              \
    float x = (float)a, y = (float)b;                             \
    return (half)(expression);                                    \
  }                                                               \
  inline bfloat name(bfloat a, bfloat b) {                        \
    float x = (float)a, y = (float)b;                             \
    return (bfloat)(expression);                                  \
  }                                                               \
  template <class T, int N>                                       \
  EMU_UNCHECKED inline vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a[i] = name((T)a[i], (T)b[i]);    \
    return a;                                                     \
  }

#define EMU_MATH                                  \
  EMU_UNARY(exp, __builtin_expf(x))               \
  EMU_UNARY(exp2, __builtin_exp2f(x))             \
  EMU_UNARY(exp10, __builtin_powf(10.0f, x))      \
  EMU_UNARY(log, __builtin_logf(x))               \
  EMU_UNARY(log2, __builtin_log2f(x))             \
  EMU_UNARY(log10, __builtin_log10f(x))           \
  EMU_UNARY(sqrt, __builtin_sqrtf(x))             \
  EMU_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))     \
  EMU_UNARY(sin, __builtin_sinf(x))               \
  EMU_UNARY(cos, __builtin_cosf(x))               \
  EMU_UNARY(tan, __builtin_tanf(x))               \
  EMU_UNARY(asin, __builtin_asinf(x))             \
  EMU_UNARY(acos, __builtin_acosf(x))             \
  EMU_UNARY(atan, __builtin_atanf(x))             \
  EMU_UNARY(sinh, __builtin_sinhf(x))             \
  EMU_UNARY(cosh, __builtin_coshf(x))             \
  EMU_UNARY(tanh, __builtin_tanhf(x))             \
  EMU_UNARY(asinh, __builtin_asinhf(x))           \
  EMU_UNARY(acosh, __builtin_acoshf(x))           \
  EMU_UNARY(atanh, __builtin_atanhf(x))           \
  EMU_UNARY(floor, __builtin_floorf(x))           \
  EMU_UNARY(ceil, __builtin_ceilf(x))             \
  EMU_UNARY(trunc, __builtin_truncf(x))           \
  EMU_UNARY(round, __builtin_roundf(x))           \
  EMU_UNARY(rint, __builtin_rintf(x))             \
  EMU_UNARY(fabs, __builtin_fabsf(x))             \
  EMU_BINARY(pow, __builtin_powf(x, y))           \
  EMU_BINARY(powr, __builtin_powf(x, y))          \
  EMU_BINARY(fmod, __builtin_fmodf(x, y))         \
  EMU_BINARY(atan2, __builtin_atan2f(x, y))       \
  EMU_BINARY(fmin, __builtin_fminf(x, y))         \
  EMU_BINARY(fmax, __builtin_fmaxf(x, y))         \
  EMU_BINARY(copysign, __builtin_copysignf(x, y)) \
  EMU_BINARY(fdim, __builtin_fdimf(x, y))         \
  EMU_BINARY(divide, x / y)

EMU_MATH
namespace fast {
EMU_MATH
}
namespace precise {
EMU_MATH
}
EMU_UNARY(abs, __builtin_fabsf(x))
EMU_UNARY(fract, x - __builtin_floorf(x))
EMU_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
EMU_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))

inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline short abs(short x) { return x < 0 ? -x : x; }
inline uint abs(uint x) { return x; }

#define EMU_CLASSIFY(name, builtin)                      \
  inline bool name(float x) { return builtin(x); }       \
  inline bool name(half x) { return builtin((float)x); } \
  inline bool name(bfloat x) { return builtin((float)x); }
EMU_CLASSIFY(isnan, __builtin_isnan)
EMU_CLASSIFY(isinf, __builtin_isinf)
EMU_CLASSIFY(isfinite, __builtin_isfinite)

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) {
  return (half)__builtin_fma((emu_double)a, (emu_double)b, (emu_double)c);
}
template <class T, int N>
EMU_UNCHECKED inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma((T)a[i], (T)b[i], (T)c[i]);
  return a;
}

#define EMU_INTEGER_BOUNDS(T)                      \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
EMU_INTEGER_BOUNDS(int)
EMU_INTEGER_BOUNDS(uint)
EMU_INTEGER_BOUNDS(long)
EMU_INTEGER_BOUNDS(ulong)
EMU_INTEGER_BOUNDS(short)
EMU_INTEGER_BOUNDS(ushort)
EMU_INTEGER_BOUNDS(char)
EMU_INTEGER_BOUNDS(uchar)

#define EMU_FLOAT_BOUNDS(T)                                                 \
  inline T min(T a, T b) { return (T)__builtin_fminf((float)a, (float)b); } \
  inline T max(T a, T b) { return (T)__builtin_fmaxf((float)a, (float)b); } \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
EMU_FLOAT_BOUNDS(float)
EMU_FLOAT_BOUNDS(half)
EMU_FLOAT_BOUNDS(bfloat)
template <class T, int N>
EMU_UNCHECKED inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = min((T)a[i], (T)b[i]);
  return a;
}
template <class T, int N>
EMU_UNCHECKED inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = max((T)a[i], (T)b[i]);
  return a;
}

template <class T>
inline T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <class T, int N>
EMU_UNCHECKED inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
inline T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N, class C>
EMU_UNCHECKED inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  for (int i = 0; i < N; i++)
    if (c[i]) a[i] = b[i];
  return a;
}
template <class C, int N>
EMU_UNCHECKED inline bool any(vec<C, N> c) {
  for (int i = 0; i < N; i++)
    if (c[i]) return true;
  return false;
}
template <class C, int N>
EMU_UNCHECKED inline bool all(vec<C, N> c) {
  for (int i = 0; i < N; i++)
    if (!c[i]) return false;
  return true;
}

inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
inline uint mulhi(uint a, uint b) { return ((ulong)a * b) >> 32; }
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits ? (x >> offset) & (~0u >> (32 - bits)) : 0;
}
inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
inline uint rotate(uint x, uint n) { return n & 31 ? (x << (n & 31)) | (x >> (32 - (n & 31))) : x; }
inline uint absdiff(uint a, uint b) { return a > b ? a - b : b - a; }
}  // namespace metal
