// Relaxed atomics: one OS thread runs everything, so plain reads and writes do.
#pragma once
#include "msl/math.h"

#ifdef EMU_CHECK
#define EMU_TOUCH(p, write)
#else
#define EMU_TOUCH(p, write) emu_atomic_access(&p->emu_value, sizeof p->emu_value, write)
#endif

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T emu_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

template <class P>
EMU_UNCHECKED inline auto atomic_load_explicit(P p, memory_order) {
  EMU_TOUCH(p, 0);
  auto value = p->emu_value;
  return value;
}
template <class P, class T>
EMU_UNCHECKED inline void atomic_store_explicit(P p, T value, memory_order) {
  EMU_TOUCH(p, 1);
  p->emu_value = value;
}

#define EMU_ATOMIC(name, expression)                                           \
  template <class P, class T>                                                  \
  EMU_UNCHECKED inline auto atomic_##name##_explicit(P p, T v, memory_order) { \
    EMU_TOUCH(p, 1);                                                           \
    auto a = p->emu_value;                                                     \
    decltype(a) b = v;                                                         \
    p->emu_value = (decltype(a))(expression);                                  \
    return a;                                                                  \
  }
EMU_ATOMIC(exchange, b)
EMU_ATOMIC(fetch_add, a + b)
EMU_ATOMIC(fetch_sub, a - b)
EMU_ATOMIC(fetch_max, max(a, b))
EMU_ATOMIC(fetch_min, min(a, b))
EMU_ATOMIC(fetch_and, a& b)
EMU_ATOMIC(fetch_or, a | b)
EMU_ATOMIC(fetch_xor, a ^ b)

template <class P, class E, class T>
EMU_UNCHECKED inline bool atomic_compare_exchange_weak_explicit(P p, E expected, T value,
                                                                memory_order, memory_order) {
  EMU_TOUCH(p, 1);
  if (p->emu_value == *expected) {
    p->emu_value = value;
    return true;
  }
  *expected = p->emu_value;
  return false;
}
}  // namespace metal
