// Operations on vectors that reading keys and values needs.
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

}  // namespace ts
