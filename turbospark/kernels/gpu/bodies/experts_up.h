// hidden[M, WIDTH]: joined gate y and up y of every row's TOP best experts, in rank order, I values
// each, and IS values of a shared expert behind them if SHARED_EXPERT; y = norm(x), 4-bit weights
// [E, I, K]. They lie where `hidden_place` says. Every threadgroup ranks the row's scores
// [M, SCORES]; one of them notes weights, ids and the last score behind the hidden rows, which end
// in zeros.
// A threadgroup (32, TEAMS * SPLIT, 1) makes TEAMS * COLUMNS columns of one expert; PER_SLOT of them
// make all; grid z: row. y has PARTS parts of 256 * WORDS values, which the SPLIT SIMD-groups of a
// team take in TURNS turns: each holds its part while codes pass by, AHEAD columns at once; the sums
// of parts meet in the end. numbers: eps, alpha, limit.
SHARED int picked[1];
SHARED float squares_of[PARTS];
SHARED float sums[TEAMS * PARTS * 2 * COLUMNS];
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int member = static_cast<int>(simdgroup_index_in_threadgroup) % SPLIT;
const int team = static_cast<int>(simdgroup_index_in_threadgroup) / SPLIT;
const int row = static_cast<int>(threadgroup_position_in_grid.z);
const int place = static_cast<int>(threadgroup_position_in_grid.y);
const int slot = metal::min(place / PER_SLOT, TOP);
const int first = ((place - slot * PER_SLOT) * TEAMS + team) * COLUMNS;
const bool is_shared = slot == TOP;
const int count = is_shared ? IS : I;
#if SHARED_EXPERT
#define OF_UP(name) (is_shared ? shared_##name : name)
#else
#define OF_UP(name) name
#endif
#if SHARED_NORM
#define NORM_WEIGHT (is_shared ? shared_norm_weight : norm_weight)
#else
#define NORM_WEIGHT norm_weight
#endif
const GLOBAL uint* gate_at = OF_UP(gate_codes);
const GLOBAL uint* up_at = OF_UP(up_codes);
UNROLL for (int turn = 0; turn < TURNS; turn++) {
  const int part = turn * SPLIT + member;
  const int start = part * 256 * WORDS;
  const int lanes = metal::max(0, metal::min(32, (K - start) / (8 * WORDS)));
  const int k = metal::min(start + lane * 8 * WORDS, K - 8 * WORDS);
  Floats<8> ready[WORDS];
  float sum = 0.0f;
  float squares = 0.0f;
  const Floats<8 * WORDS> given = load_many<WORDS>(x + row * K + k, 8, 8 * WORDS - 8);
  Floats<8 * WORDS> factor;
  if (HAS_NORM_WEIGHT) { factor = load_many<WORDS>(NORM_WEIGHT + k, 8, 8 * WORDS - 8); }
  UNROLL for (int w = 0; w < WORDS; w++) {
    Floats<8> value;
    UNROLL for (int i = 0; i < 8; i++) {
      value.v[i] = lane < lanes ? given.v[8 * w + i] : 0.0f;
      if (NORM) { squares = metal::fma(value.v[i], value.v[i], squares); }
      if (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[8 * w + i]; }
    }
    sum += sum_of(value);
    ready[w] = ready_of<MODE>(value);
  }
  if (NORM) {
    squares = simd_sum(squares);
    if (team == 0 && lane == 0 && part < PARTS) { squares_of[part] = squares; }
  }
  if (turn == 0) {
    if (!is_shared && team == 0 && member == 0) {
      Floats<VALUES> score;
      UNROLL for (int i = 0; i < VALUES; i++) {
        score.v[i] = scores[row * SCORES + metal::min(lane + 32 * i, E - 1)];
      }
      const int ranks = place == 0 ? TOP : slot + 1;
      const Choice choice =
          ranked<E, TOP, VALUES, RENORMALISE, GROUPS, KEPT>(score, lane, ranks);
      if (lane == slot) { picked[0] = choice.expert; }
      if (place == 0) {
        const int notes = row * WIDTH + TOP * I + IS;
        if (lane < TOP) {
          const float scale = HAS_SCALE ? static_cast<float>(expert_scale[choice.expert]) : 1.0f;
          hidden[notes + lane] = HAS_SCALE ? choice.share * scale : choice.share;
          hidden[notes + TOP + lane] = static_cast<float>(choice.expert);
        }
        if (lane < WIDTH - TOP * I - IS - 2 * TOP) {
          hidden[notes + 2 * TOP + lane] = lane == 0 ? scores[row * SCORES + SCORES - 1] : 0.0f;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const int above = is_shared ? 0 : picked[0] * I;
  for (int c = 0; c < COLUMNS; c += AHEAD) {
    Pack<uint, WORDS> gate_words[AHEAD];
    Pack<uint, WORDS> up_words[AHEAD];
    float gate_scale[AHEAD];
    float gate_offset[AHEAD];
    float up_scale[AHEAD];
    float up_offset[AHEAD];
    Floats<2 * AHEAD> made;
    UNROLL for (int j = 0; j < AHEAD; j++) {
      const int column = above + metal::min(first + c + j, count - 1);
      const int group = column * (K / GROUP) + k / GROUP;
      gate_words[j] = load_pack<WORDS>(gate_at + column * (K / 8) + k / 8);
      up_words[j] = load_pack<WORDS>(up_at + column * (K / 8) + k / 8);
      gate_scale[j] = scale_of<MODE>(OF_UP(gate_scales)[group]);
      up_scale[j] = scale_of<MODE>(OF_UP(up_scales)[group]);
      gate_offset[j] = HAS_BIASES ? static_cast<float>(OF_UP(gate_biases)[group])
                                  : gate_scale[j] * -static_cast<float>(ZERO);
      up_offset[j] = HAS_BIASES ? static_cast<float>(OF_UP(up_biases)[group])
                                : up_scale[j] * -static_cast<float>(ZERO);
    }
    const float none = none_when_asked();
    UNROLL for (int j = 0; j < AHEAD; j++) {
      float gate = none;
      float up = none;
      UNROLL for (int w = 0; w < WORDS; w++) {
        gate = add_codes<MODE>(gate_words[j].v[w], ready[w], gate);
        up = add_codes<MODE>(up_words[j].v[w], ready[w], up);
      }
      made.v[j] = metal::fma(gate_scale[j], gate, gate_offset[j] * sum);
      made.v[AHEAD + j] = metal::fma(up_scale[j], up, up_offset[j] * sum);
    }
    const float whole = sums_of(made, lane);
    if (lane < 2 * AHEAD && part < PARTS) {
      const int number = place_of<2 * AHEAD>(lane);
      const int half = ((team * PARTS + part) * 2 + number / AHEAD) * COLUMNS;
      sums[half + c + number % AHEAD] = whole;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int column = first + lane;
if (member == 0 && lane < COLUMNS && column < count) {
  float squares = 0.0f;
  float gate = 0.0f;
  float up = 0.0f;
  UNROLL for (int part = 0; part < PARTS; part++) {
    if (NORM) { squares += squares_of[part]; }
    gate += sums[(team * PARTS + part) * 2 * COLUMNS + lane];
    up += sums[((team * PARTS + part) * 2 + 1) * COLUMNS + lane];
  }
  if (NORM) {
    const float mean = metal::fma(squares, 1.0f / static_cast<float>(K), numbers[0]);
    const float inverse = metal::precise::rsqrt(mean);
    gate = gate * inverse;
    up = up * inverse;
  }
  if (HAS_BIAS && !is_shared) {
    gate += static_cast<float>(gate_bias[picked[0] * I + column]);
    up += static_cast<float>(up_bias[picked[0] * I + column]);
  }
  hidden[row * WIDTH + slot * I + hidden_place<DOWN_WORDS>(column, count)] =
      joined<ACTIVATION>(gate, up, numbers[1], numbers[2]);
}
#undef OF_UP
#undef NORM_WEIGHT
