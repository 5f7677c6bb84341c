// Helpers of routed experts: ranks, and 4-bit products of one row each.

// 0, which is there once all that the text loads before it has been asked for. CUDA's assembler would
// rather wait for one column's codes than ask for the next; it cannot move loads beyond a barrier,
// here of a SIMD-group alone, nor sums in front of a number that the barrier gives. Bounds tell it
// that the registers are there; MLX writes the kernel's first line.
#ifdef __CUDACC__
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(256, 2)
FUNC float none_when_asked() {
  float none;
  asm volatile(
      "{.reg .pred some, any; setp.gt.u32 some, %1, 31;"
      " bar.red.or.pred any, %2, 32, some; selp.f32 %0, 0f3F800000, 0f00000000, any;}"
      : "=f"(none)
      : "r"(thread_index_in_simdgroup), "r"(simdgroup_index_in_threadgroup + 1)
      : "memory");
  return none;
}
#else
FUNC float none_when_asked() { return 0.0f; }
#endif

FUNC float sum_of(Floats<8> x) {
  return ((x.v[0] + x.v[1]) + (x.v[2] + x.v[3])) + ((x.v[4] + x.v[5]) + (x.v[6] + x.v[7]));
}

// Groups of 4-bit codes: MODE 0 is scale * code + offset, 1 is 2^(scale - 127) * a 4-bit float.
// What values become before codes are multiplied by them.
template <int MODE>
FUNC Floats<8> ready_of(Floats<8> x) {
  UNROLL for (int i = 0; i < 8; i++) {
    x.v[i] = MODE == 0 ? int4_ready(x.v[i], i) : fp4_ready(x.v[i]);
  }
  return x;
}

// dot + a word of codes times eight values that are ready.
template <int MODE>
FUNC float add_codes(uint word, Floats<8> ready, float dot) {
  UNROLL for (int i = 0; i < 8; i++) {
    dot = metal::fma(ready.v[i], MODE == 0 ? int4_value(word, i) : fp4_value(word, i), dot);
  }
  return dot;
}

template <typename T, int N>
FUNC Floats<N> floats_of(Pack<T, N> pack) {
  Floats<N> wide;
  UNROLL for (int i = 0; i < N; i++) { wide.v[i] = static_cast<float>(pack.v[i]); }
  return wide;
}

// COUNT times eight values as floats, those at p + `apart` * i but none behind p + last, from any
// address: one test for all, so that all are asked for at once.
template <int COUNT, typename T>
FUNC Floats<8 * COUNT> load_many(const GLOBAL T* p, int apart, int last) {
  Floats<8 * COUNT> wide;
#ifdef VECTOR_ALIGNED
  if (VECTOR_ALIGNED(p, sizeof(Pack<T, 8>)) && last % 8 == 0) {
    UNROLL for (int c = 0; c < COUNT; c++) {
      const Pack<T, 8> pack = load_pack<8>(p + metal::min(apart * c, last));
      UNROLL for (int i = 0; i < 8; i++) { wide.v[8 * c + i] = static_cast<float>(pack.v[i]); }
    }
    return wide;
  }
#endif
  UNROLL for (int i = 0; i < 8 * COUNT; i++) {
    wide.v[i] = static_cast<float>(p[metal::min(apart * (i / 8), last) + i % 8]);
  }
  return wide;
}

template <int MODE, typename S>
FUNC float scale_of(S stored) {
  if (MODE == 0) { return static_cast<float>(stored); }
  return float_of(static_cast<int>(static_cast<float>(stored)) << 23) * FP4_UNIT;
}

// The sums over all lanes of COUNT numbers each, a power of two: lane l gets that of number
// place_of<COUNT>(l). Neighbours are added first, whatever COUNT is.
template <int COUNT>
FUNC float sums_of(Floats<COUNT> part, int lane) {
  UNROLL for (int step = 0; step < 5; step++) {
    const int half = (COUNT >> step) / 2;
    const bool is_odd = ((lane >> step) & 1) != 0;
    if (half == 0) { part.v[0] += simd_shuffle_xor(part.v[0], static_cast<ushort>(1 << step)); }
    UNROLL for (int i = 0; i < COUNT / 2; i++) {
      if (i < half) {
        const float kept = is_odd ? part.v[i + half] : part.v[i];
        const float sent = is_odd ? part.v[i] : part.v[i + half];
        part.v[i] = kept + simd_shuffle_xor(sent, static_cast<ushort>(1 << step));
      }
    }
  }
  return part.v[0];
}

template <int COUNT>
FUNC int place_of(int lane) {
  int place = 0;
  UNROLL for (int bit = 1; bit < COUNT; bit *= 2) { place = 2 * place + ((lane / bit) & 1); }
  return place;
}

// Where value k of a hidden row of so many lies. It has parts of 256 * WORDS values, 8 * WORDS of
// them a lane, which takes them as quads; those that lanes take at the same time are neighbours.
template <int WORDS>
FUNC int hidden_place(int k, int width) {
  const int start = k - k % (256 * WORDS);
  const int lanes = metal::min(32, (width - start) / (8 * WORDS));
  const int own = k % (256 * WORDS) / (8 * WORDS);
  const int quad = k % (8 * WORDS) / 4;
  return start + 4 * (quad * lanes + own) + k % 4;
}

// Activations of a gate: 1 is silu, 2 gelu in its tanh form.
template <int KIND>
FUNC float activated(float x) {
  if (KIND == 1) { return x / (1.0f + metal::precise::exp(-x)); }
  const float inner = 0.7978845608028654f * metal::fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + metal::precise::tanh(inner));
}

// Both halves of a hidden layer joined; 3 is clamped: (up + 1) * gate * sigmoid(alpha * gate).
template <int KIND>
FUNC float joined(float gate, float up, float alpha, float limit) {
  if (KIND != 3) { return activated<KIND>(gate) * up; }
  const float low = metal::min(gate, limit);
  const float bound = metal::max(-limit, metal::min(up, limit));
  return (bound + 1.0f) * low / (1.0f + metal::precise::exp(-alpha * low));
}

FUNC float exponential(float x) { return metal::precise::exp(x); }

// An expert, and its share of a row.
struct Choice {
  int expert;
  float share;
};

#define NO_KEY (-2147483647 - 1)

// A number that orders as a score does; both zeros have the same.
FUNC int key_of(float score) {
  const int bits = float_bits(score + 0.0f);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

FUNC float score_of(int key) { return float_of(key < 0 ? key ^ 0x7fffffff : key); }

// What experts a row may have, as bits of groups: the KEPT ones whose best keys are the highest.
template <int E, int VALUES, int GROUPS, int KEPT>
FUNC uint kept_groups(Floats<VALUES> score, int lane) {
  int own = NO_KEY;
  for (int group = 0; group < GROUPS; group++) {
    int best = NO_KEY;
    UNROLL for (int i = 0; i < VALUES; i++) {
      const int expert = lane + 32 * i;
      if (expert < E && expert / (E / GROUPS) == group) {
        best = metal::max(best, key_of(score.v[i]));
      }
    }
    best = simd_max(best);
    if (lane == group) { own = best; }
  }
  uint kept = 0u;
  for (int turn = 0; turn < KEPT; turn++) {
    const int highest = simd_max(own);
    const int group = -simd_max(own == highest ? -lane : -31);
    kept = kept | (1u << group);
    if (lane == group) { own = NO_KEY; }
  }
  return kept;
}

// The TOP largest of E scores in rank order, the lower expert first among equals, and their shares
// of the softmax: over these alone if RENORMALISE, else over all. Lane r gets rank r; the scores
// of the experts lane + 32 i are its own. Where `ranks` is less than TOP, only the first experts
// are found, and no shares.
template <int E, int TOP, int VALUES, bool RENORMALISE, int GROUPS, int KEPT>
FUNC Choice ranked(Floats<VALUES> score, int lane, int ranks) {
  uint kept = 0xffffffffu;
  if (GROUPS > 1) { kept = kept_groups<E, VALUES, GROUPS, KEPT>(score, lane); }
  int keys[VALUES];
  UNROLL for (int i = 0; i < VALUES; i++) {
    const int expert = lane + 32 * i;
    const bool may = expert < E && (GROUPS == 1 || ((kept >> (expert / (E / GROUPS))) & 1u) != 0u);
    keys[i] = may ? key_of(score.v[i]) : NO_KEY;
  }
  int first = NO_KEY;
  int own = NO_KEY;
  Choice choice;
  choice.expert = 0;
  for (int rank = 0; rank < ranks; rank++) {
    int best = NO_KEY;
    UNROLL for (int i = 0; i < VALUES; i++) { best = metal::max(best, keys[i]); }
    const int highest = simd_max(best);
    int index = E - 1;
    UNROLL for (int i = VALUES - 1; i >= 0; i--) {
      if (keys[i] == highest) { index = metal::min(lane + 32 * i, E - 1); }
    }
    index = -simd_max(-index);
    UNROLL for (int i = 0; i < VALUES; i++) {
      if (index == lane + 32 * i) { keys[i] = NO_KEY; }
    }
    if (rank == 0) { first = highest; }
    if (rank == lane) {
      own = highest;
      choice.expert = index;
    }
  }
  const float top = score_of(first);
  choice.share = lane < TOP ? exponential(score_of(own) - top) : 0.0f;
  float part = choice.share;
  if (!RENORMALISE) {
    part = 0.0f;
    UNROLL for (int i = 0; i < VALUES; i++) {
      if (lane + 32 * i < E) { part += exponential(score.v[i] - top); }
    }
  }
  choice.share = choice.share / simd_sum(part);
  return choice;
}
