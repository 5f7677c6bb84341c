// y[M, N] = x[M, K] times the transpose of 4-bit weights [N, K] in groups of 64, on tensor cores.
// A block of 8 warps makes 8 / WARPS tiles of 16 * TALL columns at a time, and goes on to others:
// WARPS warps share a tile, each taking STEP groups at a time, which it fetches STAGES - 1 steps
// ahead into its own part of shared memory. All eight columns of an mma are there whatever M is, so
// every row of x gets the bits that it would get by itself. Codes enter as 16 + code; the sum of x
// over a group, times 16 scales, takes that off again.
extern __shared__ __align__(128) unsigned char shared[];
using X = TYPE_x;
using S = TYPE_scales0;
constexpr int GROUPS = K / 64;
constexpr int STEPS = (GROUPS + STEP - 1) / STEP;
constexpr bool STAGED_SCALES = GROUPS % STEP == 0;
constexpr int CODE_BYTES = 16 * 32 * STEP;
constexpr int ROW_SCALES = STEP * static_cast<int>(sizeof(S));
constexpr int SLICE_BYTES = CODE_BYTES + (STAGED_SCALES ? 2 * 16 * ROW_SCALES : 0);
constexpr int SLICES = MATRICES * TALL;
constexpr int STAGE_BYTES = SLICES * SLICE_BYTES;
constexpr int X_STRIDE = 2 * K + 64;
constexpr int X_BYTES = STAGED_X ? M * X_STRIDE : 0;
constexpr int TEAMS = 8 / WARPS;
constexpr int TEAM_THREADS = 32 * WARPS;
constexpr int TILE = 16 * TALL;
constexpr int SHARE = (TILE * M + TEAM_THREADS - 1) / TEAM_THREADS;
constexpr int ALL_TILES = UNITS_OF_PARTS(TILE);

const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int within = warp % WARPS;
const int team = warp / WARPS;
const int row_of_lane = lane / 4;
const int quarter = lane % 4;
const int row_of_x = row_of_lane < M ? row_of_lane : M - 1;

const uint stages = shared_address(shared) + warp * STAGES * STAGE_BYTES;
const uint staged_x = shared_address(shared) + 8 * STAGES * STAGE_BYTES;
float* const sums = reinterpret_cast<float*>(shared + 8 * STAGES * STAGE_BYTES + X_BYTES);

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
      const uint* const codes = MATRIX(codes, fetched_part, slice / TALL);
      const uint to = fetched_to + slice * SLICE_BYTES;
      const int first = fetched_row + slice % TALL * 16;
      const int chunk = lane % (2 * STEP);
      UNROLL for (int i = 0; i < STEP; i++) {
        const int row = lane / (2 * STEP) + i * (16 / STEP);
        const int from_row = metal::min(first + row, last_row);
        const int from_chunk = fetched_step * (2 * STEP) + chunk;
        if (STAGED_SCALES || from_chunk < 2 * GROUPS) {
          copy_async(to + row * (32 * STEP) + ((chunk ^ (2 * (row & 3))) * 16),
                     codes + from_row * (K / 8) + from_chunk * 4);
        }
      }
      if (STAGED_SCALES && (HAS_BIASES || lane < 16)) {
        const S* const scales = MATRIX(scales, fetched_part, slice / TALL);
        const S* const biases = MATRIX(biases, fetched_part, slice / TALL);
        const int from_row = metal::min(first + lane % 16, last_row);
        const S* const from =
            (lane < 16 ? scales : biases) + from_row * GROUPS + fetched_step * STEP;
        constexpr int BYTES = ROW_SCALES < 16 ? ROW_SCALES : 16;
        UNROLL for (int part = 0; part < ROW_SCALES / BYTES; part++) {
          copy_async_cached<BYTES>(to + CODE_BYTES + lane * ROW_SCALES + part * BYTES,
                            reinterpret_cast<const char*>(from) + part * BYTES);
        }
      }
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

UNROLL for (int stage = 0; stage < STAGES - 1; stage++) { fetch(); }

if constexpr (STAGED_X) {
  float squares[M];
  UNROLL for (int m = 0; m < M; m++) { squares[m] = 0.0f; }
  for (int chunk = threadIdx.x; chunk < K / 8; chunk += 256) {
    Pack<uint, 4> words[M];
    UNROLL for (int m = 0; m < M; m++) { words[m] = load_eight(x + m * K + chunk * 8); }
    const uint to = staged_x + chunk / 8 * 128 + chunk % 2 * 64 + chunk % 8 / 2 * 16;
    UNROLL for (int m = 0; m < M; m++) {
      words[m] = in_code_order(words[m]);
      store_shared(to + m * X_STRIDE, words[m]);
      if constexpr (NORM) {
        const Floats<8> value = to_floats<X>(words[m]);
        UNROLL for (int i = 0; i < 8; i++) {
          squares[m] = metal::fma(value.v[i], value.v[i], squares[m]);
        }
      }
    }
  }
  if constexpr (NORM) {
    UNROLL for (int m = 0; m < M; m++) {
      const float square_sum = simd_sum(squares[m]);
      if (lane == 0) { sums[m * 8 + warp] = square_sum; }
    }
    __syncthreads();
    float inverse[M];
    UNROLL for (int m = 0; m < M; m++) {
      float square_sum = 0.0f;
      UNROLL for (int i = 0; i < 8; i++) { square_sum += sums[m * 8 + i]; }
      inverse[m] = inverse_root_mean(square_sum, K, numbers[0]);
    }
    for (int chunk = threadIdx.x; chunk < K / 8; chunk += 256) {
      Floats<8> factor;
      if constexpr (HAS_NORM_WEIGHT) { factor = load_floats<8>(norm_weight + chunk * 8); }
      const uint at = staged_x + chunk / 8 * 128 + chunk % 2 * 64 + chunk % 8 / 2 * 16;
      UNROLL for (int m = 0; m < M; m++) {
        auto words = load_shared<Pack<uint, 4>>(at + m * X_STRIDE);
        Floats<8> value = to_floats<X>(words);
        UNROLL for (int i = 0; i < 8; i++) {
          value.v[i] = value.v[i] * inverse[m];
          if constexpr (HAS_NORM_WEIGHT) { value.v[i] = value.v[i] * factor.v[i / 2 + i % 2 * 4]; }
        }
        UNROLL for (int i = 0; i < 4; i++) {
          words.v[i] = Pair<X>::pack(value.v[2 * i], value.v[2 * i + 1]);
        }
        store_shared(at + m * X_STRIDE, words);
      }
    }
  }
  __syncthreads();
}

const uint codes_of_lane = row_of_lane * (32 * STEP) + quarter * 8;
const uint turn = 32 * (row_of_lane & 3);
const uint x_of_lane = staged_x + row_of_x * X_STRIDE + quarter * 16;
const X* const direct_x = x + row_of_x * K + quarter * 16;
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
        const S* const scales = MATRIX(scales, part, slice / TALL);
        const S* const biases = MATRIX(biases, part, slice / TALL);
        UNROLL for (int half = 0; half < 2; half++) {
          const int line = first_row + slice % TALL * 16 + row_of_lane + 8 * half;
          const int row = metal::min(line, columns - 1);
          UNROLL for (int j = 0; j < STEP; j++) {
            const int at = row * GROUPS + metal::min(step * STEP + j, GROUPS - 1);
            scale[slice][half][j] = static_cast<float>(scales[at]);
            offset[slice][half][j] = HAS_BIASES ? static_cast<float>(biases[at]) : 0.0f;
          }
        }
      }
    }

    wait_for_copies<STAGES - 2>();
    __syncwarp();
    fetch();

    if constexpr (STAGED_SCALES) {
      UNROLL for (int slice = 0; slice < SLICES; slice++) {
        UNROLL for (int half = 0; half < 2; half++) {
          const uint at = stage + slice * SLICE_BYTES + CODE_BYTES +
                          (row_of_lane + 8 * half) * ROW_SCALES;
          load_scales<S>(scale[slice][half], at);
          if constexpr (HAS_BIASES) { load_scales<S>(offset[slice][half], at + 16 * ROW_SCALES); }
        }
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
          const uint at = stage + slice * SLICE_BYTES + codes_of_lane + ((32 * j) ^ turn);
          const auto upper = load_shared<Pack<uint, 2>>(at);
          const auto lower = load_shared<Pack<uint, 2>>(at + 8 * 32 * STEP);
          float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          multiply_words<X>(dot, upper.v[0], lower.v[0], low);
          multiply_words<X>(dot, upper.v[1], lower.v[1], high);
          UNROLL for (int half = 0; half < 2; half++) {
            const float s = scale[slice][half][j];
            const float b = HAS_BIASES ? metal::fma(-16.0f, s, offset[slice][half][j])
                                       : -(16.0f + static_cast<float>(ZERO)) * s;
            UNROLL for (int i = 0; i < 2; i++) {
              float& sum = total[slice][2 * half + i];
              sum = metal::fma(s, dot[2 * half + i], metal::fma(b, x_sum[2 * half + i], sum));
            }
          }
        }
      }
    }
    used++;
    stage = used % STAGES == 0 ? stages : stage + STAGE_BYTES;
  }

  float* const own = sums + (round % 2 * TEAMS + team) * (SLICES * WARPS * 16 * M);
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
