#include "units.h"

#include "regions.h"

namespace ts {
namespace {

// out = residual + post_norm(out), row by row; either may be absent.
void finish_rows(Crew& crew, const Norm* post_norm, const float* residual, int64_t rows,
                 int64_t columns, float* out) {
  if (post_norm == nullptr && residual == nullptr) return;
  crew.share(rows, crew.block(rows, 1, rows), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      float* row = out + m * columns;
      if (post_norm) norm_row(*post_norm, row, columns, row);
      if (residual == nullptr) continue;
      const float* add = residual + m * columns;
      for (int64_t k = 0; k < columns; k++) row[k] += add[k];
    }
  });
}

void soften(float cap, float* logits, int64_t count) {
  for (int64_t n = 0; n < count; n += LANES) {
    const int now = (int)smaller_of(LANES, count - n);
    const F capped = hyperbolic_tangent(load_first(logits + n, now) / cap);
    store_first(logits + n, capped * cap, now);
  }
}

}  // namespace
}  // namespace ts

using namespace ts;

// x [rows, K] -> one [rows, N] a matrix, one after the other in y.
TS_EXPORT void ts_project(const ProjectionsPlan* plan, const float* x, int64_t rows,
                          int32_t prefill, float* y) {
  const Matrix* matrices = plan->matrices;
  InputShape shape = input_shape(plan->setup, rows, prefill, {matrices});
  for (int64_t i = 1; i < plan->count; i++) {
    const InputShape other = input_shape(plan->setup, rows, prefill, {matrices + i});
    shape.forms |= other.forms;
    shape.biased |= other.biased;
    shape.product_scratch = std::max(shape.product_scratch, other.product_scratch);
  }
  const int threads = plan->setup.threads;
  run(
      plan->setup, [&](Carver& carver) { Inputs(carver, shape, 0, threads); },
      [&](Crew& crew, Carver& carver) {
        Inputs inputs(carver, shape, crew.thread, threads);
        inputs.pack(crew, x, plan->norm);
        int64_t all = 0;
        for (int64_t i = 0; i < plan->count; i++) all += whole_blocks(matrices[i]);
        crew.share(all, piece(crew, all), [&](int64_t begin, int64_t end) {
          int64_t first = 0;  // of matrix i, counted over all of them
          float* to = y;
          for (int64_t i = 0; i < plan->count; i++) {
            const Matrix& w = matrices[i];
            const int64_t from = std::max<int64_t>(0, begin - first);
            const int64_t until = smaller_of(w.rows, end - first);
            if (from < until) inputs.multiply(w, from, until, to, w.rows);
            first += whole_blocks(w);
            to += rows * w.rows;
          }
        });
      });
}

// y = residual + post_norm(matrix x), rows [rows, K] and [rows, N].
TS_EXPORT void ts_add_projected(const ResidualPlan* plan, const float* x, const float* residual,
                                int64_t rows, int32_t prefill, float* y) {
  const Matrix& w = *plan->matrix;
  const InputShape shape = input_shape(plan->setup, rows, prefill, {&w});
  const int threads = plan->setup.threads;
  run(
      plan->setup, [&](Carver& carver) { Inputs(carver, shape, 0, threads); },
      [&](Crew& crew, Carver& carver) {
        Inputs inputs(carver, shape, crew.thread, threads);
        inputs.pack(crew, x, nullptr);
        crew.share(w.rows, piece(crew, w.rows), [&](int64_t begin, int64_t end) {
          inputs.multiply(w, begin, end, y, w.rows);
        });
        finish_rows(crew, plan->post_norm, residual, rows, w.rows, y);
      });
}

// y = h + post_norm(down(activation(gate n) * up n)), n = norm(h), all [rows, C].
TS_EXPORT void ts_gated_mlp(const GatedPlan* plan, const float* h, int64_t rows, int32_t prefill,
                            float* y) {
  const Matrix &gate = *plan->gate, &up = *plan->up, &down = *plan->down;
  const InputShape before = input_shape(plan->setup, rows, prefill, {&gate, &up});
  const InputShape after = input_shape(plan->setup, rows, prefill, {&down});
  const int threads = plan->setup.threads;
  const int64_t inner = gate.rows;
  run(
      plan->setup,
      [&](Carver& carver) {
        Inputs(carver, before, 0, threads);
        Inputs(carver, after, 0, threads);
        carver.take<float>(2 * rows * inner);
      },
      [&](Crew& crew, Carver& carver) {
        Inputs first(carver, before, crew.thread, threads);
        Inputs second(carver, after, crew.thread, threads);
        float* gated = carver.take<float>(2 * rows * inner);
        float* upper = gated + rows * inner;
        first.pack(crew, h, plan->norm);
        crew.share(inner, piece(crew, inner), [&](int64_t begin, int64_t end) {
          first.multiply(gate, begin, end, gated, inner);
          first.multiply(up, begin, end, upper, inner);
          for (int64_t at = begin; at < rows * inner; at += inner)
            gate_row(plan->activation, gated + at, upper + at, end - begin);
        });
        second.pack(crew, gated, nullptr);
        const int64_t N = down.rows;
        crew.share(N, piece(crew, N), [&](int64_t begin, int64_t end) {
          second.multiply(down, begin, end, y, N);
        });
        finish_rows(crew, plan->post_norm, plan->residual ? h : nullptr, rows, N, y);
      });
}

// Logits [rows, V] of h [rows, C]. Every phase takes decode's product: the last row of a prompt
// is one row, and "all" rows must equal it.
TS_EXPORT void ts_head(const HeadPlan* plan, const float* h, int64_t rows, float* logits) {
  const Matrix& w = *plan->matrix;
  const InputShape shape = input_shape(plan->setup, rows, false, {&w});
  const int threads = plan->setup.threads;
  run(
      plan->setup, [&](Carver& carver) { Inputs(carver, shape, 0, threads); },
      [&](Crew& crew, Carver& carver) {
        Inputs inputs(carver, shape, crew.thread, threads);
        inputs.pack(crew, h, plan->norm);
        const int64_t V = w.rows;
        crew.share(V, piece(crew, V), [&](int64_t begin, int64_t end) {
          inputs.multiply(w, begin, end, logits, V);
          if (plan->softcap == 0.0f) return;
          for (int64_t m = 0; m < rows; m++)
            soften(plan->softcap, logits + m * V + begin, end - begin);
        });
      });
}

// Rows of a table times a scale: y [count, columns].
TS_EXPORT void ts_embed(const EmbeddingPlan* plan, const int32_t* tokens, int64_t count,
                        float* y) {
  const Matrix& table = *plan->table;
  for (int64_t t = 0; t < count; t++) {
    float* row = y + t * table.columns;
    table.product->expand(table, tokens[t], row);
    for (int64_t k = 0; k < table.columns; k++) row[k] *= plan->scale;
  }
}
