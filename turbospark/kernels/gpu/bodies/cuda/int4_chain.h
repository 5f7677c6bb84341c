// The second half of a layer for M rows: hidden = residual + x O; inner = act(gate y) * up y with
// y = norm(hidden); y = hidden + inner D. Weights have 4 bits in groups of 64. With POST_NORMS what
// O and D give is normed before it is added: every block that goes on to `inner` does so for
// itself, and one more phase of M rows does so at the end.
//
// Tiles of columns of the phases are numbered in this order, and blocks take numbers from a
// counter as they go. Who has a tile of a phase waits until the phase before is complete, so it
// waits only for smaller numbers, and these all belong to blocks that run already: however few
// blocks run at once, the smallest unfinished tile is never one that waits.
//
// A block of 8 warps makes a tile at a time. Each warp takes every eighth step of STEP groups, and
// copies slices of its weights into a ring of its own, of its tile and then of the next one, whose
// phase need not have begun.
extern __shared__ __align__(128) unsigned char shared[];
using X = TYPE_x;
using S = TYPE_scales0;
constexpr int STEP = 4;
constexpr int WARPS = 8;
using Layout = Slice<STEP, S>;
constexpr int SLOT = Layout::code_bytes + Layout::scale_bytes;
constexpr int END0 = C / 16;
constexpr int END1 = END0 + I / 16;
constexpr int END2 = END1 + C / (16 * TALL);
constexpr int END3 = END2 + (POST_NORMS ? M : 0);
constexpr int LAST = POST_NORMS ? 3 : 2;
constexpr int DONE = 4;
constexpr int LINE = 32;  // counters lie apart: numbers taken, then tiles made of each phase

const int index = static_cast<int>(thread_index_in_threadgroup);
const int lane = index % 32;
const int warp = index / 32;
const int row_of_lane = lane / 4;
const int quarter = lane % 4;
const int row_of_x = row_of_lane < M ? row_of_lane : M - 1;

const uint ring = shared_address(shared) + warp * RING * SLOT;
const uint staged_x = shared_address(shared) + WARPS * RING * SLOT;
SHARED_PTR float* const sums =
    reinterpret_cast<SHARED_PTR float*>(shared + WARPS * RING * SLOT + X_BYTES);
SHARED_PTR int* const queue =
    reinterpret_cast<SHARED_PTR int*>(sums + 2 * 2 * WARPS * 16 * M);
GLOBAL X* const hidden = scratch;
GLOBAL X* const inner = scratch + M * C;
GLOBAL X* const unnormed = inner + M * I;

auto phase_of = [&](int tile) {
  return tile < END0 ? 0 : tile < END1 ? 1 : tile < END2 ? 2 : tile < END3 ? 3 : DONE;
};

int turn = 0;   // tiles that this block has made
int tile = 0;   // the one in hand
int taken = 0;  // of one thread: the number behind the next tile's

int fetched = 0;
int used = 0;
int fetched_slot = 0;
int used_slot = 0;
int aimed_turn = 0;
int aimed_phase = 0;
int aimed_row = 0;
int aimed_step = 0;
int aimed_steps = 0;
int aimed_slice = 0;

auto aim = [&](int at) {
  aimed_phase = phase_of(at);
  aimed_row = aimed_phase == 0   ? 16 * at
              : aimed_phase == 1 ? 16 * (at - END0)
                                 : 16 * TALL * (at - END1);
  const int groups = aimed_phase == 0 ? K / 64 : aimed_phase == 1 ? C / 64 : I / 64;
  aimed_steps = aimed_phase > 2 ? 0 : (groups + STEP - 1) / STEP;
  aimed_step = warp;
  aimed_slice = 0;
};

auto fetch = [&]() {
  const bool is_second = aimed_slice == 1;
  const bool is_first_phase = aimed_phase == 0;
  const bool is_pair = aimed_phase == 1;
  fetch_slice<STEP, HAS_BIASES, S>(
      ring + fetched_slot * SLOT,
      is_first_phase ? codes0 : !is_pair ? codes3 : is_second ? codes2 : codes1,
      is_first_phase ? scales0 : !is_pair ? scales3 : is_second ? scales2 : scales1,
      is_first_phase ? biases0 : !is_pair ? biases3 : is_second ? biases2 : biases1,
      aimed_row + (is_pair ? 0 : 16 * aimed_slice), 0x7fffffff, aimed_step,
      is_first_phase ? K / 64 : is_pair ? C / 64 : I / 64, lane);
  end_of_copies();
  fetched++;
  fetched_slot = fetched_slot + 1 == RING ? 0 : fetched_slot + 1;
  aimed_slice++;
  if (aimed_slice == (is_first_phase ? 1 : is_pair ? 2 : TALL)) {
    aimed_slice = 0;
    aimed_step += WARPS;
  }
};

auto refill = [&]() {
  while (fetched - used < RING) {
    if (aimed_step < aimed_steps) {
      fetch();
    } else {
      if (aimed_turn > turn) { break; }
      const int next = simd_broadcast(peek(queue + (aimed_turn + 1) % 4), 0);
      if (next < 0) { break; }
      aim(next);
      aimed_turn++;
    }
  }
};

auto make_tile = [&](auto number) {
  constexpr int PHASE = decltype(number)::value;
  constexpr int INNER = PHASE == 0 ? K : PHASE == 1 ? C : I;
  constexpr int GROUPS = INNER / 64;
  constexpr int STEPS = (GROUPS + STEP - 1) / STEP;
  constexpr int MATRICES_HERE = PHASE == 1 ? 2 : 1;
  constexpr int TALL_HERE = PHASE == 2 ? TALL : 1;
  constexpr int SLICES = MATRICES_HERE * TALL_HERE;
  constexpr int TILE = 16 * TALL_HERE;
  constexpr bool HAS_SCALES = GROUPS % STEP == 0;
  constexpr bool IS_STAGED = PHASE == 0 ? STAGED_X : PHASE == 1 ? true : STAGED_INNER;
  const int first_row = TILE * (tile - (PHASE == 0 ? 0 : PHASE == 1 ? END0 : END1));

  const int element = (WARPS - 1 - warp) * 32 + lane;
  const int m = element / TILE;
  const int n = first_row + element % TILE;
  float extra = 0.0f;
  if (element < TILE * M) {
    if constexpr (PHASE == 0 && !POST_NORMS) { extra = static_cast<float>(residual[m * C + n]); }
    if constexpr (PHASE == 2 && !POST_NORMS) { extra = static_cast<float>(hidden[m * C + n]); }
  }
  if (index == 0) { taken = take_number(counters); }

  float total[SLICES][4];
  UNROLL for (int slice = 0; slice < SLICES; slice++) {
    UNROLL for (int i = 0; i < 4; i++) { total[slice][i] = 0.0f; }
  }
  const GLOBAL X* const rows = PHASE == 0 ? x : PHASE == 1 ? hidden : inner;
  const GLOBAL X* const direct_x = rows + row_of_x * INNER + quarter * 16;
  const uint x_of_lane = staged_x + row_of_x * row_bytes(INNER) + quarter * 16;

  for (int step = warp; step < STEPS; step += WARPS) {
    Pack<uint, 4> words[STEP][2];
    if constexpr (!IS_STAGED) {
      UNROLL for (int j = 0; j < STEP; j++) {
        const int group = HAS_SCALES ? step * STEP + j : metal::min(step * STEP + j, GROUPS - 1);
        words[j][0] = load_eight(direct_x + group * 64);
        words[j][1] = load_eight(direct_x + group * 64 + 8);
      }
    }
    float scale[SLICES][2][STEP];
    float offset[SLICES][2][STEP];
    if constexpr (!HAS_SCALES) {
      UNROLL for (int slice = 0; slice < SLICES; slice++) {
        read_scales<HAS_BIASES>(
            scale[slice], offset[slice],
            PHASE == 0 ? scales0 : PHASE == 2 ? scales3 : slice == 1 ? scales2 : scales1,
            PHASE == 0 ? biases0 : PHASE == 2 ? biases3 : slice == 1 ? biases2 : biases1,
            first_row + slice % TALL_HERE * 16 + row_of_lane, 0x7fffffff, step, GROUPS);
      }
    }

    const int newer = fetched - used - SLICES;
    if (newer >= RING - SLICES) {
      wait_for_copies<RING - SLICES>();
    } else if (newer >= (RING - SLICES) / 2) {
      wait_for_copies<(RING - SLICES) / 2>();
    } else {
      wait_for_copies<0>();
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    uint slot[SLICES];
    UNROLL for (int slice = 0; slice < SLICES; slice++) {
      slot[slice] = ring + used_slot * SLOT;
      used_slot = used_slot + 1 == RING ? 0 : used_slot + 1;
      if constexpr (HAS_SCALES) {
        take_scales<HAS_BIASES, S>(scale[slice], offset[slice], slot[slice], row_of_lane);
      }
    }
    UNROLL for (int j = 0; j < STEP; j++) {
      if (HAS_SCALES || step * STEP + j < GROUPS) {
        Pack<uint, 4> low;
        Pack<uint, 4> high;
        if constexpr (IS_STAGED) {
          low = load_shared<Pack<uint, 4>>(x_of_lane + (step * STEP + j) * 128);
          high = load_shared<Pack<uint, 4>>(x_of_lane + (step * STEP + j) * 128 + 64);
        } else {
          low = in_code_order(words[j][0]);
          high = in_code_order(words[j][1]);
        }
        float x_sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        add_words<X>(x_sum, low);
        add_words<X>(x_sum, high);
        UNROLL for (int slice = 0; slice < SLICES; slice++) {
          add_group<X, HAS_BIASES, ZERO>(total[slice], slot[slice], j, row_of_lane, quarter, low,
                                         high, x_sum, scale[slice], offset[slice]);
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    used += SLICES;
    if (step == 0 && lane == 0) {
      tell(queue + (turn + 2) % 4, -1);
      tell(queue + (turn + 1) % 4, taken);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    refill();
  }

  SHARED_PTR float* const own = sums + turn % 2 * (2 * WARPS * 16 * M);
  UNROLL for (int slice = 0; slice < SLICES; slice++) {
    UNROLL for (int i = 0; i < 4; i++) {
      const int row = 2 * quarter + i % 2;
      const int column = slice % TALL_HERE * 16 + row_of_lane + i / 2 * 8;
      if (row < M) {
        own[((slice / TALL_HERE * WARPS + warp) * M + row) * TILE + column] = total[slice][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (element < TILE * M) {
    float result[MATRICES_HERE];
    UNROLL for (int matrix = 0; matrix < MATRICES_HERE; matrix++) {
      result[matrix] = 0.0f;
      UNROLL for (int other = 0; other < WARPS; other++) {
        result[matrix] += own[(matrix * WARPS + other) * (TILE * M) + element];
      }
      if ((HAS_BIAS >> (PHASE == 2 ? 3 : PHASE + matrix)) % 2 == 1) {
        result[matrix] += static_cast<float>(
            (PHASE == 0 ? bias0 : PHASE == 2 ? bias3 : matrix == 1 ? bias2 : bias1)[n]);
      }
    }
    float value = result[0];
    if constexpr (PHASE == 1) { value = activate<ACTIVATION>(value) * result[MATRICES_HERE - 1]; }
    value += extra;
    if constexpr (PHASE == 1) {
      inner[m * I + n] = static_cast<X>(value);
    } else if constexpr (POST_NORMS) {
      unnormed[m * C + n] = static_cast<X>(value);
    } else if constexpr (PHASE == 0) {
      hidden[m * C + n] = static_cast<X>(value);
    } else {
      y[m * C + n] = static_cast<X>(value);
    }
  }
};

auto stage_plain = [&](auto width, const GLOBAL X* from, float (&squares)[M]) {
  constexpr int WIDTH = decltype(width)::value;
  UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
  for (int chunk = index; chunk < WIDTH / 8; chunk += 256) {
    UNROLL for (int m = 0; m < M; m++) {
      const auto words = in_code_order(load_eight(from + m * WIDTH + chunk * 8));
      squares[m] = add_squares<X>(squares[m], words);
      store_shared(staged_x + place_of_chunk(chunk) + m * row_bytes(WIDTH), words);
    }
  }
};

auto stage_stream = [&]() {
  float squares[M];
  if constexpr (POST_NORMS) {
    UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
    add_normed_rows<M, C>(
        unnormed, residual, first_norm, numbers[1], sums, index,
        [&](int m, int chunk, const Pack<uint, 4>& words) {
          if (tile == END0) { store_pack<8>(hidden + m * C + chunk * 8, values_of<X>(words)); }
          const Pack<uint, 4> ordered = in_code_order(words);
          squares[m] = add_squares<X>(squares[m], ordered);
          store_shared(staged_x + place_of_chunk(chunk) + m * row_bytes(C), ordered);
        });
  } else {
    stage_plain(Number<C>{}, hidden, squares);
  }
  Chunks<1, C, 1, TYPE_norm_weight> factor;
  if constexpr (HAS_NORM_WEIGHT) { factor.ask(norm_weight, index); }
  norm_rows<X, M, C, HAS_NORM_WEIGHT>(staged_x, squares, factor, norm_weight, numbers[0], sums,
                                      index);
};

auto close_row = [&]() {
  if constexpr (POST_NORMS) {
    const int start = (tile - END2) * C;
    if (index == 0) {
      tell(queue + (turn + 2) % 4, -1);
      tell(queue + (turn + 1) % 4, take_number(counters));
    }
    add_normed_rows<1, C>(
        unnormed + start, hidden + start, last_norm, numbers[2], sums, index,
        [&](int, int chunk, const Pack<uint, 4>& words) {
          store_pack<8>(y + start + chunk * 8, values_of<X>(words));
        });
  }
};

if (index == 0) {
  UNROLL for (int i = 1; i < 4; i++) { tell(queue + i, -1); }
  tell(queue, take_number(counters));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
tile = peek(queue);
aim(tile);
refill();

int phase = -1;
int made = 0;
while (true) {
  const int next_phase = phase_of(tile);
  if (next_phase != phase) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index == 0) {
      if (made > 0 && phase < LAST) { announce(counters + (phase + 1) * LINE, made); }
      if (next_phase == 1) { wait_until(counters + LINE, END0); }
      if (next_phase == 2) { wait_until(counters + 2 * LINE, END1 - END0); }
      if (next_phase == 3) { wait_until(counters + 3 * LINE, END2 - END1); }
    }
    phase = next_phase;
    made = 0;
    if (phase == DONE) { break; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float squares[M];
    if (phase == 0) {
      if constexpr (STAGED_X) { stage_plain(Number<K>{}, x, squares); }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else if (phase == 1) {
      stage_stream();
    } else if (phase == 2) {
      if constexpr (STAGED_INNER) { stage_plain(Number<I>{}, inner, squares); }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  if (phase == 0) {
    make_tile(Number<0>{});
  } else if (phase == 1) {
    make_tile(Number<1>{});
  } else if (phase == 2) {
    make_tile(Number<2>{});
  } else {
    close_row();
  }
  turn++;
  made++;
  tile = peek(queue + turn % 4);
  refill();
}
