// Helpers in the shared dialect, after either prelude.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

template <int N>
struct Floats {
  float v[N];
};

// N values in one load; the address must be a multiple of their size.
template <int N, typename T>
FUNC Pack<T, N> load_pack(const GLOBAL T* p) {
  return *reinterpret_cast<const GLOBAL Pack<T, N>*>(p);
}

// N values in one store, to an address that is a multiple of their size.
template <int N, typename T>
FUNC void store_pack(GLOBAL T* p, Pack<T, N> values) {
  *reinterpret_cast<GLOBAL Pack<T, N>*>(p) = values;
}

// N values as floats, from any address.
template <int N, typename T>
FUNC Floats<N> load_floats(const GLOBAL T* p) {
  Floats<N> wide;
#ifdef VECTOR_ALIGNED
  if (VECTOR_ALIGNED(p, sizeof(Pack<T, N>))) {
    const Pack<T, N> pack = load_pack<N>(p);
    UNROLL for (int i = 0; i < N; i++) { wide.v[i] = static_cast<float>(pack.v[i]); }
    return wide;
  }
#endif
  UNROLL for (int i = 0; i < N; i++) { wide.v[i] = static_cast<float>(p[i]); }
  return wide;
}

// The bits of a float in memory.
FUNC int bits_of(const GLOBAL float* p) { return *reinterpret_cast<const GLOBAL int*>(p); }

// Keys are dealt out in chunks, cut at absolute positions: of `size` keys each where `first` is 0,
// else `first` of them, then `first` twice as long, and so on up to `doublings` times.
FUNC int chunk_start(int chunk, int size, int first, int doublings) {
  const int level = first == 0 ? 0 : metal::min(chunk / first, doublings);
  const int before = ((1 << level) - 1) * first;
  return (before + ((chunk - level * first) << level)) * size;
}

FUNC int chunk_of(int position, int size, int first, int doublings) {
  const int unit = position / size;
  int level = 0;
  if (first > 0) {
    const int turn = unit / first + 1;
    while (level < doublings && (2 << level) <= turn) { level += 1; }
  }
  const int before = ((1 << level) - 1) * first;
  return level * first + ((unit - before) >> level);
}

// What attention_combine would make of one chunk alone, step by step: its weight, and 1 / the sum.
FUNC Floats<2> lone_chunk(float chunk_top, float chunk_total, bool has_sinks, float sink) {
  const float top = metal::max(sink, chunk_top);
  const float weight = metal::fast::exp(chunk_top - top);
  const float rest = has_sinks ? metal::fast::exp(sink - top) : 0.0f;
  return {{weight, 1.0f / (rest + metal::fma(weight, chunk_total, 0.0f))}};
}

// Cosine and sine of any angle, times a factor.
FUNC Floats<2> rotation(float angle, float factor) {
  Floats<2> made;
  made.v[0] = metal::precise::cos(angle) * factor;
  made.v[1] = metal::precise::sin(angle) * factor;
  return made;
}

// A value as its gate lets it through: times sigmoid(score).
FUNC float gated(float value, float score) { return value / (1.0f + metal::fast::exp(-score)); }
