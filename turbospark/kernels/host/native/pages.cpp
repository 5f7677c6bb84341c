// Huge pages under the weights: a decode step reads all of them, and its page walks cost a tenth.
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Asks for huge pages wherever whole ones fit into [from, from + bytes). The content stays; where
// the system refuses nothing happens.
extern "C" __attribute__((visibility("default"))) void ts_use_huge_pages(char* from, int64_t bytes) {
#if defined(__linux__)
  constexpr size_t HUGE = 2 << 20;
  constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, since Linux 6.1
  const size_t start = ((size_t)from + HUGE - 1) / HUGE * HUGE;
  const size_t end = ((size_t)from + bytes) / HUGE * HUGE;
  if (start >= end) return;
  madvise((void*)start, end - start, MADV_HUGEPAGE);
  madvise((void*)start, end - start, COLLAPSE);
#else
  (void)from;
  (void)bytes;
#endif
}
