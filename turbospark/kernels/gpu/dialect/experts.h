// Helpers of routed experts: ranks, and 4-bit products of one row each.

// Values divided by the power of two at which a code lies in its half word.
FUNC Floats<8> shifted_of(Floats<8> x) {
  UNROLL for (int i = 0; i < 8; i++) {
    x.v[i] = x.v[i] * (1.0f / static_cast<float>(1 << (4 * (i & 3))));
  }
  return x;
}

FUNC float sum_of(Floats<8> x) {
  return ((x.v[0] + x.v[1]) + (x.v[2] + x.v[3])) + ((x.v[4] + x.v[5]) + (x.v[6] + x.v[7]));
}

// Eight codes times eight shifted values.
FUNC float dot_word(uint word, Floats<8> shifted) {
  const uint low = word & 0xffffu;
  const uint high = word >> 16;
  float dot = 0.0f;
  UNROLL for (int i = 0; i < 4; i++) {
    dot = metal::fma(shifted.v[i], small_to_float(low & (15u << (4 * i))), dot);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    dot = metal::fma(shifted.v[i + 4], small_to_float(high & (15u << (4 * i))), dot);
  }
  return dot;
}

// Groups of 4-bit codes: MODE 0 is scale * code + offset, 1 is 2^(scale - 127) * a 4-bit float.
template <int MODE>
FUNC Floats<8> ready_of(Floats<8> x) {
  if (MODE == 0) { return shifted_of(x); }
  UNROLL for (int i = 0; i < 8; i++) { x.v[i] = fp4_ready(x.v[i]); }
  return x;
}

template <int MODE>
FUNC float dot_codes(uint word, Floats<8> ready) {
  if (MODE == 0) { return dot_word(word, ready); }
  float dot = 0.0f;
  UNROLL for (int i = 0; i < 8; i++) {
    dot = metal::fma(ready.v[i], fp4_value(word, i), dot);
  }
  return dot;
}

template <int MODE, typename S>
FUNC float scale_of(S stored) {
  if (MODE == 0) { return static_cast<float>(stored); }
  return float_of(static_cast<int>(static_cast<float>(stored)) << 23) * FP4_UNIT;
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
// of the experts lane + 32 i are its own.
template <int E, int TOP, int VALUES, bool RENORMALISE, int GROUPS, int KEPT>
FUNC Choice ranked(Floats<VALUES> score, int lane) {
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
  for (int rank = 0; rank < TOP; rank++) {
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
