#pragma once
// MLX's complex_t qualifies its methods with address spaces, which clang's C++ has no grammar for.
// This is enough of it for MLX's utils.h.
#include <metal_stdlib>

template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;
  complex_t() = default;
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
};
typedef complex_t<float> complex64_t;

inline complex64_t operator+(complex64_t a, complex64_t b) {
  return {a.real + b.real, a.imag + b.imag};
}
inline complex64_t operator-(complex64_t a, complex64_t b) {
  return {a.real - b.real, a.imag - b.imag};
}
inline complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
