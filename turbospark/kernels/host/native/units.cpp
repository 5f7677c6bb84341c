#include "units.h"

#include <algorithm>

#include "inputs.h"
#include "pool.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ts {
namespace {

InputShape input_shape(const Setup& setup, int64_t rows, bool prefill,
                       std::initializer_list<const Matrix*> matrices) {
  InputShape shape{rows, (*matrices.begin())->columns, 0, setup.mode, prefill, 0};
  for (const Matrix* w : matrices) {
    shape.forms |= w->product->form;
    if (prefill)
      shape.product_scratch =
          std::max(shape.product_scratch, w->product->prefill_scratch(w->columns));
  }
  return shape;
}

// Runs `body` on a region whose scratch holds what `carve` takes.
template <class Carve, class Body>
void run(const Setup& setup, Carve&& carve, Body&& body) {
  Carver count(nullptr);
  carve(count);
  parallel(setup.threads, count.bytes(), body);
}

// out = residual + post_norm(out), row by row; either may be absent.
void finish_rows(Region& region, const Norm* post_norm, const float* residual, int64_t rows,
                 int64_t columns, float* out) {
  for (int64_t m = region.begin(rows); m < region.end(rows); m++) {
    float* row = out + m * columns;
    if (post_norm) norm_row(*post_norm, row, columns, row);
    if (residual == nullptr) continue;
    const float* add = residual + m * columns;
    for (int64_t k = 0; k < columns; k++) row[k] += add[k];
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
    shape.product_scratch = std::max(shape.product_scratch, other.product_scratch);
  }
  const int threads = plan->setup.threads;
  run(
      plan->setup, [&](Carver& carver) { Inputs(carver, shape, 0, threads); },
      [&](Region& region) {
        Carver carver(region.scratch);
        Inputs inputs(carver, shape, region.thread, threads);
        inputs.pack(region, x, plan->norm);
        float* to = y;
        for (int64_t i = 0; i < plan->count; i++) {
          const int64_t N = matrices[i].rows;
          inputs.multiply(matrices[i], region.begin(N, BLOCK_ROWS), region.end(N, BLOCK_ROWS), to,
                          N);
          to += rows * N;
        }
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
      [&](Region& region) {
        Carver carver(region.scratch);
        Inputs inputs(carver, shape, region.thread, threads);
        inputs.pack(region, x, nullptr);
        const int64_t N = w.rows;
        inputs.multiply(w, region.begin(N, BLOCK_ROWS), region.end(N, BLOCK_ROWS), y, N);
        region.barrier();
        finish_rows(region, plan->post_norm, residual, rows, N, y);
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
      [&](Region& region) {
        Carver carver(region.scratch);
        Inputs first(carver, before, region.thread, threads);
        Inputs second(carver, after, region.thread, threads);
        float* gated = carver.take<float>(2 * rows * inner);
        float* upper = gated + rows * inner;
        first.pack(region, h, plan->norm);
        const int64_t begin = region.begin(inner, BLOCK_ROWS), end = region.end(inner, BLOCK_ROWS);
        first.multiply(gate, begin, end, gated, inner);
        first.multiply(up, begin, end, upper, inner);
        for (int64_t m = 0; m < rows; m++)
          gate_row(plan->activation, gated + m * inner + begin, upper + m * inner + begin,
                   end - begin);
        region.barrier();
        second.pack(region, gated, nullptr);
        const int64_t N = down.rows;
        second.multiply(down, region.begin(N, BLOCK_ROWS), region.end(N, BLOCK_ROWS), y, N);
        region.barrier();
        finish_rows(region, plan->post_norm, plan->residual ? h : nullptr, rows, N, y);
      });
}

// Logits [rows, V] of h [rows, C]. Every phase takes decode's product: the last row of a prompt
// is one row, and "all" rows must equal it.
TS_EXPORT void ts_head(const HeadPlan* plan, const float* h, int64_t rows, float* logits) {
  const Matrix& w = *plan->matrix;
  const InputShape shape = input_shape(plan->setup, rows, false, {&w});
  const int threads = plan->setup.threads;
  constexpr int64_t PIECE = 1024;  // weight rows a thread takes at a time
  Tickets tickets;
  run(
      plan->setup, [&](Carver& carver) { Inputs(carver, shape, 0, threads); },
      [&](Region& region) {
        Carver carver(region.scratch);
        Inputs inputs(carver, shape, region.thread, threads);
        inputs.pack(region, h, plan->norm);
        const int64_t V = w.rows;
        for (int64_t begin; (begin = tickets.take(PIECE)) < V;) {
          const int64_t end = smaller_of(V, begin + PIECE);
          inputs.multiply(w, begin, end, logits, V);
          if (plan->softcap == 0.0f) continue;
          for (int64_t m = 0; m < rows; m++) {
            for (int64_t n = begin; n < end; n += LANES) {
              const int count = (int)smaller_of(LANES, end - n);
              float* at = logits + m * V + n;
              const F capped = hyperbolic_tangent(load_first(at, count) / plan->softcap);
              store_first(at, capped * plan->softcap, count);
            }
          }
        }
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
