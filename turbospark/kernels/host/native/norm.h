// RMS norms and activations of rows.
#pragma once
#include <cmath>

#include "matmul.h"

namespace ts {

struct Norm {
  const float* weight;  // [columns] or null
  float eps;
};

// to = x / sqrt(mean(x^2) + eps) * weight; `to` may be `x`.
inline void norm_row(const Norm& norm, const float* x, int64_t columns, float* to) {
  F squares[2] = {};
  int64_t k = 0;
  for (; k + 2 * LANES <= columns; k += 2 * LANES) {
    const F a = load(x + k), b = load(x + k + LANES);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  for (; k < columns; k += LANES) {
    const F a = load_first(x + k, (int)smaller_of(LANES, columns - k));
    squares[0] = fma(a, a, squares[0]);
  }
  const float mean = sum(squares[0] + squares[1]) / (float)columns;
  const F factor = splat(1.0f / std::sqrt(mean + norm.eps));
  for (k = 0; k < columns; k += LANES) {
    const int count = (int)smaller_of(LANES, columns - k);
    const F scaled = load_first(x + k, count) * factor;
    store_first(to + k, norm.weight ? scaled * load_first(norm.weight + k, count) : scaled, count);
  }
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU_ERF = 2 };

// x times the normal distribution's share below x: max(x, 0) - |x| times the share beyond |x|,
// by Abramowitz and Stegun 7.1.26, whose share is within 7.5e-8.
inline F gelu_erf(F x) {
  const F size = absolute(x);
  const F t = 1.0f / fma(size, splat(0.3275911f * 0.70710678f), splat(1.0f));
  F share = fma(t, splat(0.5f * 1.061405429f), splat(0.5f * -1.453152027f));
  share = fma(share, t, splat(0.5f * 1.421413741f));
  share = fma(share, t, splat(0.5f * -0.284496736f));
  share = fma(share, t, splat(0.5f * 0.254829592f)) * t * exponential(x * x * -0.5f);
  return larger(x, splat(0.0f)) - size * share;
}

inline F activate(int32_t activation, F x) {
  if (activation == GELU_ERF) return gelu_erf(x);
  F inner = x;
  if (activation == GELU_TANH) {  // 0.5 x (1 + tanh(u)) is x * sigmoid(2 u)
    const float twice = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
    inner = x * fma(x * x, splat(0.044715f * twice), splat(twice));
  }
  return x / (exponential(-inner) + 1.0f);
}

// gate = activation(gate) * up
inline void gate_row(int32_t activation, float* gate, const float* up, int64_t columns) {
  for (int64_t k = 0; k < columns; k += LANES) {
    const int count = (int)smaller_of(LANES, columns - k);
    const F g = activate(activation, load_first(gate + k, count));
    store_first(gate + k, g * load_first(up + k, count), count);
  }
}

}  // namespace ts
