// What the runtime's own files share: the fibers, the memory they may touch, the first fault.
#pragma once

#include <vector>

#include "abi.h"

// Hidden, so that calls for every access of a kernel do not go through the loader's tables.
namespace emu __attribute__((visibility("hidden"))) {
constexpr uint32_t max_threads = 1024;
constexpr uint32_t lanes = 32;
constexpr uint32_t max_simdgroups = max_threads / lanes;
constexpr size_t page = 4096;
extern size_t threadgroup_limit;  // bytes of a threadgroup's variables

enum class Status : uint8_t { ready, in_collective, in_barrier, done };

// One GPU thread.
struct Fiber {
  void* stack_pointer;
  Status status;
  uint8_t parity;    // which half of its collective slots it writes next
  const char* call;  // the barrier or collective it waits in, and the line of that call
  int line;
  emu_thread self;
};

// What a launch reports besides its outputs. Mirrored by `Report` in launch.py.
struct Report {
  uint64_t unwritten;  // bytes of the outputs that no thread wrote
  uint64_t conflicts;  // accesses to output bytes that another thread wrote
  uint64_t accesses;
  uint32_t threadgroup_bytes;
  char conflict[256];
  void* conflict_pc;
  char unwritten_name[64];
  uint64_t unwritten_at;
};

extern Fiber fibers[max_threads];
extern int current;  // index of the running fiber, -1 in the scheduler
extern Report report;
extern emu_function entry;
extern std::vector<void*> arguments;

// Order of memory accesses: one count a threadgroup barrier, one a SIMD-group's own barrier.
extern uint32_t barrier_epoch;
extern uint32_t simdgroup_epoch[max_simdgroups];

// fault.cpp: the first fault ends the launch; a fiber that faults is never resumed.
extern bool faulted;
extern char fault_message[1024];
extern void* fault_pc;
void clear_fault();
__attribute__((format(printf, 2, 3))) void fault(void* pc, const char* format, ...);

// fiber.cpp
void map_stacks();
void start_fiber(uint32_t index);
void resume(uint32_t index);
void yield_to_scheduler();
bool on_own_stack(uintptr_t address);
bool on_any_stack(uintptr_t address);

// memory.cpp
struct BufferArgument {  // mirrored by `BufferArgument` in launch.py
  void* data;
  size_t size;
  int is_output, has_initial;
  const char* name;
};
void map_buffers(BufferArgument* given, int count, bool checked);
void unmap_buffers(BufferArgument* given, bool checked);
void set_threadgroup(uint64_t first_thread);
void set_kernel_image(void* address_in_it);
void access(const volatile void* address, unsigned size, bool write, void* pc, bool atomic);
void explain_signal(int signal, void* address);
}  // namespace emu
