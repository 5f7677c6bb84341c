// y[M, C] = (h + norm(norm_a(a) + norm_b(b))) * factor of sums[M, 2, C], a row's a and b one behind
// the other. A threadgroup of THREADS a row, PARTS times eight numbers a thread, all of which are
// asked for before the first sum. numbers: eps of a, of b and of both together.
SHARED float partial[3 * THREADS / 32];
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int row = static_cast<int>(threadgroup_position_in_grid.x);
const int member = thread_index / 32;
Floats<8> a[PARTS];
Floats<8> b[PARTS];
Floats<8> base[PARTS];
Floats<8> a_factor[PARTS];
Floats<8> b_factor[PARTS];
Floats<8> both_factor[PARTS];
UNROLL for (int part = 0; part < PARTS; part++) {
  const int c = metal::min((part * THREADS + thread_index) * 8, C - 8);
  a[part] = floats_of(load_pack<8>(sums + row * 2 * C + c));
  b[part] = floats_of(load_pack<8>(sums + (row * 2 + 1) * C + c));
  base[part] = floats_of(load_pack<8>(h + row * C + c));
  a_factor[part] = floats_of(load_pack<8>(a_weight + c));
  b_factor[part] = floats_of(load_pack<8>(b_weight + c));
  both_factor[part] = floats_of(load_pack<8>(weight + c));
}
const float a_eps = numbers[0];
const float b_eps = numbers[1];
const float eps = numbers[2];
const float whole = factor[0];
float a_squares = none_when_asked();
float b_squares = a_squares;
UNROLL for (int part = 0; part < PARTS; part++) {
  const bool is_there = (part * THREADS + thread_index) * 8 < C;
  UNROLL for (int i = 0; i < 8; i++) {
    a[part].v[i] = is_there ? a[part].v[i] : 0.0f;
    b[part].v[i] = is_there ? b[part].v[i] : 0.0f;
    a_squares = metal::fma(a[part].v[i], a[part].v[i], a_squares);
    b_squares = metal::fma(b[part].v[i], b[part].v[i], b_squares);
  }
}
a_squares = simd_sum(a_squares);
b_squares = simd_sum(b_squares);
if (thread_index_in_simdgroup == 0) {
  partial[member] = a_squares;
  partial[THREADS / 32 + member] = b_squares;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
a_squares = 0.0f;
b_squares = 0.0f;
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  a_squares += partial[group];
  b_squares += partial[THREADS / 32 + group];
}
const float each = 1.0f / static_cast<float>(C);
const float a_scale = metal::precise::rsqrt(metal::fma(a_squares, each, a_eps));
const float b_scale = metal::precise::rsqrt(metal::fma(b_squares, each, b_eps));
float squares = 0.0f;
UNROLL for (int part = 0; part < PARTS; part++) {
  UNROLL for (int i = 0; i < 8; i++) {
    const float right = b[part].v[i] * b_scale * b_factor[part].v[i];
    a[part].v[i] = metal::fma(a[part].v[i] * a_scale, a_factor[part].v[i], right);
    squares = metal::fma(a[part].v[i], a[part].v[i], squares);
  }
}
squares = simd_sum(squares);
if (thread_index_in_simdgroup == 0) { partial[2 * THREADS / 32 + member] = squares; }
threadgroup_barrier(mem_flags::mem_threadgroup);
squares = 0.0f;
UNROLL for (int group = 0; group < THREADS / 32; group++) {
  squares += partial[2 * THREADS / 32 + group];
}
const float scale = metal::precise::rsqrt(metal::fma(squares, each, eps));
UNROLL for (int part = 0; part < PARTS; part++) {
  const int c = (part * THREADS + thread_index) * 8;
  Pack<T, 8> made;
  UNROLL for (int i = 0; i < 8; i++) {
    const float sum = metal::fma(a[part].v[i] * scale, both_factor[part].v[i], base[part].v[i]);
    made.v[i] = static_cast<T>(sum * whole);
  }
  if (c < C) {
    store_pack<8>(y + row * C + c, made);
  }
}
