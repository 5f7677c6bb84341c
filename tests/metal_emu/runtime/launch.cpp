// Runs a grid: threadgroups one after another, the threads of one in lock-step at collectives and
// barriers. One launch a process at a time.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>

#include "state.h"

using namespace emu;

namespace {
unsigned char posted[max_simdgroups][2][lanes][64];
uint32_t active_lanes[max_simdgroups];

enum Order { forwards = 0, backwards = 1 };  // anything larger seeds a shuffle
uint32_t order;
std::mt19937 shuffler;
bool strict;

struct Shape {
  uint32_t x, y, z;
  uint32_t count() const { return x * y * z; }
};

std::vector<uint32_t> in_order(uint32_t from, uint32_t to) {
  std::vector<uint32_t> indices;
  for (uint32_t i = from; i < to; i++) indices.push_back(i);
  if (order == backwards) std::reverse(indices.begin(), indices.end());
  if (order > backwards) std::shuffle(indices.begin(), indices.end(), shuffler);
  return indices;
}

void set3(uint32_t* to, uint32_t x, uint32_t y, uint32_t z) {
  to[0] = x;
  to[1] = y;
  to[2] = z;
}

void set_attributes(emu_thread& self, uint32_t index, Shape grid, Shape full, Shape group,
                    Shape size) {
  uint32_t x = index % size.x, y = index / size.x % size.y, z = index / (size.x * size.y);
  self = {};
  set3(self.dispatch_threads_per_threadgroup, full.x, full.y, full.z);
  set3(self.grid_size, grid.x, grid.y, grid.z);
  set3(self.threads_per_grid, grid.x, grid.y, grid.z);
  set3(self.thread_position_in_threadgroup, x, y, z);
  set3(self.thread_position_in_grid, group.x * full.x + x, group.y * full.y + y,
       group.z * full.z + z);
  set3(self.threadgroup_position_in_grid, group.x, group.y, group.z);
  set3(self.threadgroups_per_grid, (grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y,
       (grid.z + full.z - 1) / full.z);
  set3(self.threads_per_threadgroup, size.x, size.y, size.z);
  self.thread_index_in_threadgroup = index;
  self.thread_index_in_simdgroup = index % lanes;
  self.simdgroup_index_in_threadgroup = index / lanes;
  self.simdgroups_per_threadgroup = (size.count() + lanes - 1) / lanes;
  self.dispatch_simdgroups_per_threadgroup = (full.count() + lanes - 1) / lanes;
  self.thread_execution_width = self.threads_per_simdgroup = lanes;
  self.thread_index_in_quadgroup = index % 4;
  self.quadgroup_index_in_threadgroup = index / 4;
  self.quadgroups_per_threadgroup = (size.count() + 3) / 4;
  self.dispatch_quadgroups_per_threadgroup = (full.count() + 3) / 4;
}

const uint32_t* group_of(uint32_t thread) {
  return fibers[thread].self.threadgroup_position_in_grid;
}

// All live lanes of a SIMD-group must wait in the same collective.
void check_convergence(uint32_t from, uint32_t to, const Fiber& waiting) {
  const uint32_t* g = group_of(from);
  uint32_t simdgroup = from / lanes;
  for (uint32_t t = from; t < to; t++) {
    const Fiber& f = fibers[t];
    bool same =
        f.status == Status::in_collective && f.line == waiting.line && f.call == waiting.call;
    if (f.status == Status::done || same) continue;
    return fault(nullptr,
                 "divergent SIMD-group: lane %u waits in %s (line %d) but lane %u in %s (line %d), "
                 "threadgroup (%u,%u,%u) simdgroup %u",
                 (uint32_t)(&waiting - fibers) - from, waiting.call, waiting.line, t - from, f.call,
                 f.line, g[0], g[1], g[2], simdgroup);
  }
  if (strict && active_lanes[simdgroup] != ~0u)
    fault(nullptr,
          "%s (line %d) with only some of the 32 lanes (mask %08x), threadgroup (%u,%u,%u) "
          "simdgroup %u: undefined on CUDA",
          waiting.call, waiting.line, active_lanes[simdgroup], g[0], g[1], g[2], simdgroup);
}

// Run a SIMD-group until all its lanes are done or wait for the threadgroup.
void run_simdgroup(uint32_t simdgroup, uint32_t threads) {
  uint32_t from = simdgroup * lanes, to = std::min(threads, from + lanes);
  std::vector<uint32_t> turn = in_order(from, to);
  while (!faulted) {
    for (uint32_t t : turn) {
      if (fibers[t].status == Status::ready) resume(t);
      if (faulted) return;
    }
    const Fiber* waiting = nullptr;
    active_lanes[simdgroup] = 0;
    for (uint32_t t = from; t < to; t++) {
      if (fibers[t].status != Status::in_collective) continue;
      waiting = &fibers[t];
      active_lanes[simdgroup] |= 1u << (t - from);
    }
    if (!waiting) return;
    check_convergence(from, to, *waiting);
    if (faulted) return;
    if (!strcmp(waiting->call, "simdgroup_barrier")) simdgroup_epoch[simdgroup]++;
    for (uint32_t t = from; t < to; t++)
      if (fibers[t].status == Status::in_collective) fibers[t].status = Status::ready;
  }
}

// Let a threadgroup that waits in a barrier go on; false when all its threads are done.
bool pass_barrier(uint32_t threads) {
  const Fiber *waiting = nullptr, *done = nullptr;
  for (uint32_t t = 0; t < threads; t++)
    (fibers[t].status == Status::in_barrier ? waiting : done) = &fibers[t];
  if (!waiting) return false;
  const uint32_t* g = group_of(0);
  if (done) {
    fault(nullptr,
          "barrier divergence: thread %u waits in %s (line %d) but thread %u has returned, "
          "threadgroup (%u,%u,%u)",
          (uint32_t)(waiting - fibers), waiting->call, waiting->line, (uint32_t)(done - fibers),
          g[0], g[1], g[2]);
    return false;
  }
  for (uint32_t t = 0; t < threads; t++) {
    if (fibers[t].line != waiting->line) {
      fault(nullptr,
            "barrier divergence: thread %u waits at line %d but thread %u at line %d, "
            "threadgroup (%u,%u,%u)",
            (uint32_t)(waiting - fibers), waiting->line, t, fibers[t].line, g[0], g[1], g[2]);
      return false;
    }
    fibers[t].status = Status::ready;
  }
  barrier_epoch++;
  return true;
}

void run_threadgroup(Shape grid, Shape full, Shape group, uint64_t first_thread) {
  // The last threadgroup of a dimension may be partial.
  Shape size = {std::min(full.x, grid.x - group.x * full.x),
                std::min(full.y, grid.y - group.y * full.y),
                std::min(full.z, grid.z - group.z * full.z)};
  uint32_t threads = size.count(), simdgroups = (threads + lanes - 1) / lanes;
  set_threadgroup(first_thread);
  for (uint32_t t = 0; t < threads; t++) {
    set_attributes(fibers[t].self, t, grid, full, group, size);
    start_fiber(t);
  }
  do {
    for (uint32_t simdgroup : in_order(0, simdgroups)) {
      run_simdgroup(simdgroup, threads);
      if (faulted) return;
    }
  } while (pass_barrier(threads));
}

void run_grid(Shape grid, Shape full) {
  uint64_t first_thread = 0;
  for (uint32_t z = 0; z * full.z < grid.z; z++)
    for (uint32_t y = 0; y * full.y < grid.y; y++)
      for (uint32_t x = 0; x * full.x < grid.x; x++) {
        run_threadgroup(grid, full, {x, y, z}, first_thread);
        first_thread += full.count();
        if (faulted) return;
      }
}

void on_signal(int signal, siginfo_t* info, void*) {
  if (current >= 0) explain_signal(signal, info->si_addr);
  ::signal(signal, SIG_DFL);
}

// Turns memory faults into reports while it lives.
class SignalGuard {
 public:
  SignalGuard() {
    static char* stack = (char*)malloc(stack_bytes);
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = stack_bytes;
    sigaltstack(&own, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &old_actions[i]);
  }
  ~SignalGuard() {
    for (int i = 0; i < 3; i++) sigaction(signals[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }

 private:
  static constexpr size_t stack_bytes = 64 << 10;
  static constexpr int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  stack_t old_stack;
  struct sigaction old_actions[3];
};
}  // namespace

extern "C" {
const emu_thread* emu_current_thread() { return &fibers[current].self; }

emu_posted emu_collective(const void* value, uint32_t size, const char* name, int line) {
  Fiber& f = fibers[current];
  uint32_t simdgroup = f.self.simdgroup_index_in_threadgroup;
  uint32_t lane = f.self.thread_index_in_simdgroup;
  f.parity ^= 1;
  if (size) memcpy(posted[simdgroup][f.parity][lane], value, size);
  f.status = Status::in_collective;
  f.call = name;
  f.line = line;
  yield_to_scheduler();
  return {posted[simdgroup][f.parity], active_lanes[simdgroup], lane};
}

void emu_simdgroup_barrier(const char* name, int line) { emu_collective(nullptr, 0, name, line); }

void emu_threadgroup_barrier(const char* name, int line) {
  Fiber& f = fibers[current];
  f.status = Status::in_barrier;
  f.call = name;
  f.line = line;
  yield_to_scheduler();
}

// Returns 1 when the launch faulted: the message and program counter are then set.
int emu_run(emu_function kernel, int count, BufferArgument* given, const uint32_t* grid,
            const uint32_t* threadgroup, uint32_t thread_order, int checked, int is_strict,
            char* message, void** pc, Report* result) {
  clear_fault();
  report = {};
  entry = kernel;
  order = thread_order;
  shuffler.seed(thread_order);
  strict = is_strict;
  map_stacks();
  set_kernel_image((void*)kernel);
  map_buffers(given, count, checked);
  {
    SignalGuard guard;
    Shape whole = {grid[0], grid[1], grid[2]};
    run_grid(whole, {std::min(threadgroup[0], whole.x), std::min(threadgroup[1], whole.y),
                     std::min(threadgroup[2], whole.z)});
  }
  unmap_buffers(given, checked);
  *result = report;
  snprintf(message, sizeof fault_message, "%s", fault_message);
  *pc = fault_pc;
  return faulted;
}
}
