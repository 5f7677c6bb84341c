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

template <int N>
FUNC Floats<N> sigmoids_of(Floats<N> x) {
  Floats<N> made;
#ifdef __CUDA_ARCH__
  // A quotient has a branch, so that the next one waits for it. This is what 1 / x is in the branch
  // for moderate x, for all of them at once: the same bits.
  bool is_plain = true;
  UNROLL for (int i = 0; i < N; i++) {
    made.v[i] = 1.0f + metal::precise::exp(-x.v[i]);
    is_plain = is_plain && made.v[i] < 1e37f;
  }
  if (is_plain) {
    UNROLL for (int i = 0; i < N; i++) {
      float inverse;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(made.v[i]));
      made.v[i] = metal::fma(inverse, -metal::fma(made.v[i], inverse, -1.0f), inverse);
    }
    return made;
  }
#endif
  UNROLL for (int i = 0; i < N; i++) { made.v[i] = sigmoid_of(x.v[i]); }
  return made;
}

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

// The taps of a channel, as they lie in memory.
template <int TAPS, typename W, bool IS_WIDE>
struct Taps {
  W v[TAPS];
};

template <int TAPS, typename W>
FUNC float tap_of(Taps<TAPS, W, false> taps, int tap) { return static_cast<float>(taps.v[tap]); }

template <int TAPS, typename W>
FUNC Taps<TAPS, W, false> load_taps(const GLOBAL W* p, bool, Taps<TAPS, W, false> taps) {
  UNROLL for (int tap = 0; tap < TAPS; tap++) { taps.v[tap] = p[tap]; }
  return taps;
}

#ifdef VECTOR_ALIGNED
// Two of 16 bits a word: to part them right behind the load would be to wait for it.
template <int TAPS, typename W>
struct Taps<TAPS, W, true> {
  Pack<uint, TAPS / 2> words;
};

template <int TAPS, typename W>
FUNC float tap_of(Taps<TAPS, W, true> taps, int tap) {
  const ushort bits = static_cast<ushort>(taps.words.v[tap / 2] >> (16 * (tap % 2)));
  return static_cast<float>(*reinterpret_cast<const W*>(&bits));
}

template <int TAPS, typename W>
FUNC Taps<TAPS, W, true> load_taps(const GLOBAL W* p, bool is_aligned, Taps<TAPS, W, true> taps) {
  if (is_aligned) {
    taps.words = load_pack<TAPS / 2>(reinterpret_cast<const GLOBAL uint*>(p));
  } else {
    const GLOBAL ushort* bits = reinterpret_cast<const GLOBAL ushort*>(p);
    UNROLL for (int i = 0; i < TAPS / 2; i++) {
      taps.words.v[i] = bits[2 * i] | static_cast<uint>(bits[2 * i + 1]) << 16;
    }
  }
  return taps;
}
#define TAPS_ARE_WIDE(TAPS, W) (sizeof(W) == 2 && (TAPS == 2 || TAPS == 4 || TAPS == 8))
#define TAPS_ARE_ALIGNED(p, TAPS, W) VECTOR_ALIGNED(p, TAPS * sizeof(W))
#else
#define TAPS_ARE_WIDE(TAPS, W) false
#define TAPS_ARE_ALIGNED(p, TAPS, W) false
#endif

// What N channels of a row are filtered from, as it lies in memory: nothing waits for it before it
// is used. Of a tap, `before` has the value where its row is one of the tail, else `rows`.
template <int TAPS, int N, typename X, typename W>
struct FilterInputs {
  float before[TAPS - 1][N];
  X rows[TAPS][N];
  Taps<TAPS, W, TAPS_ARE_WIDE(TAPS, W)> taps[N];
};

// Those of channels first + lane + 32 i < first + width.
template <int TAPS, int N, typename X, typename W>
FUNC FilterInputs<TAPS, N, X, W> filter_inputs(const GLOBAL X* qkv, int stride,
                                               const GLOBAL float* tail, const GLOBAL W* conv,
                                               int channels, int row, int first, int width,
                                               int lane) {
  FilterInputs<TAPS, N, X, W> given;
  UNROLL for (int tap = TAPS - 1; tap >= 0; tap--) {
    const int from = row + tap - (TAPS - 1);
    if (tap < TAPS - 1 && from < 0) {
      UNROLL for (int i = 0; i < N; i++) {
        const int channel = first + metal::min(lane + 32 * i, width - 1);
        given.before[tap][i] = tail[(from + TAPS - 1) * channels + channel];
      }
    } else {
      UNROLL for (int i = 0; i < N; i++) {
        const int channel = first + metal::min(lane + 32 * i, width - 1);
        given.rows[tap][i] = qkv[from * stride + channel];
      }
    }
  }
  const bool is_aligned = TAPS_ARE_ALIGNED(conv, TAPS, W);
  UNROLL for (int i = 0; i < N; i++) {
    const int channel = first + metal::min(lane + 32 * i, width - 1);
    given.taps[i] = load_taps(conv + channel * TAPS, is_aligned, given.taps[i]);
  }
  return given;
}

// The value of a tap in channel i of those.
template <int TAPS, int N, typename X, typename W>
FUNC float raw_value(FilterInputs<TAPS, N, X, W> given, int row, int tap, int i) {
  return tap < TAPS - 1 && row + tap < TAPS - 1 ? given.before[tap < TAPS - 1 ? tap : 0][i]
                                                : static_cast<float>(given.rows[tap][i]);
}

// Of queries (0), keys (1) or values of a head.
template <int HK, int DK, int DV>
FUNC int first_channel(int part, int key_head, int head) {
  return part < 2 ? (part * HK + key_head) * DK : 2 * HK * DK + head * DV;
}

// They filtered.
template <int TAPS, int N, typename X, typename W>
FUNC Floats<N> totals_of(FilterInputs<TAPS, N, X, W> given, int row) {
  Floats<N> made;
  UNROLL for (int i = 0; i < N; i++) {
    float total = 0.0f;
    UNROLL for (int tap = 0; tap < TAPS; tap++) {
      total = metal::fma(raw_value(given, row, tap, i), tap_of(given.taps[i], tap), total);
    }
    made.v[i] = total;
  }
  return made;
}

template <int N>
FUNC Floats<N> silu_of(Floats<N> x) {
  const Floats<N> shares = sigmoids_of(x);
  UNROLL for (int i = 0; i < N; i++) { x.v[i] = x.v[i] * shares.v[i]; }
  return x;
}

// Channels first + lane + 32 i < first + D of a row, filtered, then silu.
template <int TAPS, int D, typename X, typename W>
FUNC Floats<(D + 31) / 32> filtered(const GLOBAL X* qkv, int stride, const GLOBAL float* tail,
                                    const GLOBAL W* conv, int channels, int row, int first,
                                    int lane) {
  const int N = (D + 31) / 32;
  return silu_of(totals_of(
      filter_inputs<TAPS, N>(qkv, stride, tail, conv, channels, row, first, D, lane), row));
}

// Sum of squares of D values, of which a lane has those at lane + 32 i.
template <int D, int N>
FUNC float square_sum(Floats<N> x, int lane) {
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

// A lane's part of a dot product.
template <int N>
FUNC float dot_part(Floats<N> a, Floats<N> b) {
  Floats<4> sum;
  UNROLL for (int x = 0; x < 4; x++) { sum.v[x] = 0.0f; }
  UNROLL for (int i = 0; i < N; i++) { sum.v[i & 3] = metal::fma(a.v[i], b.v[i], sum.v[i & 3]); }
  return (sum.v[0] + sum.v[1]) + (sum.v[2] + sum.v[3]);
}

// Sums over LANES lanes, side by side: a shuffle takes as long as many products.
template <int LANES, int N>
FUNC Floats<N> sums_of(Floats<N> parts) {
  for (int mask = 1; mask < LANES; mask *= 2) {
    Floats<N> others;
    UNROLL for (int i = 0; i < N; i++) { others.v[i] = simd_shuffle_xor(parts.v[i], mask); }
    UNROLL for (int i = 0; i < N; i++) { parts.v[i] += others.v[i]; }
  }
  return parts;
}

template <int LANES, int N>
FUNC float dot_of(Floats<N> a, Floats<N> b) {
  Floats<1> part;
  part.v[0] = dot_part(a, b);
  return sums_of<LANES>(part).v[0];
}

// Has N numbers of 32 bits, a multiple of four, brought closer; no register waits for them.
template <int N>
FUNC void fetch_ahead(const GLOBAL float* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :: "l"(__cvta_generic_to_global(p)), "r"(4 * N));
#endif
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
