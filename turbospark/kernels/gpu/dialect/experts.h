// Helpers of routed experts: 4-bit products of one row each.

// Values divided by the power of two at which a code lies in its half word.
FUNC Floats<8> shifted_of(Floats<8> x) {
  UNROLL for (int i = 0; i < 8; i++) {
    x.v[i] = x.v[i] * (1.0f / static_cast<float>(1 << (4 * (i & 3))));
  }
  return x;
}

FUNC float sum_of(Floats<8> x) {
  return ((x.v[0] + x.v[1]) + (x.v[2] + x.v[3])) + ((x.v[4] + x.v[5]) + (x.v[6] + x.v[7]));
}

// Eight codes times eight shifted values.
FUNC float dot_word(uint word, Floats<8> shifted) {
  const uint low = word & 0xffffu;
  const uint high = word >> 16;
  float dot = 0.0f;
  UNROLL for (int i = 0; i < 4; i++) {
    dot = metal::fma(shifted.v[i], small_to_float(low & (15u << (4 * i))), dot);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    dot = metal::fma(shifted.v[i + 4], small_to_float(high & (15u << (4 * i))), dot);
  }
  return dot;
}

// Activations of a gate: 1 is silu, 2 gelu in its tanh form.
template <int KIND>
FUNC float activated(float x) {
  if (KIND == 1) { return x / (1.0f + metal::precise::exp(-x)); }
  const float inner = 0.7978845608028654f * metal::fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + metal::precise::tanh(inner));
}

FUNC float exponential(float x) { return metal::precise::exp(x); }
