// What the fused calls have in common: packed rows, and pieces of weight rows.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "inputs.h"
#include "pool.h"
#include "units.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ts {

inline InputShape input_shape(const Setup& setup, int64_t rows, bool prefill,
                              std::initializer_list<const Matrix*> matrices) {
  InputShape shape{rows, (*matrices.begin())->columns, 0, setup.mode, false, prefill, 0};
  for (const Matrix* w : matrices) {
    shape.forms |= w->product->form;
    shape.biased |= w->biases != nullptr;
    if (prefill)
      shape.product_scratch =
          std::max(shape.product_scratch, w->product->prefill_scratch(w->columns));
  }
  return shape;
}

// Runs `body(crew, carver)` on a crew whose scratch holds what `carve` takes.
template <class Carve, class Body>
void run(const Setup& setup, Carve&& carve, Body&& body) {
  Carver count(nullptr);
  carve(count);
  cooperate(setup.threads, count.bytes(), [&](Crew& crew) {
    Carver carver(crew.scratch);
    body(crew, carver);
  });
}

constexpr int64_t MOST_ROWS = 8192;  // weight rows of one piece; memory is faster on long runs

inline int64_t whole_blocks(const Matrix& w) {
  return (w.rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

inline int64_t piece(const Crew& crew, int64_t rows) {
  return crew.block(rows, BLOCK_ROWS, MOST_ROWS);
}

}  // namespace ts
