// Several matrices in one launch: arrays NAME0, NAME1, ... of PARTS parts, one after the other, or
// with PAIR two matrices that a column takes both of. PARTS and PAIR precede this text.
#if PARTS == 1
#define PART(name, part) name##0
#define VALUE(name, part, at) static_cast<float>(name##0[at])
#define UNITS_OF_PARTS(size) UNITS(N0, size)
#elif PARTS == 2
#define PART(name, part) ((part) == 0 ? name##0 : name##1)
#define VALUE(name, part, at) \
  ((part) == 0 ? static_cast<float>(name##0[at]) : static_cast<float>(name##1[at]))
#define UNITS_OF_PARTS(size) (UNITS(N0, size) + UNITS(N1, size))
#elif PARTS == 3
#define PART(name, part) ((part) == 0 ? name##0 : (part) == 1 ? name##1 : name##2)
#define VALUE(name, part, at)                                                       \
  ((part) == 0 ? static_cast<float>(name##0[at])                                    \
               : (part) == 1 ? static_cast<float>(name##1[at]) : static_cast<float>(name##2[at]))
#define UNITS_OF_PARTS(size) (UNITS(N0, size) + UNITS(N1, size) + UNITS(N2, size))
#else
#define PART(name, part) \
  ((part) == 0 ? name##0 : (part) == 1 ? name##1 : (part) == 2 ? name##2 : name##3)
#define VALUE(name, part, at)                                                       \
  ((part) == 0 ? static_cast<float>(name##0[at])                                    \
               : (part) == 1 ? static_cast<float>(name##1[at])                      \
                             : (part) == 2 ? static_cast<float>(name##2[at])        \
                                           : static_cast<float>(name##3[at]))
#define UNITS_OF_PARTS(size) \
  (UNITS(N0, size) + UNITS(N1, size) + UNITS(N2, size) + UNITS(N3, size))
#endif
#define UNITS(count, size) (((count) + (size) - 1) / (size))

// The array of a matrix, of a pair or of a part; an element of it, which may lie in any space.
#ifdef PAIR
#define MATRICES 2
#define MATRIX(name, part, matrix) ((matrix) == 0 ? name##0 : name##1)
#define MATRIX_VALUE(name, part, matrix, at) \
  ((matrix) == 0 ? static_cast<float>(name##0[at]) : static_cast<float>(name##1[at]))
#else
#define MATRICES 1
#define MATRIX(name, part, matrix) PART(name, part)
#define MATRIX_VALUE(name, part, matrix, at) VALUE(name, part, at)
#endif

// Half of what a normal distribution leaves beyond |x|: erfc(|x| / sqrt(2)) / 2 within 2e-7, and
// within 2e-6 of itself. With z = |x| / sqrt(2) and t = 1 / (1 + z / 2), log(erfc(z) / t) + z * z
// is nearly a polynomial of t; this is its least-squares fit at Chebyshev's points.
FUNC float half_erfc(float x) {
  const float z = metal::max(x, -x) * 0.70710678f;
  const float t = 1.0f / metal::fma(0.5f, z, 1.0f);
  float power = metal::fma(t, 0.15775101f, -0.75018156f);
  power = metal::fma(t, power, 1.3186530f);
  power = metal::fma(t, power, -0.90974069f);
  power = metal::fma(t, power, 0.094321430f);
  power = metal::fma(t, power, -0.090255663f);
  power = metal::fma(t, power, 0.065232649f);
  power = metal::fma(t, power, 0.38035414f);
  power = metal::fma(t, power, 0.99934810f);
  power = metal::fma(t, power, -1.2654823f);
  return 0.5f * t * metal::precise::exp(metal::fma(-z, z, power));
}

// Activations of a gate: 1 is silu, 2 gelu in its tanh form, 3 gelu itself.
template <int KIND>
FUNC float activate(float x) {
  if (KIND == 1) { return x / (1.0f + metal::precise::exp(-x)); }
  if (KIND == 3) { return x * (x < 0.0f ? half_erfc(x) : 1.0f - half_erfc(x)); }
  const float inner = 0.7978845608028654f * metal::fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + metal::precise::tanh(inner));
}

// What a sum of K squares makes of a row.
FUNC float inverse_root_mean(float square_sum, int K, float eps) {
  return metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(K)) + eps);
}

FUNC float soft_cap(float x, float cap) { return cap * metal::precise::tanh(x / cap); }
