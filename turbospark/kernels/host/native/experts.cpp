// The routed experts of a pass, in one region.
//
// A row goes to the experts that its scores rank first. Rows of one expert are packed side by
// side, in prefill from a tile's first on, so that its matrices are read once. No row's result
// depends on another row: its products do not, and its experts are summed in rank order.
#include <cmath>
#include <vector>

#include "regions.h"

namespace ts {

constexpr int32_t CLAMPED = 3;  // beside Activation: (up + 1) * gate * sigmoid(alpha * gate)

struct ExpertsPlan {
  Setup setup;
  const Norm* norm;                // of h, or null
  const Matrix *gate, *up, *down;  // [count]
  const float* scale;              // [count] factors of the weights, or null
  int64_t count, top_k;
  int32_t renormalise;             // the weights of a row sum to 1
  int32_t activation;              // Activation or CLAMPED
  float alpha, limit;              // of CLAMPED
};

namespace {

// Rows of one expert: slots [first, first + count).
struct Run {
  int64_t expert, first, count;
};

// Where the rows of a pass go.
class Routes {
 public:
  std::vector<Run> runs;
  std::vector<int32_t> row;    // of each slot; where none is, that of the slot before
  std::vector<int32_t> held;   // the slot itself; where no row is, the slot before
  std::vector<int64_t> slot;   // [rows][top_k]
  std::vector<float> weight;   // [rows][top_k]

  // An expert's slots begin at a multiple of `unit`.
  Routes(const ExpertsPlan& plan, const float* scores, int64_t rows, int64_t unit)
      : slot(rows * plan.top_k), weight(rows * plan.top_k), plan_(plan) {
    std::vector<int64_t> counts(plan.count), next(plan.count);
    for (int64_t m = 0; m < rows; m++) {
      rank(scores + m * plan.count, &slot[m * plan.top_k], &weight[m * plan.top_k]);
      for (int64_t r = 0; r < plan.top_k; r++) counts[slot[m * plan.top_k + r]]++;
    }
    int64_t slots = 0;
    for (int64_t e = 0; e < plan.count; e++) {
      if (counts[e] == 0) continue;
      runs.push_back({e, next[e] = slots, counts[e]});
      slots += (counts[e] + unit - 1) / unit * unit;
    }
    row.assign(slots, -1);
    for (int64_t i = 0; i < rows * plan.top_k; i++) {
      slot[i] = next[slot[i]]++;  // until here the expert
      row[slot[i]] = (int32_t)(i / plan.top_k);
    }
    held.resize(slots);
    for (int64_t s = 0; s < slots; s++) {
      held[s] = row[s] < 0 ? held[s - 1] : (int32_t)s;
      row[s] = row[held[s]];
    }
  }

 private:
  // The best experts of a row and their weights; of equal scores the lower one ranks first.
  void rank(const float* scores, int64_t* chosen, float* weights) const {
    const int64_t E = plan_.count, k = plan_.top_k;
    for (int64_t r = 0; r < k; r++) {
      int64_t best = -1;
      for (int64_t e = 0; e < E; e++) {
        if (best >= 0 && !(scores[e] > scores[best])) continue;
        if (std::find(chosen, chosen + r, e) == chosen + r) best = e;
      }
      chosen[r] = best;
    }
    const float top = scores[chosen[0]];
    float total = 0;
    for (int64_t r = 0; r < k; r++) total += weights[r] = std::exp(scores[chosen[r]] - top);
    if (!plan_.renormalise) {
      total = 0;
      for (int64_t e = 0; e < E; e++) total += std::exp(scores[e] - top);
    }
    for (int64_t r = 0; r < k; r++) {
      weights[r] /= total;
      if (plan_.scale) weights[r] *= plan_.scale[chosen[r]];
    }
  }

  const ExpertsPlan& plan_;
};

void clamped_row(float alpha, float limit, float* gate, const float* up, int64_t columns) {
  for (int64_t k = 0; k < columns; k += LANES) {
    const int count = (int)smaller_of(LANES, columns - k);
    const F g = smaller(splat(limit), load_first(gate + k, count));
    const F u = larger(splat(-limit), smaller(splat(limit), load_first(up + k, count)));
    store_first(gate + k, (u + 1.0f) * g / (exponential(g * -alpha) + 1.0f), count);
  }
}

// Calls `each(run, begin, end)` for the weight rows [begin, end) of every expert in use.
template <class Each>
void share_matrices(Crew& crew, const std::vector<Run>& runs, const Matrix& like, Each&& each) {
  const int64_t one = whole_blocks(like), all = one * (int64_t)runs.size();
  crew.share(all, piece(crew, all), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin / one; i * one < end; i++) {
      const int64_t from = std::max<int64_t>(0, begin - i * one);
      const int64_t until = smaller_of(like.rows, end - i * one);
      if (from < until) each(runs[i], from, until);
    }
  });
}

}  // namespace
}  // namespace ts

using namespace ts;

// y = the experts of every row of h [rows, C], weighed by its scores [rows, count], and
// sigmoid(shared_scores [rows]) * shared [rows, C] where there are such.
TS_EXPORT void ts_mix_experts(const ExpertsPlan* plan, const float* h, const float* scores,
                              const float* shared, const float* shared_scores, int64_t rows,
                              int32_t prefill, float* y) {
  const ExpertsPlan& p = *plan;
  const Routes routes(p, scores, rows, prefill ? LANES : 1);
  const int64_t slots = (int64_t)routes.row.size(), inner = p.gate->rows, N = p.down->rows;
  const InputShape before = input_shape(p.setup, slots, prefill, {p.gate, p.up});
  const InputShape after = input_shape(p.setup, slots, prefill, {p.down});
  const int threads = p.setup.threads;
  run(
      p.setup,
      [&](Carver& carver) {
        Inputs(carver, before, 0, threads);
        Inputs(carver, after, 0, threads);
        carver.take<float>(slots * (2 * inner + N));
      },
      [&](Crew& crew, Carver& carver) {
        Inputs first(carver, before, crew.thread, threads);
        Inputs second(carver, after, crew.thread, threads);
        float* gated = carver.take<float>(slots * (2 * inner + N));
        float* upper = gated + slots * inner;
        float* outs = upper + slots * inner;
        first.pack(crew, h, p.norm, routes.row.data());
        share_matrices(crew, routes.runs, *p.gate, [&](const Run& own, int64_t from, int64_t until) {
          float *g = gated + own.first * inner, *u = upper + own.first * inner;
          first.multiply_part(p.gate[own.expert], own.first, own.count, from, until, g, inner);
          first.multiply_part(p.up[own.expert], own.first, own.count, from, until, u, inner);
          for (int64_t at = from; at < own.count * inner; at += inner) {
            if (p.activation == CLAMPED)
              clamped_row(p.alpha, p.limit, g + at, u + at, until - from);
            else
              gate_row(p.activation, g + at, u + at, until - from);
          }
        });
        second.pack(crew, gated, nullptr, routes.held.data());
        share_matrices(crew, routes.runs, *p.down, [&](const Run& own, int64_t from, int64_t until) {
          float* to = outs + own.first * N;
          second.multiply_part(p.down[own.expert], own.first, own.count, from, until, to, N);
        });
        crew.share(rows, crew.block(rows, 1, rows), [&](int64_t begin, int64_t end) {
          for (int64_t m = begin; m < end; m++) {
            const int64_t* slot = &routes.slot[m * p.top_k];
            const float* weight = &routes.weight[m * p.top_k];
            const float share = shared ? 1.0f / (1.0f + std::exp(-shared_scores[m])) : 0.0f;
            float* to = y + m * N;
            for (int64_t n = 0; n < N; n++) {
              float total = weight[0] * outs[slot[0] * N + n];
              for (int64_t r = 1; r < p.top_k; r++) total += weight[r] * outs[slot[r] * N + n];
              to[n] = shared ? total + share * shared[m * N + n] : total;
            }
          }
        });
      });
}
