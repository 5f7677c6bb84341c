// The first fault of a launch: its text, and the program counter that launch.py turns into a line.
#include <stdarg.h>
#include <stdio.h>

#include "state.h"

namespace emu {
bool faulted;
char fault_message[1024];
void* fault_pc;

void clear_fault() {
  faulted = false;
  fault_message[0] = 0;
  fault_pc = nullptr;
}

void fault(void* pc, const char* format, ...) {
  if (!faulted) {
    faulted = true;
    fault_pc = pc;
    va_list values;
    va_start(values, format);
    int n = vsnprintf(fault_message, sizeof fault_message, format, values);
    va_end(values);
    if (current >= 0 && n >= 0 && n < (int)sizeof fault_message) {
      const emu_thread& self = fibers[current].self;
      const uint32_t* t = self.thread_position_in_threadgroup;
      const uint32_t* g = self.threadgroup_position_in_grid;
      snprintf(fault_message + n, sizeof fault_message - n,
               " [thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u lane %u]", t[0], t[1],
               t[2], g[0], g[1], g[2], self.simdgroup_index_in_threadgroup,
               self.thread_index_in_simdgroup);
    }
  }
  if (current >= 0) yield_to_scheduler();
}
}  // namespace emu
