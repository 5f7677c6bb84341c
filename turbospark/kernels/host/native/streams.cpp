// Hyper-connections in one region: what a block said goes into the streams, and what the next
// block reads of them is mixed.
#include "regions.h"

namespace ts {

struct StreamsPlan {
  Setup setup;
  const Norm* norm;      // of all streams' numbers; each stream is normalised by itself
  const Matrix* down;    // [rank, streams]
  const Matrix* inject;  // [groups, streams], or null
  const Matrix* up;      // [streams, rank]
  int64_t groups;
};

// Packed by the binding as 64-bit words in this order.
struct StreamsCall {
  const float* h;       // [rows, streams]
  const float* said;    // [rows, columns] of the block before, or null
  const float* shares;  // [rows, groups], how much of it each stream takes
  int64_t rows;
  int64_t prefill;
  float* after;   // [rows, streams], the streams with what was said; null where nothing was
  float* mixed;   // [rows, columns]
  float* opened;  // [rows, groups], the shares of what is said next; null where nothing is
};

namespace {

constexpr int64_t MIXED_AT_ONCE = 256;

F sigmoid(F x) { return splat(1.0f) / (exponential(-x) + 1.0f); }

void add_share(const float* h, const float* said, float share, int64_t columns, float* to) {
  for (int64_t k = 0; k < columns; k += LANES) {
    const int count = (int)smaller_of(LANES, columns - k);
    const F added = load_first(said + k, count) * share;
    store_first(to + k, load_first(h + k, count) + added, count);
  }
}

// Columns [begin, end) of mean over the groups of sigmoid(up) * normed, one row.
void mix_row(const float* up, const float* normed, int64_t groups, int64_t columns, int64_t begin,
             int64_t end, float* to) {
  for (int64_t k = begin; k < end; k += LANES) {
    const int count = (int)smaller_of(LANES, end - k);
    F total{};
    for (int64_t at = k; at < groups * columns; at += columns)
      total = total + sigmoid(load_first(up + at, count)) * load_first(normed + at, count);
    store_first(to + k, total / (float)groups, count);
  }
}

template <class Function>
void each(float* values, int64_t count, Function&& function) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int now = (int)smaller_of(LANES, count - k);
    store_first(values + k, function(load_first(values + k, now)), now);
  }
}

InputShape entering(const StreamsPlan& plan, int64_t rows, bool prefill) {
  if (plan.inject == nullptr) return input_shape(plan.setup, rows, prefill, {plan.down});
  return input_shape(plan.setup, rows, prefill, {plan.down, plan.inject});
}

}  // namespace
}  // namespace ts

using namespace ts;

TS_EXPORT void ts_mix_streams(const StreamsPlan* plan, const StreamsCall* call) {
  const Matrix &down = *plan->down, &up = *plan->up;
  const int64_t rows = call->rows, groups = plan->groups, rank = down.rows, streams = up.rows;
  const int64_t columns = streams / groups;
  const bool prefill = call->prefill != 0;
  const InputShape before = entering(*plan, rows, prefill);
  const InputShape behind = input_shape(plan->setup, rows, prefill, {&up});
  const int threads = plan->setup.threads;
  run(
      plan->setup,
      [&](Carver& carver) {
        Inputs(carver, before, 0, threads);
        Inputs(carver, behind, 0, threads);
        carver.take<float>(rows * (2 * streams + rank));
      },
      [&](Crew& crew, Carver& carver) {
        Inputs first(carver, before, crew.thread, threads);
        Inputs second(carver, behind, crew.thread, threads);
        float* normed = carver.take<float>(rows * (2 * streams + rank));
        float *lifted = normed + rows * streams, *low = lifted + rows * streams;
        const int64_t parts = rows * groups;
        crew.share(parts, crew.block(parts, 1, parts), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            const int64_t group = i % groups;
            const float* x = call->h + i * columns;
            if (call->said != nullptr) {
              add_share(x, call->said + i / groups * columns, call->shares[i], columns,
                        call->after + i * columns);
              x = call->after + i * columns;
            }
            const Norm own{plan->norm->weight + group * columns, plan->norm->eps};
            norm_row(own, x, columns, normed + i * columns);
          }
        });
        first.pack(crew, normed, nullptr);
        crew.share(rank, piece(crew, rank), [&](int64_t begin, int64_t end) {
          first.multiply(down, begin, end, low, rank);
          for (int64_t m = 0; m < rows; m++)
            each(low + m * rank + begin, end - begin,
                 [&](F x) { return activate(SILU, x / (float)groups); });
        });
        if (plan->inject != nullptr)
          crew.share(groups, piece(crew, groups), [&](int64_t begin, int64_t end) {
            first.multiply(*plan->inject, begin, end, call->opened, groups);
            for (int64_t m = 0; m < rows; m++)
              each(call->opened + m * groups + begin, end - begin,
                   [&](F x) { return sigmoid(x / (float)groups) * 2.0f; });
          });
        second.pack(crew, low, nullptr);
        crew.share(streams, piece(crew, streams), [&](int64_t begin, int64_t end) {
          second.multiply(up, begin, end, lifted, streams);
        });
        const int64_t pieces = (columns + MIXED_AT_ONCE - 1) / MIXED_AT_ONCE, all = rows * pieces;
        crew.share(all, crew.block(all, 1, all), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) {
            const int64_t m = i / pieces, from = i % pieces * MIXED_AT_ONCE;
            mix_row(lifted + m * streams, normed + m * streams, groups, columns, from,
                    smaller_of(columns, from + MIXED_AT_ONCE), call->mixed + m * columns);
          }
        });
      });
}
