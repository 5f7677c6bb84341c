// Attention over a cache, as the host target calls it.
//
// All memory is float32 and row-major. A call works on `count` rows of one sequence, the newest
// of the cache: row i stands at position end - count + i.
#pragma once
#include <algorithm>
#include <cstdint>

#define TS_EXPORT __attribute__((visibility("default")))

namespace ts {

// One layer's keys and values [kv_heads, capacity, head_dim], in two parts. Position p is sealed
// row p % sealed_capacity below `boundary`, and tail row p - boundary from there on.
struct CacheRows {
  const float* sealed_k;
  const float* sealed_v;
  const float* tail_k;
  const float* tail_v;
  int64_t sealed_capacity;
  int64_t tail_capacity;
  int64_t boundary;
  int64_t end;
};

struct AttendPlan {
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;  // keys a query sees, its own included; 0 for all
  int32_t threads;
  float scale;
  const float* sinks;  // [q_heads], or null

  int group() const { return q_heads / kv_heads; }
  int64_t first_seen(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

struct NormPlan {
  const float* weight;  // [head_dim], or null
  float eps;
  int32_t enabled;
};

struct RotatePlan {
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t pairs;        // pairs of dimensions that rotate
  int32_t traditional;  // a pair is (2i, 2i + 1) instead of (i, i + pairs)
  int32_t threads;
  NormPlan q, k, v;
};

// A call's own arguments, packed by the binding as 64-bit words in this order.
struct RotateCall {
  const float* q;  // [count, q_heads * head_dim]
  const float* k;  // [count, kv_heads * head_dim], or null with v
  const float* v;
  const float* cos;  // [count, pairs]
  const float* sin;
  float* q_out;
  float* k_rows;  // [kv_heads, capacity, head_dim], written from `row` on
  float* v_rows;
  int64_t capacity;
  int64_t row;
  int64_t count;
};

struct AttendCall {
  const float* q;  // [count, q_heads * head_dim]
  float* out;      // the same
  CacheRows rows;
  int64_t count;
};

// A call whose queries each name the rows that they read.
struct ChosenCall {
  const float* q;  // [count, q_heads * head_dim]
  float* out;      // the same
  CacheRows rows;
  const int32_t* positions;  // [count, most]
  const int64_t* lengths;    // [count], how many of its positions a query reads, from the first on
  int64_t most;
  int64_t count;
};

// Pointers to the rows of positions [begin, end) of one head.
inline void find_rows(const CacheRows& rows, int head, int head_dim, int64_t begin, int64_t end,
                      const float** k, const float** v) {
  int64_t position = begin;
  if (position < rows.boundary) {
    int64_t slot = position % rows.sealed_capacity;
    for (; position < std::min(end, rows.boundary); position++, slot++) {
      if (slot == rows.sealed_capacity) slot = 0;
      const int64_t at = (head * rows.sealed_capacity + slot) * head_dim;
      *k++ = rows.sealed_k + at;
      *v++ = rows.sealed_v + at;
    }
  }
  for (; position < end; position++) {
    const int64_t at = (head * rows.tail_capacity + position - rows.boundary) * head_dim;
    *k++ = rows.tail_k + at;
    *v++ = rows.tail_v + at;
  }
}

// Pointers to the rows that are chosen[begin .. end - 1] of one head.
inline void find_chosen(const CacheRows& rows, const int32_t* chosen, int head, int head_dim,
                        int64_t begin, int64_t end, const float** k, const float** v) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t position = chosen[i];
    const bool sealed = position < rows.boundary;
    const int64_t capacity = sealed ? rows.sealed_capacity : rows.tail_capacity;
    const int64_t slot = sealed ? position % capacity : position - rows.boundary;
    const int64_t at = (head * capacity + slot) * head_dim;
    *k++ = (sealed ? rows.sealed_k : rows.tail_k) + at;
    *v++ = (sealed ? rows.sealed_v : rows.tail_v) + at;
  }
}

}  // namespace ts

extern "C" {

// Norms and rotates the heads of q into q_out, and those of k and v into rows of the cache; v is
// not rotated.
TS_EXPORT void ts_head_norm_rope(const ts::RotatePlan* plan, const ts::RotateCall* call);

// Causal attention. Two bodies that differ in the last bits; within one, a row's result depends on
// nothing but its query and the keys and values it sees.
TS_EXPORT void ts_attend_decode(const ts::AttendPlan* plan, const ts::AttendCall* call);
TS_EXPORT void ts_attend_prefill(const ts::AttendPlan* plan, const ts::AttendCall* call);

// Attention to chosen rows, with the arithmetic of ts_attend_decode over them in their order.
TS_EXPORT void ts_attend_chosen(const ts::AttendPlan* plan, const ts::ChosenCall* call);
}
