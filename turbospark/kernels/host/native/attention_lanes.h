// The innermost loops of attention of a few query rows: some keys, or values, beside some queries.
#pragma once
#include "simd.h"

namespace ts {

// Keeps a value that several operations share from being loaded again for each.
inline F in_register(F value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

constexpr int KEYS = 4;  // rows of keys or values that are read side by side
#if defined(TS_AVX512) || defined(TS_NEON)
constexpr int QUERIES = 4;  // query rows that share a load; as many as registers allow
#else
constexpr int QUERIES = 2;
#endif

// The products of N queries with KEYS keys of D floats, scores[n * stride + u]. Asks the memory
// for the rows of `fetch` on the way.
template <int N>
inline void score_keys(const float* const* q, const float* const* k, const float* const* fetch,
                       int D, float* scores, int64_t stride) {
  const int whole = D / LANES * LANES;
  F sums[N][KEYS] = {};
  for (int i = 0; i < whole; i += LANES) {
    F key[KEYS];
    for (int u = 0; u < KEYS; u++) {
      prefetch(fetch[u] + i);
      key[u] = in_register(load(k[u] + i));
    }
    for (int n = 0; n < N; n++) {
      const F query = in_register(load(q[n] + i));
      for (int u = 0; u < KEYS; u++) sums[n][u] = fma(query, key[u], sums[n][u]);
    }
  }
  if (whole < D) {
    for (int n = 0; n < N; n++) {
      const F query = load_first(q[n] + whole, D - whole);
      for (int u = 0; u < KEYS; u++)
        sums[n][u] = fma(query, load_first(k[u] + whole, D - whole), sums[n][u]);
    }
  }
  for (int n = 0; n < N; n++)
    sum_four(sums[n][0], sums[n][1], sums[n][2], sums[n][3], scores + n * stride);
}

// out[n * out_stride ...] += weights[n * weight_stride + u] * v[u], D floats each, u in order;
// writes whole vectors. Asks the memory for the rows of `fetch` on the way.
template <int N, int ROWS>
inline void add_rows(const float* const* v, const float* const* fetch, const float* weights,
                     int64_t weight_stride, int D, float* out, int64_t out_stride) {
  const int whole = D / LANES * LANES;
  F weight[N][ROWS];
  for (int n = 0; n < N; n++)
    for (int u = 0; u < ROWS; u++) weight[n][u] = splat(weights[n * weight_stride + u]);
  auto add = [&](int i, const F (&value)[ROWS]) {
    for (int n = 0; n < N; n++) {
      F sum = load(out + n * out_stride + i);
      for (int u = 0; u < ROWS; u++) sum = fma(weight[n][u], value[u], sum);
      store(out + n * out_stride + i, sum);
    }
  };
  F value[ROWS];
  for (int i = 0; i < whole; i += LANES) {
    for (int u = 0; u < ROWS; u++) {
      prefetch(fetch[u] + i);
      value[u] = in_register(load(v[u] + i));
    }
    add(i, value);
  }
  if (whole < D) {
    for (int u = 0; u < ROWS; u++) value[u] = load_first(v[u] + whole, D - whole);
    add(whole, value);
  }
}

}  // namespace ts
