// What a compiled kernel and the runtime share. No C++ standard header is included here, so that
// a kernel compiles in a fraction of a second.
#pragma once
#include <stddef.h>
#include <stdint.h>

// What a thread can see through [[attributes]].
struct emu_thread {
  uint32_t dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  uint32_t dispatch_threads_per_threadgroup[3], grid_origin[3], grid_size[3];
  uint32_t quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  uint32_t simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
  uint32_t thread_execution_width, thread_index_in_quadgroup, thread_index_in_simdgroup;
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3];
  uint32_t threadgroup_position_in_grid[3], threadgroups_per_grid[3], threads_per_grid[3];
  uint32_t threads_per_simdgroup, threads_per_threadgroup[3];
};

// The values that the lanes of a SIMD-group posted to one collective.
struct emu_posted {
  const unsigned char (*values)[64];
  uint32_t active;  // bit l: lane l takes part
  uint32_t lane;    // the lane that asks
};

extern "C" {
// Post a value and wait until every live lane of the SIMD-group has posted its own.
emu_posted emu_collective(const void* value, uint32_t size, const char* name, int line);
void emu_threadgroup_barrier(const char* name, int line);
void emu_simdgroup_barrier(const char* name, int line);
void* emu_threadgroup_variable(int id, size_t size, const char* name);
void emu_atomic_access(const volatile void* address, uint32_t size, int write);
const emu_thread* emu_current_thread();
}

typedef void (*emu_function)(void* const* buffers, const emu_thread* self);
