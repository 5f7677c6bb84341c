// Barriers and SIMD-group functions. Each posts its value to the runtime and waits for the lanes.
#pragma once
#include "msl/math.h"

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

__attribute__((convergent, noduplicate)) inline void threadgroup_barrier(mem_flags, EMU_LINE) {
  emu_threadgroup_barrier("threadgroup_barrier", line);
}
__attribute__((convergent, noduplicate)) inline void simdgroup_barrier(mem_flags, EMU_LINE) {
  emu_simdgroup_barrier("simdgroup_barrier", line);
}

template <class T>
struct emu_lanes {
  emu_posted posted;
  EMU_UNCHECKED T operator[](uint lane) const {
    T value;
    __builtin_memcpy(&value, posted.values[lane & 31], sizeof(T));
    return value;
  }
  bool on(uint lane) const { return lane < 32 && (posted.active >> lane & 1); }
  uint me() const { return posted.lane; }
};

template <class T>
EMU_UNCHECKED inline emu_lanes<T> emu_post(T value, const char* name, int line) {
  static_assert(sizeof(T) <= 64, "a slot has 64 bytes");
  return {emu_collective(&value, sizeof(T), name, line)};
}

// Neighbours first (1, 2, 4, 8, 16), as a butterfly does it, over the lanes that are on.
template <class T, class F>
EMU_UNCHECKED inline T emu_reduce(const emu_lanes<T>& lanes, uint width, F combine) {
  T value[32];
  bool on[32];
  uint base = lanes.me() / width * width;
  for (uint l = 0; l < width; l++) {
    on[l] = lanes.on(base + l);
    if (on[l]) value[l] = lanes[base + l];
  }
  for (uint step = 1; step < width; step *= 2) {
    for (uint l = 0; l < width; l += 2 * step) {
      uint r = l + step;
      if (on[l] && on[r]) {
        value[l] = combine(value[l], value[r]);
      } else if (on[r]) {
        value[l] = value[r];
        on[l] = true;
      }
    }
  }
  return value[0];
}

#define EMU_REDUCTION(name, expression)                          \
  template <class T>                                             \
  inline T simd_##name(T v, EMU_LINE) {                          \
    return emu_reduce(emu_post(v, "simd_" #name, line), 32,      \
                      [](T a, T b) { return (T)(expression); }); \
  }                                                              \
  template <class T>                                             \
  inline T quad_##name(T v, EMU_LINE) {                          \
    return emu_reduce(emu_post(v, "quad_" #name, line), 4,       \
                      [](T a, T b) { return (T)(expression); }); \
  }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a* b)
EMU_REDUCTION(max, max(a, b))
EMU_REDUCTION(min, min(a, b))
EMU_REDUCTION(and, a& b)
EMU_REDUCTION(or, a | b)
EMU_REDUCTION(xor, a ^ b)

#define EMU_SHUFFLE(name, parameter, source)                            \
  template <class T>                                                    \
  EMU_UNCHECKED inline T simd_##name(T v, ushort parameter, EMU_LINE) { \
    auto lanes = emu_post(v, "simd_" #name, line);                      \
    uint me = lanes.me(), from = source;                                \
    (void)me;                                                           \
    return from < 32 ? lanes[from] : v;                                 \
  }                                                                     \
  template <class T>                                                    \
  EMU_UNCHECKED inline T quad_##name(T v, ushort parameter, EMU_LINE) { \
    auto lanes = emu_post(v, "quad_" #name, line);                      \
    uint base = lanes.me() & ~3u, me = lanes.me() & 3, from = source;   \
    (void)me;                                                           \
    return from < 4 ? lanes[base + from] : v;                           \
  }
EMU_SHUFFLE(shuffle, lane, lane)
EMU_SHUFFLE(broadcast, lane, lane)
EMU_SHUFFLE(shuffle_xor, mask, me ^ mask)
EMU_SHUFFLE(shuffle_down, delta, me + delta)
EMU_SHUFFLE(shuffle_up, delta, me - delta)

template <class T>
EMU_UNCHECKED inline T simd_shuffle_rotate_down(T v, ushort delta, EMU_LINE) {
  auto lanes = emu_post(v, "simd_shuffle_rotate_down", line);
  return lanes[(lanes.me() + delta) & 31];
}
template <class T>
EMU_UNCHECKED inline T simd_shuffle_rotate_up(T v, ushort delta, EMU_LINE) {
  auto lanes = emu_post(v, "simd_shuffle_rotate_up", line);
  return lanes[(lanes.me() - delta) & 31];
}
template <class T>
EMU_UNCHECKED inline T simd_shuffle_and_fill_up(T v, T fill, ushort delta, EMU_LINE) {
  auto lanes = emu_post(v, "simd_shuffle_and_fill_up", line);
  auto fills = emu_post(fill, "simd_shuffle_and_fill_up", line);
  uint me = lanes.me();
  return me >= delta ? lanes[me - delta] : fills[me - delta + 32];
}
template <class T>
EMU_UNCHECKED inline T simd_shuffle_and_fill_down(T v, T fill, ushort delta, EMU_LINE) {
  auto lanes = emu_post(v, "simd_shuffle_and_fill_down", line);
  auto fills = emu_post(fill, "simd_shuffle_and_fill_down", line);
  uint from = lanes.me() + delta;
  return from < 32 ? lanes[from] : fills[from - 32];
}
template <class T>
EMU_UNCHECKED inline T simd_broadcast_first(T v, EMU_LINE) {
  auto lanes = emu_post(v, "simd_broadcast_first", line);
  return lanes[__builtin_ctz(lanes.posted.active)];
}

#define EMU_SCAN(kind, name, initial, end, expression)                \
  template <class T>                                                  \
  EMU_UNCHECKED inline T simd_prefix_##kind##_##name(T v, EMU_LINE) { \
    auto lanes = emu_post(v, "simd_prefix_" #kind "_" #name, line);   \
    T a = initial;                                                    \
    for (uint l = 0; l < end; l++) {                                  \
      if (!lanes.on(l)) continue;                                     \
      T b = lanes[l];                                                 \
      a = (T)(expression);                                            \
    }                                                                 \
    return a;                                                         \
  }
EMU_SCAN(inclusive, sum, T(0), lanes.me() + 1, a + b)
EMU_SCAN(exclusive, sum, T(0), lanes.me(), a + b)
EMU_SCAN(inclusive, product, T(1), lanes.me() + 1, a* b)
EMU_SCAN(exclusive, product, T(1), lanes.me(), a* b)

struct simd_vote {
  ulong votes;
  bool all() const { return (uint)votes == ~0u; }
  bool any() const { return votes != 0; }
  explicit operator ulong() const { return votes; }
};
EMU_UNCHECKED inline ulong emu_ballot(bool p, const char* name, int line, uint& active) {
  auto lanes = emu_post<uint>(p, name, line);
  active = lanes.posted.active;
  ulong votes = 0;
  for (uint l = 0; l < 32; l++)
    if (lanes.on(l) && lanes[l]) votes |= 1ul << l;
  return votes;
}
inline simd_vote simd_ballot(bool p, EMU_LINE) {
  uint active;
  return {emu_ballot(p, "simd_ballot", line, active)};
}
inline bool simd_any(bool p, EMU_LINE) {
  uint active;
  return emu_ballot(p, "simd_any", line, active) != 0;
}
inline bool simd_all(bool p, EMU_LINE) {
  uint active;
  ulong votes = emu_ballot(p, "simd_all", line, active);
  return (uint)votes == active;
}
inline bool simd_is_first(EMU_LINE) {
  auto lanes = emu_post<uint>(0, "simd_is_first", line);
  return lanes.me() == (uint)__builtin_ctz(lanes.posted.active);
}
}  // namespace metal
