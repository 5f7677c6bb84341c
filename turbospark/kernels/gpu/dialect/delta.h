// Helpers of the delta net: one arithmetic for passes of any length.

// log(1 + exp(x))
FUNC float soft_plus(float x) {
  const float small = metal::precise::exp(-metal::max(x, -x));
  const float series = metal::fma(small, metal::fma(small, 0.33333333f, -0.5f), 1.0f);
  const float above = metal::max(x, 0.0f);
  return small < 0.01f ? metal::fma(small, series, above)
                       : above + metal::precise::log(1.0f + small);
}

FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + metal::precise::exp(-x)); }

// What a row leaves of the state.
FUNC float decay_of(float a, float dt_bias, float log_rate) {
  return metal::precise::exp(-metal::precise::exp(log_rate) * soft_plus(a + dt_bias));
}

// Channel of a row before the filter; rows below 0 are those of the tail, the newest last.
template <int TAPS, typename X>
FUNC float raw_row(const GLOBAL X* qkv, int stride, const GLOBAL float* tail, int channels, int row,
                   int channel) {
  return row < 0 ? tail[(row + TAPS - 1) * channels + channel]
                 : static_cast<float>(qkv[row * stride + channel]);
}

// Channels first + lane + 32 i < first + D of a row, filtered, then silu.
template <int TAPS, int D, typename X, typename W>
FUNC Floats<(D + 31) / 32> filtered(const GLOBAL X* qkv, int stride, const GLOBAL float* tail,
                                    const GLOBAL W* conv, int channels, int row, int first,
                                    int lane) {
  Floats<(D + 31) / 32> made;
  UNROLL for (int i = 0; i < (D + 31) / 32; i++) {
    const int channel = first + metal::min(lane + 32 * i, D - 1);
    float total = 0.0f;
    UNROLL for (int tap = 0; tap < TAPS; tap++) {
      const float value =
          raw_row<TAPS>(qkv, stride, tail, channels, row + tap - (TAPS - 1), channel);
      total = metal::fma(value, static_cast<float>(conv[channel * TAPS + tap]), total);
    }
    made.v[i] = total * sigmoid_of(total);
  }
  return made;
}

// Sum of squares of D values, of which a lane has those at lane + 32 i.
template <int D>
FUNC float square_sum(Floats<(D + 31) / 32> x, int lane) {
  float total = 0.0f;
  UNROLL for (int i = 0; i < (D + 31) / 32; i++) {
    if (lane + 32 * i < D) { total = metal::fma(x.v[i], x.v[i], total); }
  }
  return simd_sum(total);
}

FUNC float inverse_root(float x) { return metal::precise::rsqrt(x); }

// A value row of the state, dealt to LANES lanes: lane w has packs of four w, w + LANES, ...
template <int N>
FUNC Floats<N> faded(Floats<N> S, float decay) {
  UNROLL for (int i = 0; i < N; i++) { S.v[i] = S.v[i] * decay; }
  return S;
}

template <int N>
FUNC Floats<N> written(Floats<N> S, float delta, Floats<N> k) {
  UNROLL for (int i = 0; i < N; i++) { S.v[i] = metal::fma(delta, k.v[i], S.v[i]); }
  return S;
}

template <int LANES, int N>
FUNC float dot_of(Floats<N> a, Floats<N> b) {
  Floats<4> sum;
  UNROLL for (int x = 0; x < 4; x++) { sum.v[x] = 0.0f; }
  UNROLL for (int i = 0; i < N; i++) { sum.v[i & 3] = metal::fma(a.v[i], b.v[i], sum.v[i & 3]); }
  float total = (sum.v[0] + sum.v[1]) + (sum.v[2] + sum.v[3]);
  for (int mask = 1; mask < LANES; mask *= 2) { total += simd_shuffle_xor(total, mask); }
  return total;
}

template <int LANES, int N>
FUNC Floats<N> load_state(const GLOBAL float* row, int within) {
  Floats<N> S;
  UNROLL for (int c = 0; c < N / 4; c++) {
    const Pack<float, 4> part = load_pack<4>(row + 4 * (within + c * LANES));
    UNROLL for (int x = 0; x < 4; x++) { S.v[4 * c + x] = part.v[x]; }
  }
  return S;
}

template <int N>
FUNC Pack<float, 4> state_part(Floats<N> S, int c) {
  Pack<float, 4> part;
  UNROLL for (int x = 0; x < 4; x++) { part.v[x] = S.v[4 * c + x]; }
  return part;
}

// Four values of a WIDE_SHARED array, from and to a multiple of four.
FUNC Pack<float, 4> load_shared(const SHARED_PTR float* p) {
#ifdef VECTOR_ALIGNED
  return *reinterpret_cast<const SHARED_PTR Pack<float, 4>*>(p);
#else
  Pack<float, 4> values;
  UNROLL for (int i = 0; i < 4; i++) { values.v[i] = p[i]; }
  return values;
#endif
}

FUNC void store_shared(SHARED_PTR float* p, Pack<float, 4> values) {
#ifdef VECTOR_ALIGNED
  *reinterpret_cast<SHARED_PTR Pack<float, 4>*>(p) = values;
#else
  UNROLL for (int i = 0; i < 4; i++) { p[i] = values.v[i]; }
#endif
}
