// hidden[M, WIDTH]: joined gate y and up y of every row's TOP best experts, in rank order, I values
// each, and IS values of a shared expert behind them if SHARED_EXPERT; y = norm(x), 4-bit weights
// [E, I, K]. Every threadgroup ranks the row's scores [M, SCORES]; one of them notes weights, ids
// and the last score behind the hidden rows, which end in zeros.
// A SIMD-group makes ROWS columns, AHEAD packs of a lane at a time; an expert's columns are those
// of PER_SLOT SIMD-groups. Threadgroup (32, SIMDGROUPS, 1); grid z: row. numbers: eps, alpha, limit.
SHARED int picked[1];
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int row = static_cast<int>(thread_position_in_grid.z);
const int place = static_cast<int>(thread_position_in_grid.y);
const int slot = metal::min(place / PER_SLOT, TOP);
const int first = (place - slot * PER_SLOT) * ROWS;
const bool is_shared = slot == TOP;
if (!is_shared && simdgroup_index_in_threadgroup == 0) {
  Floats<VALUES> score;
  UNROLL for (int i = 0; i < VALUES; i++) {
    score.v[i] = scores[row * SCORES + metal::min(lane + 32 * i, E - 1)];
  }
  const Choice choice = ranked<E, TOP, VALUES, RENORMALISE, GROUPS, KEPT>(score, lane);
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
const int expert = is_shared ? 0 : picked[0];
const int count = is_shared ? IS : I;
#if SHARED_EXPERT
const GLOBAL uint* gate_at = is_shared ? shared_gate_codes : gate_codes;
const GLOBAL uint* up_at = is_shared ? shared_up_codes : up_codes;
#define STORED(name, at) static_cast<float>(is_shared ? shared_##name[at] : name[at])
#define SCALED(name, at) scale_of<MODE>(is_shared ? shared_##name[at] : name[at])
#else
const GLOBAL uint* gate_at = gate_codes;
const GLOBAL uint* up_at = up_codes;
#define STORED(name, at) static_cast<float>(name[at])
#define SCALED(name, at) scale_of<MODE>(name[at])
#endif

float gate[ROWS];
float up[ROWS];
float squares = 0.0f;
UNROLL for (int r = 0; r < ROWS; r++) {
  gate[r] = 0.0f;
  up[r] = 0.0f;
}
for (int start = 0; start < K; start += AHEAD * 32 * 8 * WORDS) {
  Pack<uint, WORDS> gate_words[AHEAD * ROWS];
  Pack<uint, WORDS> up_words[AHEAD * ROWS];
  float gate_scale[AHEAD * ROWS];
  float gate_offset[AHEAD * ROWS];
  float up_scale[AHEAD * ROWS];
  float up_offset[AHEAD * ROWS];
  UNROLL for (int j = 0; j < AHEAD * ROWS; j++) {
    const int k = metal::min(start + (j / ROWS * 32 + lane) * 8 * WORDS, K - 8 * WORDS);
    const int column = expert * I + metal::min(first + j % ROWS, count - 1);
    const int group = column * (K / GROUP) + k / GROUP;
    gate_words[j] = load_pack<WORDS>(gate_at + column * (K / 8) + k / 8);
    up_words[j] = load_pack<WORDS>(up_at + column * (K / 8) + k / 8);
    gate_scale[j] = SCALED(gate_scales, group);
    up_scale[j] = SCALED(up_scales, group);
    gate_offset[j] =
        HAS_BIASES ? STORED(gate_biases, group) : gate_scale[j] * -static_cast<float>(ZERO);
    up_offset[j] = HAS_BIASES ? STORED(up_biases, group) : up_scale[j] * -static_cast<float>(ZERO);
  }
  UNROLL for (int a = 0; a < AHEAD; a++) {
    const int k = start + (a * 32 + lane) * 8 * WORDS;
    if (k < K) {
      UNROLL for (int w = 0; w < WORDS; w++) {
        Floats<8> value = load_floats<8>(x + row * K + k + 8 * w);
        Floats<8> factor;
        if (HAS_NORM_WEIGHT) {
#if SHARED_NORM
          factor = load_floats<8>((is_shared ? shared_norm_weight : norm_weight) + k + 8 * w);
#else
          factor = load_floats<8>(norm_weight + k + 8 * w);
#endif
        }
        UNROLL for (int i = 0; i < 8; i++) {
          if (NORM) { squares = metal::fma(value.v[i], value.v[i], squares); }
          if (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[i]; }
        }
        const float sum = sum_of(value);
        const Floats<8> ready = ready_of<MODE>(value);
        UNROLL for (int r = 0; r < ROWS; r++) {
          const int j = a * ROWS + r;
          const float gate_dot = dot_codes<MODE>(gate_words[j].v[w], ready);
          const float up_dot = dot_codes<MODE>(up_words[j].v[w], ready);
          gate[r] = metal::fma(gate_scale[j], gate_dot, metal::fma(gate_offset[j], sum, gate[r]));
          up[r] = metal::fma(up_scale[j], up_dot, metal::fma(up_offset[j], sum, up[r]));
        }
      }
    }
  }
}
float inverse = 1.0f;
if (NORM) {
  const float mean = metal::fma(simd_sum(squares), 1.0f / static_cast<float>(K), numbers[0]);
  inverse = metal::precise::rsqrt(mean);
}
UNROLL for (int r = 0; r < ROWS; r++) {
  float gate_value = simd_sum(gate[r]) * inverse;
  float up_value = simd_sum(up[r]) * inverse;
  if (lane == 0 && first + r < count) {
    if (HAS_BIAS && !is_shared) {
      gate_value += static_cast<float>(gate_bias[expert * I + first + r]);
      up_value += static_cast<float>(up_bias[expert * I + first + r]);
    }
    hidden[row * WIDTH + slot * I + first + r] =
        joined<ACTIVATION>(gate_value, up_value, numbers[1], numbers[2]);
  }
}
