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
