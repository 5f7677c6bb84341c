// Heads of D numbers, a SIMD-group each: norms and rotation. A lane has both numbers of each of its
// TURNS pairs, then those that do not rotate: SIZE in all.

// Where number j of a lane stands in its head; D where there is none.
template <int D, int PAIRS, bool IS_TRADITIONAL>
FUNC int head_place(int j, int lane) {
  const int turns = (PAIRS + 31) / 32;
  const int pair = lane + j % turns * 32;
  const int rotated = IS_TRADITIONAL ? 2 * pair + j / turns : pair + j / turns * PAIRS;
  const int d = j < 2 * turns ? rotated : 2 * PAIRS + lane + (j - 2 * turns) * 32;
  const bool is_held = j < 2 * turns ? pair < PAIRS : d < D;
  return is_held ? d : D;
}

// The numbers of a head, or of its norm's weight.
template <int D, int PAIRS, int SIZE, bool IS_TRADITIONAL, typename X>
FUNC Floats<SIZE> head_numbers(const GLOBAL X* from, int lane) {
  Floats<SIZE> value;
  UNROLL for (int j = 0; j < SIZE; j++) {
    const int d = head_place<D, PAIRS, IS_TRADITIONAL>(j, lane);
    value.v[j] = d < D ? static_cast<float>(from[d]) : 0.0f;
  }
  return value;
}

template <int SIZE>
FUNC Floats<SIZE> head_ones() {
  Floats<SIZE> ones;
  UNROLL for (int j = 0; j < SIZE; j++) { ones.v[j] = 1.0f; }
  return ones;
}

// value / root mean square * factor
template <int D, int SIZE>
FUNC Floats<SIZE> normed_head(Floats<SIZE> value, Floats<SIZE> factor, float eps) {
  float square_sum = 0.0f;
  UNROLL for (int j = 0; j < SIZE; j++) {
    square_sum = metal::fma(value.v[j], value.v[j], square_sum);
  }
  square_sum = simd_sum(square_sum);
  const float scale =
      metal::precise::rsqrt(metal::fma(square_sum, 1.0f / static_cast<float>(D), eps));
  UNROLL for (int j = 0; j < SIZE; j++) { value.v[j] *= scale * factor.v[j]; }
  return value;
}

// Cosines of a lane's pairs at a position, then sines. Angles are float32 products, as models were
// trained.
template <int PAIRS, int TURNS>
FUNC Floats<2 * TURNS> head_turns(float position, const GLOBAL float* frequencies, float magnitude,
                                  int lane) {
  Floats<2 * TURNS> turns;
  UNROLL for (int j = 0; j < TURNS; j++) {
    const float frequency = frequencies[metal::min(lane + j * 32, PAIRS - 1)];
    const Floats<2> turn = rotation(position * frequency, magnitude);
    turns.v[j] = turn.v[0];
    turns.v[j + TURNS] = turn.v[1];
  }
  return turns;
}

// Pairs turned; numbers that a lane does not have are 0 and stay so.
template <int TURNS, int SIZE>
FUNC Floats<SIZE> rotated_head(Floats<SIZE> value, Floats<2 * TURNS> turns) {
  UNROLL for (int j = 0; j < TURNS; j++) {
    const float first = value.v[j];
    const float second = value.v[j + TURNS];
    value.v[j] = metal::fma(first, turns.v[j], -(second * turns.v[j + TURNS]));
    value.v[j + TURNS] = metal::fma(second, turns.v[j], first * turns.v[j + TURNS]);
  }
  return value;
}
