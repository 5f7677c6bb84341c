// The thread pool of the host kernels.
//
// A kernel is a region: one function that every thread of the pool runs at once, the calling
// thread among them as thread 0. Between regions the workers spin for about a third of a
// millisecond, then sleep. Regions of several Python threads run one after another.
//
//     ts::parallel(threads, scratch_bytes, [&](ts::Region& region) {
//       for (int i = region.begin(n); i < region.end(n); i++) first(i);
//       region.barrier();
//       second(region.thread);
//     });
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ts {

// A number that threads of a region draw from, to share out work of uneven length. Make it before
// the region; it must be used by one loop only.
class Tickets {
 public:
  int64_t take(int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

// What a thread of a region knows. Lives only inside the region.
struct Region {
  int thread;     // 0 .. threads - 1
  int threads;
  char* scratch;  // 64-byte aligned, shared by the region's threads, not cleared

  // Waits until every thread of the region has come here; what was written before is visible.
  void barrier();

  // This thread's contiguous share of `count` items, in whole blocks of `block` items.
  int64_t begin(int64_t count, int64_t block = 1) const { return share(thread, count, block); }
  int64_t end(int64_t count, int64_t block = 1) const { return share(thread + 1, count, block); }

 private:
  int64_t share(int64_t index, int64_t count, int64_t block) const {
    const int64_t blocks = (count + block - 1) / block;
    const int64_t edge = blocks * index / threads * block;
    return edge < count ? edge : count;
  }
};

using Job = void (*)(Region& region, void* context);

// Runs `job` on `threads` threads and returns when all are done. `job` must not throw and must
// not start a region itself.
void run_region(int threads, size_t scratch_bytes, Job job, void* context);

template <class Function>
void parallel(int threads, size_t scratch_bytes, Function&& function) {
  auto call = [](Region& region, void* context) {
    (*static_cast<std::remove_reference_t<Function>*>(context))(region);
  };
  run_region(threads, scratch_bytes, call, &function);
}

// Hands out parts of a scratch area, each 64-byte aligned. Every thread that carves in the same
// order gets the same addresses. With a null base it only counts: `bytes()` is the size to ask for.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <class T>
  T* take(size_t count) {
    char* start = base_ + used_;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(start);
  }
  size_t bytes() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace ts
