// y[M, N] = x[M, K] times the transpose of 4-bit weights [N, K] in groups of 64, on tensor cores.
// A block of 8 warps makes 8 / WARPS tiles of 16 * TALL columns at a time, and goes on to others:
// WARPS warps share a tile, each taking STEP groups at a time, which it fetches STAGES - 1 steps
// ahead into its own part of shared memory. All eight columns of an mma are there whatever M is, so
// every row of x gets the bits that it would get by itself. Codes enter as 16 + code; the sum of x
// over a group, times 16 scales, takes that off again. With SUMMED every block forms the rows first,
// stream + norm(x), and one of them writes these.
extern __shared__ __align__(128) unsigned char shared[];
using X = TYPE_x;
using S = TYPE_scales0;
constexpr int GROUPS = K / 64;
constexpr int STEPS = (GROUPS + STEP - 1) / STEP;
constexpr bool STAGED_SCALES = GROUPS % STEP == 0;
constexpr int SLICES = MATRICES * TALL;
using Layout = Slice<STEP, S>;
constexpr int SLICE_BYTES = Layout::code_bytes + (STAGED_SCALES ? Layout::scale_bytes : 0);
constexpr int STAGE_BYTES = SLICES * SLICE_BYTES;
constexpr int X_STRIDE = row_bytes(K);
constexpr int X_BYTES = STAGED_X ? M * X_STRIDE : 0;
constexpr int TEAMS = 8 / WARPS;
constexpr int TEAM_THREADS = 32 * WARPS;
constexpr int TILE = 16 * TALL;
constexpr int SHARE = (TILE * M + TEAM_THREADS - 1) / TEAM_THREADS;
constexpr int AT_ONCE = 8;  // chunks of x that a thread has under way
constexpr int ALL_TILES = UNITS_OF_PARTS(TILE);
constexpr int EARLY = STAGED_X ? 1 : STAGES - 1;  // staging x waits in the queue of what is fetched

const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int within = warp % WARPS;
const int team = warp / WARPS;
const int row_of_lane = lane / 4;
const int quarter = lane % 4;
const int row_of_x = row_of_lane < M ? row_of_lane : M - 1;

const uint stages = shared_address(shared) + warp * STAGES * STAGE_BYTES;
const uint staged_x = shared_address(shared) + 8 * STAGES * STAGE_BYTES;
SHARED_PTR float* const sums =
    reinterpret_cast<SHARED_PTR float*>(shared + 8 * STAGES * STAGE_BYTES + X_BYTES);

const int rounds = ((ALL_TILES + TEAMS - 1) / TEAMS - static_cast<int>(blockIdx.x) +
                    static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
const int own_steps = (STEPS - within + WARPS - 1) / WARPS;
const int total_steps = rounds * own_steps;

auto tile_of = [&](int round) {
  const int tile = (static_cast<int>(blockIdx.x) + round * static_cast<int>(gridDim.x)) * TEAMS + team;
  return tile < ALL_TILES ? tile : ALL_TILES - 1;
};

auto find = [&](int tile, int& part, int& row) {
  part = 0;
  UNROLL for (int i = 0; i < PARTS - 1; i++) {
    if (part == i && tile >= UNITS(PART(N, i), TILE)) {
      tile -= UNITS(PART(N, i), TILE);
      part = i + 1;
    }
  }
  row = tile * TILE;
};

int fetched = 0;
int fetched_step = within;
int fetched_round = 0;
int fetched_part = 0;
int fetched_row = 0;
uint fetched_to = stages;
find(tile_of(0), fetched_part, fetched_row);

auto fetch = [&]() {
  if (fetched < total_steps) {
    const int last_row = PART(N, fetched_part) - 1;
    UNROLL for (int slice = 0; slice < SLICES; slice++) {
      fetch_slice<STEP, HAS_BIASES, S>(
          fetched_to + slice * SLICE_BYTES, MATRIX(codes, fetched_part, slice / TALL),
          MATRIX(scales, fetched_part, slice / TALL), MATRIX(biases, fetched_part, slice / TALL),
          fetched_row + slice % TALL * 16, last_row, fetched_step, GROUPS, lane);
    }
    fetched++;
    fetched_to = fetched % STAGES == 0 ? stages : fetched_to + STAGE_BYTES;
    fetched_step += WARPS;
    if (fetched_step >= STEPS && fetched < total_steps) {
      fetched_step = within;
      fetched_round++;
      find(tile_of(fetched_round), fetched_part, fetched_row);
    }
  }
  end_of_copies();
};

// Behind weights, rows and factors of norms would come late.
RowChunks<M, K, AT_ONCE, X> rows;
FactorChunks<K, HAS_NORM_WEIGHT, AT_ONCE, TYPE_norm_weight> factor;
#ifdef SUMMED
RowChunks<M, K, AT_ONCE / 2, X> base;
Chunks<1, K, chunks_at_once(K, M, AT_ONCE / 2), float> branch_factor;
base.ask(stream, threadIdx.x);
branch_factor.ask(branch_norm, threadIdx.x);
const float branch_eps = branch_norm[K];
#endif
if constexpr (STAGED_X) {
  rows.ask(x, threadIdx.x);
  if constexpr (HAS_NORM_WEIGHT) { factor.ask(norm_weight, threadIdx.x); }
}
const float eps = NORM ? numbers[0] : 0.0f;

UNROLL for (int stage = 0; stage < EARLY; stage++) { fetch(); }

#ifdef ZEROS
if (blockIdx.x == 0 && threadIdx.x < ZEROS) { zeros[threadIdx.x] = 0; }
#endif

#ifdef SUMMED
stage_sums<M, K, HAS_NORM_WEIGHT>(
    staged_x, rows, base, branch_factor, factor, x, stream, branch_norm, branch_eps, norm_weight,
    eps, sums, threadIdx.x, [&](int at, const Pack<uint, 4>& words) {
      if (blockIdx.x == 0) {
        store_pack<8>(summed + at, values_of<X>(words));
      }
    });
#else
if constexpr (STAGED_X) {
  stage_rows<M, K, NORM, HAS_NORM_WEIGHT>(staged_x, rows, factor, x, norm_weight, eps, sums,
                                          threadIdx.x);
}
#endif

UNROLL for (int stage = EARLY; stage < STAGES - 1; stage++) { fetch(); }

const uint x_of_lane = staged_x + row_of_x * X_STRIDE + quarter * 16;
const GLOBAL X* const direct_x = x + row_of_x * K + quarter * 16;
uint stage = stages;
int used = 0;

for (int round = 0; round < rounds; round++) {
  int part = 0;
  int first_row = 0;
  find(tile_of(round), part, first_row);
  const int columns = PART(N, part);

  float extra[SHARE];
  UNROLL for (int i = 0; i < SHARE; i++) {
    const int element = i * TEAM_THREADS + within * 32 + lane;
    const int n = first_row + element % TILE;
    extra[i] = 0.0f;
    if (element < TILE * M && n < columns) {
      if constexpr (RESIDUAL) {
        extra[i] = static_cast<float>(residual[element / TILE * N0 + n]);
      }
    }
  }

  float total[SLICES][4];
  UNROLL for (int slice = 0; slice < SLICES; slice++) {
    UNROLL for (int i = 0; i < 4; i++) { total[slice][i] = 0.0f; }
  }

  for (int step = within; step < STEPS; step += WARPS) {
    Pack<uint, 4> words[STEP][2];
    if constexpr (!STAGED_X) {
      UNROLL for (int j = 0; j < STEP; j++) {
        const int group = STAGED_SCALES ? step * STEP + j : metal::min(step * STEP + j, GROUPS - 1);
        words[j][0] = load_eight(direct_x + group * 64);
        words[j][1] = load_eight(direct_x + group * 64 + 8);
      }
    }
    float scale[SLICES][2][STEP];
    float offset[SLICES][2][STEP];
    if constexpr (!STAGED_SCALES) {
      UNROLL for (int slice = 0; slice < SLICES; slice++) {
        read_scales<HAS_BIASES>(scale[slice], offset[slice], MATRIX(scales, part, slice / TALL),
                                MATRIX(biases, part, slice / TALL),
                                first_row + slice % TALL * 16 + row_of_lane, columns - 1, step,
                                GROUPS);
      }
    }

    wait_for_copies<STAGES - 2>();
    __syncwarp();
    fetch();

    if constexpr (STAGED_SCALES) {
      UNROLL for (int slice = 0; slice < SLICES; slice++) {
        take_scales<HAS_BIASES, S>(scale[slice], offset[slice], stage + slice * SLICE_BYTES,
                                   row_of_lane);
      }
    }
    UNROLL for (int j = 0; j < STEP; j++) {
      if (STAGED_SCALES || step * STEP + j < GROUPS) {
        Pack<uint, 4> low;
        Pack<uint, 4> high;
        if constexpr (STAGED_X) {
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
          add_group<X, HAS_BIASES, ZERO>(total[slice], stage + slice * SLICE_BYTES, j, row_of_lane,
                                         quarter, low, high, x_sum, scale[slice], offset[slice]);
        }
      }
    }
    used++;
    stage = used % STAGES == 0 ? stages : stage + STAGE_BYTES;
  }

  SHARED_PTR float* const own = sums + (round % 2 * TEAMS + team) * (SLICES * WARPS * 16 * M);
  UNROLL for (int slice = 0; slice < SLICES; slice++) {
    UNROLL for (int i = 0; i < 4; i++) {
      const int m = 2 * quarter + i % 2;
      const int column = slice % TALL * 16 + row_of_lane + i / 2 * 8;
      if (m < M) {
        own[((slice / TALL * WARPS + within) * M + m) * TILE + column] = total[slice][i];
      }
    }
  }
  if constexpr (TEAMS == 1) {
    __syncthreads();
  } else {
    team_barrier<TEAM_THREADS>(team + 1);
  }
  const int tile =
      (static_cast<int>(blockIdx.x) + round * static_cast<int>(gridDim.x)) * TEAMS + team;
  UNROLL for (int i = 0; i < SHARE; i++) {
    const int element = i * TEAM_THREADS + within * 32 + lane;
    const int n = first_row + element % TILE;
    if (element < TILE * M && n < columns && tile < ALL_TILES) {
      float result[MATRICES];
      UNROLL for (int matrix = 0; matrix < MATRICES; matrix++) {
        result[matrix] = 0.0f;
        UNROLL for (int other = 0; other < WARPS; other++) {
          result[matrix] += own[(matrix * WARPS + other) * (TILE * M) + element];
        }
        if ((HAS_BIAS >> (MATRICES == 2 ? matrix : part)) % 2 == 1) {
          result[matrix] += MATRIX_VALUE(bias, part, matrix, n);
        }
      }
      float value = result[0];
      if constexpr (MATRICES == 2) {
        value = activate<ACTIVATION>(value) * result[MATRICES - 1];
      }
      if constexpr (SOFTCAP) { value = soft_cap(value, numbers[1]); }
      value += extra[i];
      PART(y, part)[element / TILE * columns + n] = static_cast<T>(value);
    }
  }
}
