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

// Activations of a gate: 1 is silu, 2 gelu in its tanh form.
template <int KIND>
FUNC float activate(float x) {
  if (KIND == 1) { return x / (1.0f + metal::precise::exp(-x)); }
  const float inner = 0.7978845608028654f * metal::fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + metal::precise::tanh(inner));
}

// What a sum of K squares makes of a row.
FUNC float inverse_root_mean(float square_sum, int K, float eps) {
  return metal::precise::rsqrt(square_sum * (1.0f / static_cast<float>(K)) + eps);
}

FUNC float soft_cap(float x, float cap) { return cap * metal::precise::tanh(x / cap); }
