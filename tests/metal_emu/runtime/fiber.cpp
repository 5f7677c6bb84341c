// Fibers: a stack a GPU thread, switched by hand. x86-64 only.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly; other processors are not supported"
#endif

extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emu {
Fiber fibers[max_threads];
int current = -1;
emu_function entry;
std::vector<void*> arguments;

namespace {
constexpr size_t stack_bytes = 256 << 10, saved_registers = 6;
// Stacks that began at the same place of a page would push each other out of the CPU's caches.
constexpr size_t stagger = 17 * 64;
char* stacks;
void* scheduler_stack;

void fiber_main() {
  entry(arguments.data(), &fibers[current].self);
  fibers[current].status = Status::done;
  yield_to_scheduler();
}
}  // namespace

void map_stacks() {
  if (stacks) return;
  stacks = (char*)mmap(nullptr, max_threads * stack_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) abort();
  for (uint32_t i = 0; i < max_threads; i++) mprotect(stacks + i * stack_bytes, page, PROT_NONE);
}

void start_fiber(uint32_t index) {
  void** top = (void**)(stacks + (index + 1) * stack_bytes - 64 - index % lanes * stagger);
  *--top = nullptr;  // the return address of fiber_main, which never returns
  *--top = (void*)fiber_main;
  top -= saved_registers;
  memset(top, 0, saved_registers * sizeof(void*));
  fibers[index].stack_pointer = top;
  fibers[index].status = Status::ready;
  fibers[index].parity = 0;
}

void resume(uint32_t index) {
  current = (int)index;
  emu_switch(&scheduler_stack, fibers[index].stack_pointer);
  current = -1;
}

void yield_to_scheduler() { emu_switch(&fibers[current].stack_pointer, scheduler_stack); }

bool on_own_stack(uintptr_t address) {
  return address - (uintptr_t)(stacks + (size_t)current * stack_bytes) < stack_bytes;
}

bool on_any_stack(uintptr_t address) {
  return address - (uintptr_t)stacks < max_threads * stack_bytes;
}
}  // namespace emu
