// The gated delta net: what Python hands over.
#pragma once
#include <cstdint>

#define TS_EXPORT __attribute__((visibility("default")))

namespace ts {

struct DeltaPlan {
  int32_t threads;
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t taps;
  const float* conv;     // [taps, channels]
  const float* rate;     // [value_heads], at which a head forgets; negative
  const float* dt_bias;  // [value_heads]
  const float* norm;     // [value_dim], or null
  float eps;
  int32_t sigmoid_gate;  // z becomes sigmoid(z), else silu(z)

  int64_t keys() const { return (int64_t)key_heads * key_dim; }
  int64_t values() const { return (int64_t)value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
};

struct DeltaCall {
  const float* qkv;    // [count, channels], queries, keys and values before the filter
  const float* z;      // [count, values]
  const float* b;      // [count, value_heads]
  const float* a;      // [count, value_heads]
  const float* tail;   // [taps - 1, channels], the rows before
  const float* state;  // [value_heads, value_dim, key_dim]
  float* next_tail;
  float* next_state;
  float* out;    // [count, values]
  float* k;      // [count, keys], normed; null with the three below where nobody wants them
  float* v;      // [count, values]
  float* decay;  // [count, value_heads]
  float* beta;   // [count, value_heads]
  int64_t count;
};

}  // namespace ts

extern "C" {

// Filter, norms of the heads, delta rule and gated norm of `count` rows. A row's result depends on
// nothing but the rows before it, bit for bit.
TS_EXPORT void ts_delta_net(const ts::DeltaPlan* plan, const ts::DeltaCall* call);

// The state after rows whose k, v, decay and beta are given, bit for bit as above.
TS_EXPORT void ts_delta_fold(const ts::DeltaPlan* plan, const ts::DeltaCall* call);
}
