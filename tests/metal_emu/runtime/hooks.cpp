// The hooks that clang's instrumentation calls. `-fsanitize=thread` announces every memory access
// and `-fsanitize=...` of UBSan's family every undefined operation; neither runtime is linked.
#include <string.h>

#include "state.h"

#define CALLER __builtin_return_address(0)

extern "C" {
#define ACCESS_HOOKS(n)                                                               \
  void __tsan_read##n(void* p) { emu::access(p, n, false, CALLER, false); }           \
  void __tsan_write##n(void* p) { emu::access(p, n, true, CALLER, false); }           \
  void __tsan_unaligned_read##n(void* p) { emu::access(p, n, false, CALLER, false); } \
  void __tsan_unaligned_write##n(void* p) { emu::access(p, n, true, CALLER, false); } \
  void __tsan_read_write##n(void* p) { emu::access(p, n, true, CALLER, false); }      \
  void __tsan_unaligned_read_write##n(void* p) { emu::access(p, n, true, CALLER, false); }
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)

void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

void* __tsan_memcpy(void* to, const void* from, size_t size) {
  if (size) {
    emu::access(from, size, false, CALLER, false);
    emu::access(to, size, true, CALLER, false);
  }
  return memcpy(to, from, size);
}

void* __tsan_memmove(void* to, const void* from, size_t size) {
  if (size) {
    emu::access(from, size, false, CALLER, false);
    emu::access(to, size, true, CALLER, false);
  }
  return memmove(to, from, size);
}

void* __tsan_memset(void* to, int value, size_t size) {
  if (size) emu::access(to, size, true, CALLER, false);
  return memset(to, value, size);
}

void emu_atomic_access(const volatile void* address, uint32_t size, int write) {
  emu::access(address, size, write, CALLER, true);
}

// The first field of every record that clang passes to a UBSan handler.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void __ubsan_handle_out_of_bounds(SourceLocation* at, uintptr_t index) {
  emu::fault(nullptr, "index %ld out of bounds of an array at %s:%u", (long)index, at->file,
             at->line);
}

void __ubsan_handle_shift_out_of_bounds(SourceLocation* at, uintptr_t, uintptr_t count) {
  emu::fault(nullptr, "shift by %ld, more than the width, at %s:%u", (long)count, at->file,
             at->line);
}

void __ubsan_handle_divrem_overflow(SourceLocation* at, uintptr_t, uintptr_t) {
  emu::fault(nullptr, "integer division by zero at %s:%u", at->file, at->line);
}

void __ubsan_handle_type_mismatch_v1(SourceLocation* at, uintptr_t pointer) {
  emu::fault(nullptr, "misaligned address (%lu modulo 16) at %s:%u", (unsigned long)(pointer % 16),
             at->file, at->line);
}
}
