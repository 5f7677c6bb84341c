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

// A spin is about 40 ns. Workers rest after a third of a millisecond, longer than the gap between
// two kernels; from time to time they offer the core to others, as threads may outnumber cores.
constexpr int SPINS_BEFORE_SLEEP = 8000;
constexpr int SPINS_BETWEEN_YIELDS = 250;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(Condition done, int most) {
  for (int spins = 1; !done(); spins++) {
    if (spins == most) return false;
    if (spins % SPINS_BETWEEN_YIELDS == 0)
      std::this_thread::yield();
    else
      relax();
  }
  return true;
}

template <class Condition>
void spin_until(Condition done) {
  while (!spin_until(done, 1 << 30)) {
  }
}

class Pool {
 public:
  void run(int threads, size_t scratch_bytes, Job job, void* context) {
    std::lock_guard<std::mutex> one_region(region_);
    prepare(threads, scratch_bytes);
    job_ = job;
    context_ = context;
    for (Shared& loop : loops_) loop.reset();
    open();
    job_on(0);
    close();
  }

 private:
  void prepare(int threads, size_t scratch_bytes) {
    while (workers_ < threads - 1 && start_worker()) {
    }
    threads_ = std::max(1, std::min(threads, workers_ + 1));
    if (scratch_bytes > scratch_bytes_) grow(scratch_bytes);
  }

  // From here on workers may enter.
  void open() {
    if (threads_ == 1) return;
    const unsigned next = generation_.load(std::memory_order_relaxed) + 1;
    opened_.store(next);
    generation_.store(next);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> hold(sleep_);
      wake_.notify_all();
    }
  }

  // A worker that comes later finds it closed; those inside are waited for.
  void close() {
    opened_.store(0);
    spin_until([&] { return inside_.load() == 0; });
  }

  void job_on(int thread) {
    Crew crew{thread, threads_, scratch_, loops_};
    job_(crew, context_);
  }

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
      seen = generation_.load();
      inside_.fetch_add(1);
      if (opened_.load() == seen && index < threads_) job_on(index);
      inside_.fetch_sub(1);
    }
  }

  void wait_for_region(unsigned seen) {
    const auto changed = [&] { return generation_.load() != seen; };
    if (spin_until(changed, SPINS_BEFORE_SLEEP)) return;
    std::unique_lock<std::mutex> hold(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(hold, changed);
    sleepers_.fetch_sub(1);
  }

  void grow(size_t bytes) {
    std::free(scratch_);
    scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
    scratch_ = static_cast<char*>(std::aligned_alloc(64, scratch_bytes_));
    if (scratch_ == nullptr) std::abort();
  }

  std::mutex region_, sleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<unsigned> generation_{0};  // regions ever opened
  alignas(64) std::atomic<unsigned> opened_{0};      // the open one, or 0
  alignas(64) std::atomic<int> inside_{0};           // workers that may be looking at it
  alignas(64) std::atomic<int> sleepers_{0};
  Shared loops_[Crew::MAX_LOOPS];
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

void Crew::wait_for(const Shared& loop, int64_t count) {
  spin_until([&] { return loop.done.load(std::memory_order_acquire) == count; });
}

}  // namespace ts
