// The thread pool of the host kernels.
//
// A kernel is a region: one function that threads of the pool run at once, the calling thread
// among them as thread 0. Regions of several Python threads run one after another. Between regions
// the workers spin for about a third of a millisecond, then sleep.
//
// Work is shared out piece by piece, so no region waits for a worker that the system has not let
// run yet: such a worker finds the pieces done.
//
//     ts::cooperate(threads, scratch_bytes, [&](ts::Crew& crew) {
//       crew.share(n, 16, [&](int64_t begin, int64_t end) { first(begin, end); });
//       crew.share(m, 64, [&](int64_t begin, int64_t end) { second(begin, end); });  // after it
//     });
//
// A region of one thread wakes nobody: small work asks for that.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ts {

// One loop whose pieces are shared out: what of each of its ranges is taken, and what is done.
struct alignas(64) Shared {
  static constexpr int MAX_RANGES = 7;  // with `done` they fill a cache line
  std::atomic<int64_t> taken[MAX_RANGES];
  std::atomic<int64_t> done;

  void reset() {
    for (std::atomic<int64_t>& range : taken) range.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }
};

// What a thread of a region knows. Lives only inside the region.
struct Crew {
  int thread, threads;
  char* scratch;   // 64-byte aligned, shared by the region's threads, not cleared
  Shared* shared;  // of the loops to come, in the order of the calls

  static constexpr int MAX_LOOPS = 8;

  // Calls `piece(begin, end)` for pieces of at most `block` items until [0, count) is taken, and
  // returns when every thread's pieces are done; what they wrote is visible. All threads of a
  // region make the same calls, at most MAX_LOOPS of them.
  //
  // A thread takes the pieces of a range of its own in order, so that what one piece prefetches
  // is what the next one reads, and then helps with the ranges of the others.
  template <class Piece>
  void share(int64_t count, int64_t block, Piece&& piece) {
    Shared& loop = *shared++;
    const int64_t blocks = (count + block - 1) / block;
    const int ranges = threads < Shared::MAX_RANGES ? threads : Shared::MAX_RANGES;
    for (int turn = 0; turn < ranges; turn++) {
      const int range = (thread + turn) % ranges;
      const int64_t first = blocks * range / ranges * block;
      const int64_t edge = blocks * (range + 1) / ranges * block, last = edge < count ? edge : count;
      for (int64_t begin; (begin = first + loop.taken[range].fetch_add(block)) < last;) {
        const int64_t end = begin + block < last ? begin + block : last;
        piece(begin, end);
        loop.done.fetch_add(end - begin, std::memory_order_release);
      }
    }
    wait_for(loop, count);
  }

  // A block that gives every thread several pieces of whole `unit`s.
  int64_t block(int64_t count, int64_t unit, int64_t most) const {
    const int64_t pieces = threads * 6, size = (count / pieces + unit - 1) / unit * unit;
    return size < unit ? unit : size > most ? most : size;
  }

 private:
  static void wait_for(const Shared& loop, int64_t count);
};

// A region's function; it must not throw and must not start a region itself.
using Job = void (*)(Crew& crew, void* context);

// Runs a job on at most `threads` threads and returns when it is done.
void run_region(int threads, size_t scratch_bytes, Job job, void* context);

template <class Function>
void cooperate(int threads, size_t scratch_bytes, Function&& function) {
  auto call = [](Crew& crew, void* context) {
    (*static_cast<std::remove_reference_t<Function>*>(context))(crew);
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
