// Huge pages under the weights: a decode step reads all of them, and its page walks cost a tenth.
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Asks for huge pages under [from, from + bytes), whatever else lies in the first and the last of
// them: most matrices are smaller than such a page. The content stays; where the system refuses,
// as it does where a page is not wholly mapped, nothing happens.
extern "C" __attribute__((visibility("default"))) void ts_use_huge_pages(char* from, int64_t bytes) {
#if defined(__linux__)
  constexpr size_t HUGE = 2 << 20;
  constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, since Linux 6.1
  const size_t end = (size_t)from + bytes;
  for (size_t page = (size_t)from / HUGE * HUGE; page < end; page += HUGE) {
    madvise((void*)page, HUGE, MADV_HUGEPAGE);
    madvise((void*)page, HUGE, COLLAPSE);
  }
#else
  (void)from;
  (void)bytes;
#endif
}
