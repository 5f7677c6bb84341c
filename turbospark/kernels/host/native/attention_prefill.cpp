// Attention of many query rows, bound by arithmetic: each lane of a vector is one query.
//
// A lane vector holds LANES neighbouring positions of one query head. Keys come in blocks at fixed
// absolute positions; a lane keeps the running maximum, sum and weighted values of what it has
// seen, and a block it does not see leaves them as they are, bit for bit.
#include "attention.h"
#include "pool.h"
#include "simd.h"
#include "transpose.h"

namespace ts {
namespace {

constexpr int BLOCK = 64;
#if defined(TS_AVX512) || defined(TS_NEON)
constexpr int WIDE = 8;  // keys, or dimensions of values, that share the queries' loads
#else
constexpr int WIDE = 4;
#endif
constexpr float UNSEEN = -1e30f;

// One or two lane vectors of heads that share keys, and what they have gathered so far.
template <int N>
class Tile {
 public:
  Tile(const AttendPlan& plan, const AttendCall& call, char* scratch)
      : plan_(plan), call_(call), D_(plan.head_dim) {
    Carver carver(scratch);
    q_ = carver.take<float>(D_ * N * LANES);
    out_ = carver.take<float>(D_ * N * LANES);
    weights_ = carver.take<float>(BLOCK * N * LANES);
  }

  static size_t bytes(int head_dim) {
    Carver carver(nullptr);
    for (int i = 0; i < 2; i++) carver.take<float>(head_dim * N * LANES);
    carver.take<float>(BLOCK * N * LANES);
    return carver.bytes();
  }

  // Lane vector `index` of a head is tile index / group, head index % group of its group.
  void attend(int64_t head, int64_t index) {
    const int64_t count = call_.count, start = call_.rows.end - count;
    int64_t last = 0;
    for (int n = 0; n < N; n++) {
      const int64_t tile = (index + n) / plan_.group();
      first_[n] = start + tile * LANES;
      live_[n] = static_cast<int>(std::min<int64_t>(LANES, count - tile * LANES));
      at_[n] = (tile * LANES * plan_.q_heads + head * plan_.group() +
                (index + n) % plan_.group()) * D_;
      head_[n] = head * plan_.group() + (index + n) % plan_.group();
      last = std::max(last, first_[n] + live_[n] - 1);
      gather(call_.q + at_[n], n);
      top_[n] = splat(UNSEEN);
      total_[n] = F{};
    }
    memset(out_, 0, D_ * N * LANES * sizeof(float));
    const int64_t begin = plan_.first_seen(first_[0]);
    for (int64_t block = begin / BLOCK * BLOCK; block <= last; block += BLOCK)
      visit(head, std::max(block, begin), std::min(block + BLOCK, last + 1));
    for (int n = 0; n < N; n++) finish(call_.out + at_[n], n);
  }

 private:
  // Rows of queries become [D, N, LANES].
  void gather(const float* q, int n) {
    const int64_t width = static_cast<int64_t>(plan_.q_heads) * D_;
    int d = 0;
    if (live_[n] == LANES)
      for (; d + LANES <= D_; d += LANES) transpose_square(q + d, width, query(d, n), N * LANES);
    for (; d < D_; d++)
      for (int i = 0; i < LANES; i++) query(d, n)[i] = i < live_[n] ? q[i * width + d] : 0.0f;
  }

  float* query(int d, int n) const { return q_ + (d * N + n) * LANES; }
  float* gathered(int d, int n) const { return out_ + (d * N + n) * LANES; }
  float* weight(int j, int n) const { return weights_ + (j * N + n) * LANES; }

  void visit(int64_t head, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    const float *k[BLOCK + WIDE], *v[BLOCK + WIDE];
    find_rows(call_.rows, head, D_, begin, end, k, v);
    for (int i = count; i < count + WIDE; i++) k[i] = k[count - 1];
    for (int j = 0; j < count; j += WIDE) score(k + j, j);
    F factor[N];
    for (int n = 0; n < N; n++) factor[n] = weigh(n, begin, count);
    int d = 0;
    for (; d + WIDE <= D_; d += WIDE) add_values<WIDE>(v, count, d, factor);
    for (; d < D_; d++) add_values<1>(v, count, d, factor);
  }

  TS_NOINLINE void score(const float* const* k, int j) const {
    F sums[WIDE][N] = {};
    for (int d = 0; d < D_; d++) {
      F queries[N];
      for (int n = 0; n < N; n++) queries[n] = load(query(d, n));
      TS_UNROLL for (int u = 0; u < WIDE; u++) {
        const F key = splat(k[u][d]);
        for (int n = 0; n < N; n++) sums[u][n] = fma(key, queries[n], sums[u][n]);
      }
    }
    TS_UNROLL for (int u = 0; u < WIDE; u++)
      for (int n = 0; n < N; n++) store(weight(j + u, n), sums[u][n] * plan_.scale);
  }

  // Scores become weights; returns what the values gathered so far are multiplied by.
  F weigh(int n, int64_t begin, int count) {
    const I offset = lanes_from(static_cast<int32_t>(first_[n] - begin));
    const int32_t window = plan_.window > 0 ? plan_.window : INT32_MAX;
    F top = top_[n];
    for (int j = 0; j < count; j++) {
      const F value = select(seen(offset - j, window), load(weight(j, n)), splat(UNSEEN));
      store(weight(j, n), value);
      top = larger(top, value);
    }
    F total{};
    for (int j = 0; j < count; j++) {
      const F share = exponential(load(weight(j, n)) - top);
      const F value = select(seen(offset - j, window), share, F{});
      store(weight(j, n), value);
      total = total + value;
    }
    const F factor = exponential(top_[n] - top);
    total_[n] = fma(total_[n], factor, total);
    top_[n] = top;
    return factor;
  }

  // A key that lies `distance` positions back.
  static I seen(I distance, int32_t window) { return (distance >= 0) & (distance < window); }

  static I lanes_from(int32_t start) {
    int32_t lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = start + i;
    I value;
    memcpy(&value, lane, sizeof value);
    return value;
  }

  template <int DIMS>
  TS_NOINLINE void add_values(const float* const* v, int count, int d, const F* factor) {
    F sums[DIMS][N] = {};
    for (int j = 0; j < count; j++) {
      F shares[N];
      for (int n = 0; n < N; n++) shares[n] = load(weight(j, n));
      TS_UNROLL for (int u = 0; u < DIMS; u++) {
        const F value = splat(v[j][d + u]);
        for (int n = 0; n < N; n++) sums[u][n] = fma(value, shares[n], sums[u][n]);
      }
    }
    TS_UNROLL for (int u = 0; u < DIMS; u++)
      for (int n = 0; n < N; n++) {
        float* out = gathered(d + u, n);
        store(out, fma(load(out), factor[n], sums[u][n]));
      }
  }

  void finish(float* out, int n) {
    F factor = splat(1.0f);
    if (plan_.sinks != nullptr) {
      const F sink = splat(plan_.sinks[head_[n]]);
      const F top = larger(top_[n], sink);
      factor = exponential(top_[n] - top);
      total_[n] = fma(total_[n], factor, exponential(sink - top));
    }
    factor = factor / total_[n];
    for (int d = 0; d < D_; d++) store(gathered(d, n), load(gathered(d, n)) * factor);
    const int64_t width = static_cast<int64_t>(plan_.q_heads) * D_;
    int d = 0;
    if (live_[n] == LANES)
      for (; d + LANES <= D_; d += LANES)
        transpose_square(gathered(d, n), N * LANES, out + d, width);
    for (; d < D_; d++)
      for (int i = 0; i < live_[n]; i++) out[i * width + d] = gathered(d, n)[i];
  }

  const AttendPlan& plan_;
  const AttendCall& call_;
  const int D_;
  float *q_, *out_, *weights_;
  int64_t first_[N], at_[N], head_[N];
  int live_[N];
  F top_[N], total_[N];
};

}  // namespace
}  // namespace ts

extern "C" void ts_attend_prefill(const ts::AttendPlan* plan, const ts::AttendCall* call) {
  using namespace ts;
  const int64_t vectors = (call->count + LANES - 1) / LANES * plan->group();
  const int64_t pairs = (vectors + 1) / 2, tasks = plan->kv_heads * pairs;
  const size_t bytes = Tile<2>::bytes(plan->head_dim);
  const int threads = static_cast<int>(std::min<int64_t>(plan->threads, tasks));
  cooperate(threads, bytes * threads, [&](Crew& crew) {
    char* scratch = crew.scratch + crew.thread * bytes;
    crew.share(tasks, 1, [&](int64_t task, int64_t) {
      // The last rows see most, so they go first.
      const int64_t head = task % plan->kv_heads, index = 2 * (pairs - 1 - task / plan->kv_heads);
      if (index + 1 < vectors)
        Tile<2>(*plan, *call, scratch).attend(head, index);
      else
        Tile<1>(*plan, *call, scratch).attend(head, index);
    });
  });
}
