// Steps of products with 4-bit weights in groups of 64 on tensor cores, after cuda_fragments.h.
// A slice is 16 rows of a weight by STEP groups: their codes, then their scales and biases where
// the groups of a row are a multiple of STEP. A row of x lies in shared memory with the two halves
// of every 16 values apart, in code order, and 64 bytes behind it.
template <int STEP, typename S>
struct Slice {
  static constexpr int code_bytes = 16 * 32 * STEP;
  static constexpr int row_scales = STEP * static_cast<int>(sizeof(S));
  static constexpr int scale_bytes = 2 * 16 * row_scales;
};

// sums += (16 + codes) x for eight codes of two rows of a weight, and the x that they meet.
template <typename X>
FUNC void multiply_words(float (&sums)[4], uint upper, uint lower, const Pack<uint, 4>& x) {
  const uint first[4] = {Pair<X>::template codes<0>(upper), Pair<X>::template codes<0>(lower),
                         Pair<X>::template codes<1>(upper), Pair<X>::template codes<1>(lower)};
  const uint second[4] = {Pair<X>::template codes<2>(upper), Pair<X>::template codes<2>(lower),
                          Pair<X>::template codes<3>(upper), Pair<X>::template codes<3>(lower)};
  Pair<X>::multiply(sums, first, x.v[0], x.v[1]);
  Pair<X>::multiply(sums, second, x.v[2], x.v[3]);
}

// Every row of sums += the sum of x.
template <typename X>
FUNC void add_words(float (&sums)[4], const Pack<uint, 4>& x) {
  const uint ones[4] = {Pair<X>::ones, Pair<X>::ones, Pair<X>::ones, Pair<X>::ones};
  Pair<X>::multiply(sums, ones, x.v[0], x.v[1]);
  Pair<X>::multiply(sums, ones, x.v[2], x.v[3]);
}

// The eight values in the order of the codes that they meet: 0 4 1 5 2 6 3 7.
FUNC Pack<uint, 4> in_code_order(const Pack<uint, 4>& x) {
  Pack<uint, 4> ordered;
  ordered.v[0] = __byte_perm(x.v[0], x.v[2], 0x5410);
  ordered.v[1] = __byte_perm(x.v[0], x.v[2], 0x7632);
  ordered.v[2] = __byte_perm(x.v[1], x.v[3], 0x5410);
  ordered.v[3] = __byte_perm(x.v[1], x.v[3], 0x7632);
  return ordered;
}

template <typename X>
FUNC Floats<8> to_floats(const Pack<uint, 4>& words) {
  Floats<8> wide;
  const X* values = reinterpret_cast<const X*>(words.v);
  UNROLL for (int i = 0; i < 8; i++) { wide.v[i] = static_cast<float>(values[i]); }
  return wide;
}

// COUNT scales side by side, from shared memory.
template <typename S, int COUNT>
FUNC void load_scales(float (&scale)[COUNT], uint address) {
  constexpr int WORDS = COUNT * static_cast<int>(sizeof(S)) / 4;
  constexpr int SIDE = WORDS == 2 ? 2 : 4;
  uint words[WORDS];
  UNROLL for (int w = 0; w < WORDS; w += SIDE) {
    const auto pack = load_shared<Pack<uint, SIDE>>(address + 4 * w);
    UNROLL for (int i = 0; i < SIDE; i++) { words[w + i] = pack.v[i]; }
  }
  const S* const values = reinterpret_cast<const S*>(words);
  UNROLL for (int i = 0; i < COUNT; i++) { scale[i] = static_cast<float>(values[i]); }
}

// Starts to copy a slice: of rows from `first`, none behind `last_row`, and of groups from
// step * STEP. `groups` are those of a row.
template <int STEP, bool HAS_BIASES, typename S>
FUNC void fetch_slice(uint to, const GLOBAL uint* codes, const GLOBAL S* scales,
                      const GLOBAL S* biases, int first, int last_row, int step, int groups,
                      int lane) {
  constexpr int ROW_SCALES = Slice<STEP, S>::row_scales;
  const int chunk = lane % (2 * STEP);
  const int from_chunk = step * (2 * STEP) + chunk;
  const bool is_whole = groups % STEP == 0;
  UNROLL for (int i = 0; i < STEP; i++) {
    const int row = lane / (2 * STEP) + i * (16 / STEP);
    const int from_row = metal::min(first + row, last_row);
    if (is_whole || from_chunk < 2 * groups) {
      copy_async(to + row * (32 * STEP) + ((chunk ^ (2 * (row & 3))) * 16),
                 codes + from_row * (groups * 8) + from_chunk * 4);
    }
  }
  if (is_whole && (HAS_BIASES || lane < 16)) {
    const int from_row = metal::min(first + lane % 16, last_row);
    const GLOBAL S* const from = (lane < 16 ? scales : biases) + from_row * groups + step * STEP;
    constexpr int BYTES = ROW_SCALES < 16 ? ROW_SCALES : 16;
    UNROLL for (int part = 0; part < ROW_SCALES / BYTES; part++) {
      copy_async_cached<BYTES>(
          to + Slice<STEP, S>::code_bytes + lane * ROW_SCALES + part * BYTES,
          reinterpret_cast<const GLOBAL char*>(from) + part * BYTES);
    }
  }
}

// The scales and biases that a lane needs of a slice, from shared memory.
template <bool HAS_BIASES, typename S, int STEP>
FUNC void take_scales(float (&scale)[2][STEP], float (&offset)[2][STEP], uint slice, int row) {
  constexpr int ROW_SCALES = Slice<STEP, S>::row_scales;
  UNROLL for (int half = 0; half < 2; half++) {
    const uint at = slice + Slice<STEP, S>::code_bytes + (row + 8 * half) * ROW_SCALES;
    load_scales<S>(scale[half], at);
    if constexpr (HAS_BIASES) { load_scales<S>(offset[half], at + 16 * ROW_SCALES); }
  }
}

// The same from the weight, where a slice has none; no row is behind `last_row`.
template <bool HAS_BIASES, typename S, int STEP>
FUNC void read_scales(float (&scale)[2][STEP], float (&offset)[2][STEP],
                      const GLOBAL S* scales, const GLOBAL S* biases, int row, int last_row,
                      int step, int groups) {
  UNROLL for (int half = 0; half < 2; half++) {
    const int from_row = metal::min(row + 8 * half, last_row);
    UNROLL for (int j = 0; j < STEP; j++) {
      const int at = from_row * groups + metal::min(step * STEP + j, groups - 1);
      scale[half][j] = static_cast<float>(scales[at]);
      offset[half][j] = HAS_BIASES ? static_cast<float>(biases[at]) : 0.0f;
    }
  }
}

// sum += a slice times a group of x; x_sum has the sums of that group. Codes enter as 16 + code.
template <typename X, bool HAS_BIASES, int ZERO, int STEP>
FUNC void add_group(float (&sum)[4], uint slice, int j, int row, int quarter,
                    const Pack<uint, 4>& low, const Pack<uint, 4>& high, const float (&x_sum)[4],
                    const float (&scale)[2][STEP], const float (&offset)[2][STEP]) {
  const uint at =
      slice + row * (32 * STEP) + quarter * 8 + ((32 * j) ^ (32 * static_cast<uint>(row & 3)));
  const auto upper = load_shared<Pack<uint, 2>>(at);
  const auto lower = load_shared<Pack<uint, 2>>(at + 8 * 32 * STEP);
  float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  multiply_words<X>(dot, upper.v[0], lower.v[0], low);
  multiply_words<X>(dot, upper.v[1], lower.v[1], high);
  UNROLL for (int half = 0; half < 2; half++) {
    const float s = scale[half][j];
    const float b = HAS_BIASES ? metal::fma(-16.0f, s, offset[half][j])
                               : -(16.0f + static_cast<float>(ZERO)) * s;
    UNROLL for (int i = 0; i < 2; i++) {
      float& total = sum[2 * half + i];
      total = metal::fma(s, dot[2 * half + i], metal::fma(b, x_sum[2 * half + i], total));
    }
  }
}

// Bytes between rows of K values of x in shared memory.
FUNC constexpr int row_bytes(int K) { return 2 * K + 64; }

FUNC uint place_of_chunk(int chunk) {
  return chunk / 8 * 128 + chunk % 2 * 64 + chunk % 8 / 2 * 16;
}

// 1 / sqrt(mean + eps) of rows of K values, of whose squares each of 256 threads has a part.
// `sums` has room for 8 * M floats; nobody may read them any more.
template <int M>
FUNC void inverse_means(float (&inverse)[M], const float (&squares)[M], int K, float eps,
                        SHARED_PTR float* sums, int index) {
  UNROLL for (int m = 0; m < M; m++) {
    const float square_sum = simd_sum(squares[m]);
    if (index % 32 == 0) { sums[m * 8 + index / 32] = square_sum; }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int m = 0; m < M; m++) {
    float square_sum = 0.0f;
    UNROLL for (int i = 0; i < 8; i++) { square_sum += sums[m * 8 + i]; }
    inverse[m] = inverse_root_mean(square_sum, K, eps);
  }
}

template <typename X>
FUNC float add_squares(float sum, const Pack<uint, 4>& words) {
  const Floats<8> value = to_floats<X>(words);
  UNROLL for (int i = 0; i < 8; i++) { sum = metal::fma(value.v[i], value.v[i], sum); }
  return sum;
}

// Chunks of eight values that each of 256 threads takes of a row of K, and how many of them it asks
// for at once: `most` of M rows together, as evenly as that divides.
FUNC constexpr int chunks_of(int K) { return (K / 8 + 255) / 256; }
FUNC constexpr int chunks_at_once(int K, int M, int most) {
  const int allowed = most > M ? most / M : 1;
  const int rounds = (chunks_of(K) + allowed - 1) / allowed;
  return (chunks_of(K) + rounds - 1) / rounds;
}

// A thread's chunks `first`, `first` + 256, ... of M rows of K values, COUNT of them at most. What
// is asked for early is on its way until `take`: so nothing may happen to it in between, not even
// a choice between two ways to load it. Unaligned rows are loaded when they are taken.
template <int M, int K, int COUNT, typename T>
struct Chunks {
  Pack<T, 8> chunk[COUNT][M];

  FUNC static bool is_aligned(const GLOBAL T* x) { return VECTOR_ALIGNED(x, sizeof(Pack<T, 8>)); }

  FUNC void ask(const GLOBAL T* x, int first) {
    if (is_aligned(x)) {
      UNROLL for (int i = 0; i < COUNT; i++) {
        const int at = first + 256 * i;
        if (at < K / 8) {
          UNROLL for (int m = 0; m < M; m++) { chunk[i][m] = load_pack<8>(x + m * K + at * 8); }
        }
      }
    }
  }

  FUNC void take(const GLOBAL T* x, int first) {
    if (!is_aligned(x)) {
      UNROLL for (int i = 0; i < COUNT; i++) {
        const int at = first + 256 * i;
        if (at < K / 8) {
          UNROLL for (int m = 0; m < M; m++) {
            UNROLL for (int j = 0; j < 8; j++) { chunk[i][m].v[j] = x[m * K + at * 8 + j]; }
          }
        }
      }
    }
  }

  FUNC void load(const GLOBAL T* x, int first) {
    ask(x, first);
    take(x, first);
  }
};

// Chunks of M rows and of one norm's factors that a thread has under way.
template <int M, int K, int AT_ONCE, typename X>
using RowChunks = Chunks<M, K, chunks_at_once(K, M, AT_ONCE), X>;
template <int K, bool HAS_NORM_WEIGHT, int AT_ONCE, typename W>
using FactorChunks = Chunks<1, K, HAS_NORM_WEIGHT ? chunks_at_once(K, 1, AT_ONCE / 2) : 1, W>;

template <typename X>
FUNC Pack<uint, 4> words_of(const Pack<X, 8>& values) {
  return *reinterpret_cast<const Pack<uint, 4>*>(values.v);
}

// Multiplies M staged rows by their inverse means and the norm's weight, of which `factor` has the
// thread's first chunks. Ends with a barrier.
template <typename X, int M, int K, bool HAS_NORM_WEIGHT, int COUNT, typename W>
FUNC void scale_rows(uint to, const float (&inverse)[M], Chunks<1, K, COUNT, W>& factor,
                     const GLOBAL W* norm_weight, int index) {
  for (int first = index; first < K / 8; first += 256 * COUNT) {
    UNROLL for (int i = 0; i < COUNT; i++) {
      const int chunk = first + 256 * i;
      if (chunk < K / 8) {
        UNROLL for (int m = 0; m < M; m++) {
          const uint at = to + place_of_chunk(chunk) + m * row_bytes(K);
          auto words = load_shared<Pack<uint, 4>>(at);
          Floats<8> value = to_floats<X>(words);
          UNROLL for (int j = 0; j < 8; j++) {
            value.v[j] = value.v[j] * inverse[m];
            if constexpr (HAS_NORM_WEIGHT) {
              const W own = factor.chunk[i][0].v[j / 2 + j % 2 * 4];
              value.v[j] = value.v[j] * static_cast<float>(own);
            }
          }
          UNROLL for (int j = 0; j < 4; j++) {
            words.v[j] = Pair<X>::pack(value.v[2 * j], value.v[2 * j + 1]);
          }
          store_shared(at, words);
        }
      }
    }
    if constexpr (HAS_NORM_WEIGHT && COUNT < chunks_of(K)) {
      factor.load(norm_weight, first + 256 * COUNT);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Norms M staged rows, of whose squares each of 256 threads has a part. Ends with a barrier.
template <typename X, int M, int K, bool HAS_NORM_WEIGHT, int COUNT, typename W>
FUNC void norm_rows(uint to, const float (&squares)[M], Chunks<1, K, COUNT, W>& factor,
                    const GLOBAL W* norm_weight, float eps, SHARED_PTR float* sums, int index) {
  float inverse[M];
  inverse_means<M>(inverse, squares, K, eps, sums, index);
  if constexpr (HAS_NORM_WEIGHT) { factor.take(norm_weight, index); }
  scale_rows<X, M, K, HAS_NORM_WEIGHT>(to, inverse, factor, norm_weight, index);
}

// How eight values lie in shared memory.
struct Ordered {
  FUNC Pack<uint, 4> operator()(const Pack<uint, 4>& words) const { return in_code_order(words); }
};
struct InPlace {
  FUNC Pack<uint, 4> operator()(const Pack<uint, 4>& words) const { return words; }
};

// Puts M rows of x, of which `rows` has the thread's first chunks, in shared memory, in the order
// that `arrange` gives eight values; `squares` are this thread's part, as so arranged.
template <int M, int K, bool HAS_SQUARES, int COUNT, typename X, typename Arrange>
FUNC void stage_chunks(uint to, Chunks<M, K, COUNT, X>& rows, const GLOBAL X* x,
                       float (&squares)[M], int index, Arrange arrange) {
  UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
  rows.take(x, index);
  for (int first = index; first < K / 8; first += 256 * COUNT) {
    UNROLL for (int i = 0; i < COUNT; i++) {
      const int chunk = first + 256 * i;
      if (chunk < K / 8) {
        UNROLL for (int m = 0; m < M; m++) {
          const Pack<uint, 4> arranged = arrange(words_of(rows.chunk[i][m]));
          store_shared(to + place_of_chunk(chunk) + m * row_bytes(K), arranged);
          if constexpr (HAS_SQUARES) { squares[m] = add_squares<X>(squares[m], arranged); }
        }
      }
    }
    if constexpr (COUNT < chunks_of(K)) { rows.load(x, first + 256 * COUNT); }
  }
}

// Puts M rows of x in shared memory, normed if NORM, after `rows` and `factor` were asked for; 256
// threads take part. `sums` has room for 8 * M floats. Ends with a barrier.
template <int M, int K, bool NORM, bool HAS_NORM_WEIGHT, int COUNT, int FACTORS, typename X,
          typename W>
FUNC void stage_rows(uint to, Chunks<M, K, COUNT, X>& rows, Chunks<1, K, FACTORS, W>& factor,
                     const GLOBAL X* x, const GLOBAL W* norm_weight, float eps,
                     SHARED_PTR float* sums, int index) {
  float squares[M];
  stage_chunks<M, K, NORM>(to, rows, x, squares, index, Ordered{});
  if constexpr (NORM) {
    norm_rows<X, M, K, HAS_NORM_WEIGHT>(to, squares, factor, norm_weight, eps, sums, index);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// residual + norm(x) for eight values side by side, in memory's order.
template <typename X, typename Factors>
FUNC Pack<uint, 4> add_normed(const Pack<uint, 4>& x, float inverse, const Factors& factor,
                              const Pack<uint, 4>& residual) {
  const Floats<8> value = to_floats<X>(x);
  const Floats<8> base = to_floats<X>(residual);
  float sum[8];
  UNROLL for (int i = 0; i < 8; i++) {
    sum[i] = base.v[i] + value.v[i] * inverse * factor.v[i];
  }
  Pack<uint, 4> words;
  UNROLL for (int i = 0; i < 4; i++) { words.v[i] = Pair<X>::pack(sum[2 * i], sum[2 * i + 1]); }
  return words;
}

template <typename X>
FUNC Pack<X, 8> values_of(const Pack<uint, 4>& words) {
  Pack<X, 8> values;
  const X* from = reinterpret_cast<const X*>(words.v);
  UNROLL for (int i = 0; i < 8; i++) { values.v[i] = from[i]; }
  return values;
}

// residual + norm(x) for M rows of K values in global memory, in the hands of 256 threads. Each
// eight values are given to `take`, with their row and the place of the first.
template <int M, int K, typename X, typename W, typename Take>
FUNC void add_normed_rows(const GLOBAL X* x, const GLOBAL X* residual, const GLOBAL W* norm_weight,
                          float eps, SHARED_PTR float* sums, int index, Take take) {
  float squares[M];
  UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
  for (int chunk = index; chunk < K / 8; chunk += 256) {
    UNROLL for (int m = 0; m < M; m++) {
      squares[m] = add_squares<X>(squares[m], load_eight(x + m * K + chunk * 8));
    }
  }
  float inverse[M];
  inverse_means<M>(inverse, squares, K, eps, sums, index);
  for (int chunk = index; chunk < K / 8; chunk += 256) {
    const Floats<8> factor = load_floats<8>(norm_weight + chunk * 8);
    UNROLL for (int m = 0; m < M; m++) {
      const int at = m * K + chunk * 8;
      const Pack<uint, 4> base = load_eight(residual + at);
      take(m, chunk, add_normed<X>(load_eight(x + at), inverse[m], factor, base));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// As `stage_rows`, of rows that are stream + norm(branch), rounded and then normed; `base` and
// `branch_factor` were asked for too, of the stream and of branch_norm: K factors, then eps. The
// sums are given to `take` too, eight at a time, with the place of the first. The bits are those of
// rms_norm and of `stage_rows` behind it.
template <int M, int K, bool HAS_NORM_WEIGHT, int COUNT, int PARTS_COUNT, int BRANCH,
          int FACTORS, typename X, typename W, typename Take>
FUNC void stage_sums(uint to, Chunks<M, K, COUNT, X>& rows, Chunks<M, K, PARTS_COUNT, X>& base,
                     Chunks<1, K, BRANCH, float>& branch_factor,
                     Chunks<1, K, FACTORS, W>& factor, const GLOBAL X* branch,
                     const GLOBAL X* stream, const GLOBAL float* branch_norm, float branch_eps,
                     const GLOBAL W* norm_weight, float eps, SHARED_PTR float* sums, int index,
                     Take take) {
  static_assert(PARTS_COUNT == BRANCH, "of each chunk its factors");
  float squares[M];
  stage_chunks<M, K, true>(to, rows, branch, squares, index, InPlace{});
  float inverse[M];
  inverse_means<M>(inverse, squares, K, branch_eps, sums, index);
  UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
  base.take(stream, index);
  branch_factor.take(branch_norm, index);
  for (int first = index; first < K / 8; first += 256 * PARTS_COUNT) {
    UNROLL for (int i = 0; i < PARTS_COUNT; i++) {
      const int chunk = first + 256 * i;
      if (chunk < K / 8) {
        UNROLL for (int m = 0; m < M; m++) {
          const uint at = to + place_of_chunk(chunk) + m * row_bytes(K);
          const auto words = load_shared<Pack<uint, 4>>(at);
          const auto sum = add_normed<X>(words, inverse[m], branch_factor.chunk[i][0],
                                         words_of(base.chunk[i][m]));
          take(m * K + chunk * 8, sum);
          const Pack<uint, 4> ordered = in_code_order(sum);
          squares[m] = add_squares<X>(squares[m], ordered);
          store_shared(at, ordered);
        }
      }
    }
    if constexpr (PARTS_COUNT < chunks_of(K)) {
      base.load(stream, first + 256 * PARTS_COUNT);
      branch_factor.load(branch_norm, first + 256 * PARTS_COUNT);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_rows<X, M, K, HAS_NORM_WEIGHT>(to, squares, factor, norm_weight, eps, sums, index);
}

template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};
