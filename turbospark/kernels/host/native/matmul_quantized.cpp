// One width of quantized matrices: compiled with TS_BITS, TS_GROUP and TS_MODE
// (0 exact, 1 pair, 2 int8), and with TS_FP4 where the codes are floats.
#include "matmul_exact.h"
#if TS_MODE == 0
#elif defined(TS_AVX512)
#include "matmul_vnni.h"
#else
#include "matmul_wide.h"
#endif

extern "C" __attribute__((visibility("default"))) const ts::Product* ts_product() {
#if TS_MODE == 0
  static const ts::Product product = {ts::exact_decode<TS_BITS, TS_GROUP>,
                                      ts::exact_prefill<TS_BITS, TS_GROUP>, ts::float_scratch,
                                      ts::expand_row<TS_BITS, TS_GROUP>, ts::FLOATS};
#else
  static const ts::Product product = {ts::integer_decode<TS_BITS, TS_GROUP, TS_MODE == 1>,
                                      ts::integer_prefill<TS_BITS, TS_GROUP, TS_MODE == 1>,
                                      ts::integer_scratch<TS_GROUP>,
                                      ts::expand_row<TS_BITS, TS_GROUP>, ts::INTEGERS};
#endif
  return &product;
}
