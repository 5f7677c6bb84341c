// The fused calls, as Python binds them. Plans are made once a unit and never change.
#pragma once
#include "matmul.h"
#include "norm.h"

namespace ts {

struct Setup {
  int32_t threads;
  int32_t mode;  // Mode of the integer form
};

struct ProjectionsPlan {
  Setup setup;
  const Norm* norm;  // or null
  const Matrix* matrices;
  int64_t count;
};

struct ResidualPlan {
  Setup setup;
  const Matrix* matrix;
  const Norm* post_norm;  // or null
};

struct GatedPlan {
  Setup setup;
  const Norm* norm;  // or null
  const Matrix *gate, *up, *down;
  const Norm* post_norm;  // or null
  int32_t activation;
  int32_t residual;
};

struct HeadPlan {
  Setup setup;
  const Norm* norm;  // or null
  const Matrix* matrix;
  float softcap;  // 0 for none
};

struct EmbeddingPlan {
  Setup setup;
  const Matrix* table;
  float scale;
};

}  // namespace ts
