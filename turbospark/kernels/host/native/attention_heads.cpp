// Per-head norms, rotary embedding, rows written into the cache.
#include <cmath>

#include "attention.h"
#include "pool.h"
#include "simd.h"

namespace ts {
namespace {

constexpr int64_t FLOATS_WORTH_A_THREAD = 16384;
constexpr int64_t MOST_ROWS = 64;  // of one piece

float inverse_rms(const float* x, int count, float eps) {
  F even{}, odd{};
  int i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const F a = load(x + i), b = load(x + i + LANES);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < count; i += LANES) {
    const F a = load_first(x + i, std::min(LANES, count - i));
    even = fma(a, a, even);
  }
  return 1.0f / std::sqrt(sum(even + odd) / static_cast<float>(count) + eps);
}

void norm_head(const NormPlan& norm, const float* x, float* y, int count) {
  if (!norm.enabled) {
    memcpy(y, x, count * sizeof(float));
    return;
  }
  const F factor = splat(inverse_rms(x, count, norm.eps));
  for (int i = 0; i < count; i += LANES) {
    const int some = std::min(LANES, count - i);
    F value = load_first(x + i, some) * factor;
    if (norm.weight != nullptr) value = value * load_first(norm.weight + i, some);
    store_first(y + i, value, some);
  }
}

void rotate_halves(float* y, const float* cos, const float* sin, int pairs) {
  float* z = y + pairs;
  for (int i = 0; i < pairs; i += LANES) {
    const int some = std::min(LANES, pairs - i);
    const F a = load_first(y + i, some), b = load_first(z + i, some);
    const F c = load_first(cos + i, some), s = load_first(sin + i, some);
    store_first(y + i, a * c - b * s, some);
    store_first(z + i, b * c + a * s, some);
  }
}

void rotate_neighbours(float* y, const float* cos, const float* sin, int pairs) {
  for (int i = 0; i < pairs; i++) {
    const float a = y[2 * i], b = y[2 * i + 1];
    y[2 * i] = a * cos[i] - b * sin[i];
    y[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace
}  // namespace ts

extern "C" void ts_head_norm_rope(const ts::RotatePlan* plan, const ts::RotateCall* call) {
  using namespace ts;
  const RotatePlan& p = *plan;
  const RotateCall& c = *call;
  const int64_t D = p.head_dim, q_heads = p.q_heads, kv_heads = c.k == nullptr ? 0 : p.kv_heads;
  const int64_t heads = q_heads + 2 * kv_heads;
  const bool small = c.count * heads * D < FLOATS_WORTH_A_THREAD;

  auto finish = [&](const NormPlan& norm, const float* from, float* to, int64_t t, bool rotated) {
    norm_head(norm, from, to, p.head_dim);
    if (!rotated) return;
    auto rotate = p.traditional ? rotate_neighbours : rotate_halves;
    rotate(to, c.cos + t * p.pairs, c.sin + t * p.pairs, p.pairs);
  };
  auto finish_row = [&](int64_t t) {
    for (int64_t h = 0; h < q_heads; h++) {
      const int64_t at = (t * q_heads + h) * D;
      finish(p.q, c.q + at, c.q_out + at, t, true);
    }
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t from = (t * kv_heads + h) * D, to = (h * c.capacity + c.row + t) * D;
      finish(p.k, c.k + from, c.k_rows + to, t, true);
      finish(p.v, c.v + from, c.v_rows + to, t, false);
    }
  };
  cooperate(small ? 1 : p.threads, 0, [&](Crew& crew) {
    crew.share(c.count, crew.block(c.count, 1, MOST_ROWS), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) finish_row(t);
    });
  });
}
