#include "pool.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ts {
namespace {

constexpr int SPINS_BEFORE_SLEEP = 8000;  // about 0.3 ms: longer than the gap between two kernels
constexpr int SPINS_BEFORE_YIELD = 2000;  // longer than the threads of a region drift apart

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls `done`; gives the core away once it has taken long, as threads may outnumber cores.
template <class Condition>
void spin_until(Condition done) {
  for (int spins = 0; !done();) {
    relax();
    if (++spins >= SPINS_BEFORE_YIELD) std::this_thread::yield();
  }
}

class Pool {
 public:
  void run(int threads, size_t scratch_bytes, Job job, void* context) {
    std::lock_guard<std::mutex> one_region(region_);
    while (workers_ < threads - 1 && start_worker()) {
    }
    threads = std::max(1, std::min(threads, workers_ + 1));
    reserve(scratch_bytes);
    Region region{0, threads, scratch_};
    if (threads == 1) return job(region, context);
    job_ = job;
    context_ = context;
    threads_ = threads;
    busy_.store(workers_, std::memory_order_relaxed);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> hold(sleep_);
      wake_.notify_all();
    }
    job(region, context);
    spin_until([&] { return busy_.load(std::memory_order_acquire) == 0; });
  }

  void barrier(int threads) {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      spin_until([&] { return round_.load(std::memory_order_acquire) != round; });
    }
  }

 private:
  // False where the system grants no more threads; regions then run on those there are.
  bool start_worker() {
    const int index = workers_ + 1;
    const unsigned seen = generation_.load();
    try {
      std::thread([this, index, seen] { work(index, seen); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    workers_ = index;
    return true;
  }

  void work(int index, unsigned seen) {
    for (;;) {
      wait_for_region(seen);
      seen = generation_.load(std::memory_order_acquire);
      if (index < threads_) {
        Region region{index, threads_, scratch_};
        job_(region, context_);
      }
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  void wait_for_region(unsigned seen) {
    for (int spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
      if (generation_.load(std::memory_order_acquire) != seen) return;
      relax();
    }
    std::unique_lock<std::mutex> hold(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(hold, [&] { return generation_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  void reserve(size_t bytes) {
    if (bytes <= scratch_bytes_) return;
    std::free(scratch_);
    scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
    scratch_ = static_cast<char*>(std::aligned_alloc(64, scratch_bytes_));
    if (scratch_ == nullptr) std::abort();
  }

  std::mutex region_, sleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> round_{0};
  std::atomic<int> sleepers_{0};
  Job job_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 1, workers_ = 0;
  char* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

// Never destroyed: its workers outlive every static object. A forked child has none of the
// workers, so it starts with a new pool.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found == nullptr) {
    static std::once_flag once;
    std::call_once(once, [] {
      current.store(new Pool);
#if !defined(_WIN32)
      pthread_atfork(nullptr, nullptr, [] { current.store(new Pool); });
#endif
    });
    found = current.load();
  }
  return *found;
}

}  // namespace

void run_region(int threads, size_t scratch_bytes, Job job, void* context) {
  pool().run(threads, scratch_bytes, job, context);
}

void Region::barrier() {
  if (threads > 1) pool().barrier(threads);
}

}  // namespace ts
