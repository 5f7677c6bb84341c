// Reading memory as fast as the products do, and doing nothing with it: the measure of decoding.
#include "pool.h"
#include "simd.h"

// Reads `bytes` from `from` on all threads; returns the sum of its words, so that nothing is
// optimised away.
extern "C" __attribute__((visibility("default"))) int64_t ts_stream_read(int32_t threads,
                                                                         const char* from,
                                                                         int64_t bytes) {
  std::atomic<int64_t> total{0};
  ts::cooperate(threads, 0, [&](ts::Crew& crew) {
    ts::I sums[4] = {};
    crew.share(bytes, 1 << 18, [&](int64_t at, int64_t end) {
      for (; at + (int64_t)sizeof sums <= end; at += sizeof sums) {
        for (size_t line = 0; line < sizeof sums; line += 64) ts::prefetch(from + at + 8192 + line);
        for (int i = 0; i < 4; i++) {
          ts::I words;
          memcpy(&words, from + at + i * sizeof words, sizeof words);
          sums[i] += words;
        }
      }
    });
    int64_t own = 0;
    for (int i = 0; i < 4; i++)
      for (int lane = 0; lane < ts::LANES; lane++) own += sums[i][lane];
    total += own;
  });
  return total;
}
