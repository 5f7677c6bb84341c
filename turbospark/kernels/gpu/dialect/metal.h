// Prelude for Metal: the few names that CUDA must spell otherwise. A body is Metal text.
// Contraction is off, so that a sum is what the body says on every target.
#pragma METAL fp contract(off)
#define FUNC METAL_FUNC
#define GLOBAL device           // pointers to buffers
#define SHARED threadgroup      // threadgroup arrays, declared in a body
#define WIDE_SHARED threadgroup // those that CUDA reads as vectors
#define SHARED_PTR threadgroup  // pointers to them
#define UNROLL _Pragma("clang loop unroll(full)")

// value as a float, for value < 65536
FUNC float small_to_float(uint value) { return static_cast<float>(value); }

// The bits of a float as a number, and back.
FUNC int float_bits(float value) { return as_type<int>(value); }
FUNC float float_of(int bits) { return as_type<float>(bits); }

// Dot product of eight 4-bit codes in a word with values that `int4_ready` gave. Codes stay where
// they are in their half word.
FUNC float int4_ready(float value, int place) {
  return value * (1.0f / static_cast<float>(1 << (4 * (place & 3))));
}
FUNC float int4_value(uint word, int place) {
  const uint half_word = place < 4 ? word & 0xffffu : word >> 16;
  return static_cast<float>(half_word & (15u << (4 * (place & 3))));
}

// Dot product of eight 4-bit floats (sign, two bits of exponent, one of mantissa) in a word with
// values that `fp4_ready` gave, times FP4_UNIT. Table: twice the numbers that three bits stand for.
#define FP4_UNIT 1.0f
FUNC float fp4_ready(float value) { return 0.5f * value; }
FUNC float fp4_value(uint word, int place) {
  const uint code = word >> (4 * place);
  const float twice = static_cast<float>((0xc8643210u >> (4u * (code & 7u))) & 15u);
  return (code & 8u) != 0u ? -twice : twice;
}
