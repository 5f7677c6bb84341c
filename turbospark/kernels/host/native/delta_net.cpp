// One recurrent layer's rows, in one region: filter and norms, then the fast weights, then the
// gated norm.
//
// The rows of the fast weights are independent of each other. A thread takes a few of them through
// all rows of the pass, so that they are read from memory once and stay in the first cache.
#include "delta_net.h"

#include <algorithm>
#include <cmath>

#include "norm.h"
#include "pool.h"
#include "simd.h"

namespace ts {
namespace {

constexpr int GROUP = 4;  // rows of the fast weights that share the loads of k and q
constexpr float HEAD_EPS = 1e-6f;
constexpr int64_t PRODUCTS_WORTH_A_THREAD = 32768;

class Delta {
 public:
  Delta(const DeltaPlan& plan, const DeltaCall& call)
      : p_(plan), c_(call), stride_((plan.key_dim + LANES - 1) / LANES * LANES) {}

  void run() const {
    keep_tail();
    const int threads = useful_threads();
    Carver sizes(nullptr);
    carve(sizes, threads - 1);
    cooperate(threads, sizes.bytes(), [&](Crew& crew) {
      Carver carver(crew.scratch);
      const Rows rows = carve(carver, crew.thread);
      const int64_t parts = 2 * p_.key_heads + p_.value_heads + 1, heads = c_.count * p_.value_heads;
      const int64_t all = c_.count * parts;
      crew.share(all, crew.block(all, 1, all), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) prepare(rows, i / parts, i % parts);
      });
      share_weights(crew, rows);
      crew.share(heads, crew.block(heads, 1, heads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) finish(rows, i / p_.value_heads, i % p_.value_heads);
      });
    });
  }

  void fold() const {
    const int threads = useful_threads();
    Carver sizes(nullptr);
    for (int i = 0; i < threads; i++) sizes.take<float>(GROUP * stride_);
    cooperate(threads, sizes.bytes(), [&](Crew& crew) {
      Carver carver(crew.scratch);
      Rows rows = given_rows();
      for (int i = 0; i <= crew.thread; i++) rows.weights = carver.take<float>(GROUP * stride_);
      share_weights(crew, rows);
    });
  }

 private:
  // Rows of all heads. A head's rows lie side by side where nobody else wants them: a distance of
  // a power of two between them would crowd a few lines of the caches.
  struct Heads {
    float* start;
    int64_t row, head;  // floats between two of them

    float* at(int64_t t, int64_t h) const { return start + t * row + h * head; }
  };

  // What the rows of the pass are made into.
  struct Rows {
    Heads q, k, v, decay, beta, y;
    float* weights;  // [GROUP, stride], a thread's own
  };

  static Heads as_given(float* start, int64_t heads, int64_t dim) {
    return {start, heads * dim, dim};
  }
  Heads take_heads(Carver& carver, int64_t heads, int64_t dim) const {
    return {carver.take<float>(c_.count * heads * dim), dim, c_.count * dim};
  }

  Rows given_rows() const {
    Rows rows{};
    rows.k = as_given(c_.k, p_.key_heads, p_.key_dim);
    rows.v = as_given(c_.v, p_.value_heads, p_.value_dim);
    rows.decay = as_given(c_.decay, p_.value_heads, 1);
    rows.beta = as_given(c_.beta, p_.value_heads, 1);
    return rows;
  }

  Rows carve(Carver& carver, int thread) const {
    Rows rows = given_rows();
    if (c_.k == nullptr) {
      rows.k = take_heads(carver, p_.key_heads, p_.key_dim);
      rows.v = take_heads(carver, p_.value_heads, p_.value_dim);
      rows.decay = take_heads(carver, p_.value_heads, 1);
      rows.beta = take_heads(carver, p_.value_heads, 1);
    }
    rows.q = take_heads(carver, p_.key_heads, p_.key_dim);
    rows.y = take_heads(carver, p_.value_heads, p_.value_dim);
    for (int i = 0; i <= thread; i++) rows.weights = carver.take<float>(GROUP * stride_);
    return rows;
  }

  int useful_threads() const {
    return c_.count * p_.values() * p_.key_dim < PRODUCTS_WORTH_A_THREAD ? 1 : p_.threads;
  }

  // The row of qkv at a position that may lie before the pass.
  const float* row_at(int64_t t) const {
    return t < 0 ? c_.tail + (t + p_.taps - 1) * p_.channels() : c_.qkv + t * p_.channels();
  }

  void keep_tail() const {
    for (int i = 0; i < p_.taps - 1; i++)
      memcpy(c_.next_tail + i * p_.channels(), row_at(c_.count - (p_.taps - 1) + i),
             p_.channels() * sizeof(float));
  }

  // Part i of row t: a query head, a key head, a value head, or (the last one) the row's gates.
  void prepare(const Rows& rows, int64_t t, int64_t i) const {
    if (i == 2 * p_.key_heads + p_.value_heads) return open_gates(rows, t);
    const float length = 1.0f / std::sqrt((float)p_.key_dim);
    if (i < p_.key_heads) {
      float* q = rows.q.at(t, i);
      filter(t, i * p_.key_dim, p_.key_dim, q);
      normalise(q, length);
    } else if (i < 2 * p_.key_heads) {
      float* k = rows.k.at(t, i - p_.key_heads);
      filter(t, i * p_.key_dim, p_.key_dim, k);
      normalise(k, 1.0f);
    } else {
      const int64_t head = i - 2 * p_.key_heads;
      filter(t, 2 * p_.keys() + head * p_.value_dim, p_.value_dim, rows.v.at(t, head));
    }
  }

  // to = silu(sum over taps of conv * row), `dim` channels from `first` on.
  void filter(int64_t t, int64_t first, int dim, float* to) const {
    for (int i = 0; i < dim; i += LANES) {
      const int some = std::min(LANES, dim - i);
      F total{};
      for (int tap = 0; tap < p_.taps; tap++) {
        const float* row = row_at(t - (p_.taps - 1) + tap) + first + i;
        const F weight = load_first(p_.conv + tap * p_.channels() + first + i, some);
        total = fma(weight, load_first(row, some), total);
      }
      store_first(to + i, activate(SILU, total), some);
    }
  }

  // x = x * length / sqrt(sum(x^2) + eps), one key head.
  void normalise(float* x, float length) const {
    F squares{};
    for (int i = 0; i < p_.key_dim; i += LANES) {
      const F value = load_first(x + i, std::min(LANES, p_.key_dim - i));
      squares = fma(value, value, squares);
    }
    const F factor = splat(length / std::sqrt(sum(squares) + HEAD_EPS));
    for (int i = 0; i < p_.key_dim; i += LANES) {
      const int some = std::min(LANES, p_.key_dim - i);
      store_first(x + i, load_first(x + i, some) * factor, some);
    }
  }

  void open_gates(const Rows& rows, int64_t t) const {
    for (int64_t h = 0; h < p_.value_heads; h++) {
      const int64_t at = t * p_.value_heads + h;
      const float step = c_.a[at] + p_.dt_bias[h];
      const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
      *rows.decay.at(t, h) = std::exp(p_.rate[h] * softplus);
      *rows.beta.at(t, h) = 1.0f / (1.0f + std::exp(-c_.b[at]));
    }
  }

  void share_weights(Crew& crew, const Rows& rows) const {
    const int64_t groups = (p_.value_dim + GROUP - 1) / GROUP, all = p_.value_heads * groups;
    crew.share(all, crew.block(all, 1, all), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) rewrite(rows, i / groups, i % groups * GROUP);
    });
  }

  // Takes GROUP rows of a head's fast weights, from `first` on, through all rows of the pass.
  void rewrite(const Rows& rows, int64_t head, int64_t first) const {
    const int64_t key_head = head / (p_.value_heads / p_.key_heads), Dk = p_.key_dim;
    const int here = (int)std::min<int64_t>(GROUP, p_.value_dim - first);
    const int64_t at = (head * p_.value_dim + first) * Dk;
    float* weights = rows.weights;
    memset(weights, 0, GROUP * stride_ * sizeof(float));
    for (int r = 0; r < here; r++)
      memcpy(weights + r * stride_, c_.state + at + r * Dk, Dk * sizeof(float));
    for (int64_t t = 0; t < c_.count; t++) {
      const float* k = rows.k.at(t, key_head);
      const float* v = rows.v.at(t, head) + first;
      const float beta = *rows.beta.at(t, head);
      float delta[GROUP];
      forget(weights, k, *rows.decay.at(t, head), delta);
      for (int r = 0; r < here; r++) delta[r] = beta * (v[r] - delta[r]);
      for (int r = here; r < GROUP; r++) delta[r] = 0.0f;
      if (rows.q.start == nullptr) {
        write(weights, k, delta);
        continue;
      }
      float y[GROUP];
      write_and_read(weights, k, rows.q.at(t, key_head), delta, y);
      memcpy(rows.y.at(t, head) + first, y, here * sizeof(float));
    }
    for (int r = 0; r < here; r++)
      memcpy(c_.next_state + at + r * Dk, weights + r * stride_, Dk * sizeof(float));
  }

  // weights = decay * weights; found = what they hold for k.
  void forget(float* weights, const float* k, float decay, float* found) const {
    const F factor = splat(decay);
    F sums[GROUP] = {};
    each_vector([&](int i, int some) {
      const F key = load_first(k + i, some);
      TS_UNROLL for (int r = 0; r < GROUP; r++) {
        const F kept = load(weights + r * stride_ + i) * factor;
        store(weights + r * stride_ + i, kept);
        sums[r] = fma(kept, key, sums[r]);
      }
    });
    sum_four(sums[0], sums[1], sums[2], sums[3], found);
  }

  // weights = weights + delta k^T.
  void write(float* weights, const float* k, const float* delta) const {
    each_vector([&](int i, int some) {
      const F key = load_first(k + i, some);
      TS_UNROLL for (int r = 0; r < GROUP; r++) {
        float* at = weights + r * stride_ + i;
        store(at, fma(splat(delta[r]), key, load(at)));
      }
    });
  }

  // The same, and y = weights q.
  void write_and_read(float* weights, const float* k, const float* q, const float* delta,
                      float* y) const {
    F sums[GROUP] = {}, added[GROUP];
    for (int r = 0; r < GROUP; r++) added[r] = splat(delta[r]);
    each_vector([&](int i, int some) {
      const F key = load_first(k + i, some), query = load_first(q + i, some);
      TS_UNROLL for (int r = 0; r < GROUP; r++) {
        float* at = weights + r * stride_ + i;
        const F value = fma(added[r], key, load(at));
        store(at, value);
        sums[r] = fma(value, query, sums[r]);
      }
    });
    sum_four(sums[0], sums[1], sums[2], sums[3], y);
  }

  template <class Each>
  TS_INLINE void each_vector(Each&& each) const {
    const int whole = p_.key_dim / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) each(i, LANES);
    if (whole < p_.key_dim) each(whole, p_.key_dim - whole);
  }

  // out = norm(y) * gate(z), one head of one row.
  void finish(const Rows& rows, int64_t t, int64_t head) const {
    const int64_t at = t * p_.values() + head * p_.value_dim;
    float* out = c_.out + at;
    const float* z = c_.z + at;
    norm_row(Norm{p_.norm, p_.eps}, rows.y.at(t, head), p_.value_dim, out);
    for (int j = 0; j < p_.value_dim; j += LANES) {
      const int some = std::min(LANES, p_.value_dim - j);
      const F opened = load_first(z + j, some);
      const F gate = p_.sigmoid_gate ? splat(1.0f) / (exponential(-opened) + 1.0f)
                                     : activate(SILU, opened);
      store_first(out + j, load_first(out + j, some) * gate, some);
    }
  }

  const DeltaPlan& p_;
  const DeltaCall& c_;
  const int64_t stride_;
};

}  // namespace
}  // namespace ts

extern "C" void ts_delta_net(const ts::DeltaPlan* plan, const ts::DeltaCall* call) {
  ts::Delta(*plan, *call).run();
}

extern "C" void ts_delta_fold(const ts::DeltaPlan* plan, const ts::DeltaCall* call) {
  ts::Delta(*plan, *call).fold();
}
