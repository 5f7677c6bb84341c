// simdgroup_matrix 8x8. Lane l holds (row, column) and (row, column + 1): the layout that public
// kernels rely on.
#pragma once
#include "msl/simd.h"

namespace metal {
struct emu_place {
  uint row, column;
};
inline emu_place emu_place_of(uint lane) {
  uint quad = lane / 4;
  return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
}
inline emu_place emu_my_place() {
  return emu_place_of(emu_current_thread()->thread_index_in_simdgroup);
}

template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "only 8x8");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    auto p = emu_my_place();
    elements[0] = p.row == p.column ? diagonal : T(0);
    elements[1] = p.row == p.column + 1 ? diagonal : T(0);
  }
  storage_type& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements = value;
  return m;
}

inline ulong emu_element(emu_place p, uint k, ulong stride, vec<ulong, 2> origin, bool transpose) {
  return transpose ? (origin.y + p.column + k) * stride + origin.x + p.row
                   : (origin.y + p.row) * stride + origin.x + p.column + k;
}

template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, P source, ulong stride = 8,
                           vec<ulong, 2> origin = vec<ulong, 2>{0, 0}, bool transpose = false,
                           EMU_LINE) {
  emu_simdgroup_barrier("simdgroup_load", line);
  auto p = emu_my_place();
  T values[2];
  for (uint k = 0; k < 2; k++) values[k] = source[emu_element(p, k, stride, origin, transpose)];
  m.elements = vec<T, 2>{values[0], values[1]};
}

template <class T, class P>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P target, ulong stride = 8,
                            vec<ulong, 2> origin = vec<ulong, 2>{0, 0}, bool transpose = false,
                            EMU_LINE) {
  emu_simdgroup_barrier("simdgroup_store", line);
  auto p = emu_my_place();
  for (uint k = 0; k < 2; k++) target[emu_element(p, k, stride, origin, transpose)] = m.elements[k];
}

template <class D, class A, class B, class C>
EMU_UNCHECKED inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                        simdgroup_matrix<A, 8, 8> a,
                                                        simdgroup_matrix<B, 8, 8> b,
                                                        simdgroup_matrix<C, 8, 8> c, EMU_LINE) {
  struct operands {
    vec<A, 2> a;
    vec<B, 2> b;
  } mine{a.elements, b.elements};
  auto lanes = emu_post(mine, "simdgroup_multiply_accumulate", line);
  float left[8][8], right[8][8];
  for (uint l = 0; l < 32; l++) {
    auto p = emu_place_of(l);
    operands theirs = lanes[l];
    for (int k = 0; k < 2; k++) {
      left[p.row][p.column + k] = (float)theirs.a[k];
      right[p.row][p.column + k] = (float)theirs.b[k];
    }
  }
  auto p = emu_place_of(lanes.me());
  for (uint k = 0; k < 2; k++) {
    float sum = (float)c.elements[k];
    for (int i = 0; i < 8; i++) sum += left[p.row][i] * right[i][p.column + k];
    d.elements[k] = (D)sum;
  }
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                               simdgroup_matrix<B, 8, 8> b, EMU_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}
}  // namespace metal
