// Prelude for Metal: the few names that CUDA must spell otherwise. A body is Metal text.
// Contraction is off, so that a sum is what the body says on every target.
#pragma METAL fp contract(off)
#define FUNC METAL_FUNC
#define GLOBAL device           // pointers to buffers
#define SHARED threadgroup      // threadgroup arrays, declared in a body
#define WIDE_SHARED threadgroup // those that CUDA reads as vectors
#define SHARED_PTR threadgroup  // pointers to them
#define TABLE constant          // tables at program scope
#define UNROLL _Pragma("clang loop unroll(full)")

// value as a float, for value < 65536
FUNC float small_to_float(uint value) { return static_cast<float>(value); }
