// Memory a kernel may touch: buffers between guard pages, and threadgroup memory with a shadow
// that remembers who wrote and read each byte last.
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "state.h"

namespace emu {
Report report;
uint32_t barrier_epoch;
uint32_t simdgroup_epoch[max_simdgroups];

namespace {
constexpr size_t guard_bytes = 64 << 20, arena_bytes = 256 << 10, red_zone = 64;
constexpr uint32_t by_atomics = ~0u;

struct Buffer {
  char* map;
  size_t map_bytes;
  char* data;
  size_t size;
  bool is_output, has_initial;
  const char* name;
  std::vector<uint32_t> writer;  // a byte: 1 + number of the thread that wrote it, 0 for none
};
std::vector<Buffer> buffers;

struct Variable {
  size_t offset, size;
  const char* name;
};
constexpr int max_variables = 64;
Variable variables[max_variables];
char* arena;
size_t arena_used;

constexpr int16_t nobody = -1, several = -2, several_of_first_simdgroup = -3;
struct Touch {  // the last access of one kind to a byte
  uint32_t epoch, simdgroup_epoch;
  int16_t thread;
};
struct Shadow {
  uint32_t threadgroup;
  Touch write, read;
};
std::vector<Shadow> shadow;
uint32_t threadgroup_number;
uint64_t first_thread_number;
uintptr_t image_start, image_end;

const Variable* variable_at(size_t offset, size_t slack) {
  for (const Variable& v : variables)
    if (v.size && offset + slack >= v.offset && offset < v.offset + v.size + slack) return &v;
  return nullptr;
}

// Whose SIMD-group's access that was; -1 where it was more than one's.
int simdgroup_of(const Touch& touch) {
  if (touch.thread >= 0) return (int)fibers[touch.thread].self.simdgroup_index_in_threadgroup;
  return touch.thread <= several_of_first_simdgroup ? several_of_first_simdgroup - touch.thread : -1;
}

// Did a barrier come between that access and one by the current thread now?
bool ordered(const Touch& before) {
  if (before.thread == current || before.epoch != barrier_epoch) return true;
  int theirs = simdgroup_of(before);
  int mine = (int)fibers[current].self.simdgroup_index_in_threadgroup;
  return theirs == mine && before.simdgroup_epoch != simdgroup_epoch[mine];
}

void touch_threadgroup_byte(const Variable& v, size_t at, bool write, void* pc) {
  Shadow& s = shadow[at];
  size_t byte = at - v.offset;
  if (s.threadgroup != threadgroup_number) {
    s = {threadgroup_number, {0, 0, nobody}, {0, 0, nobody}};
  }
  if (!write && s.write.epoch == 0)
    return fault(pc,
                 "read of uninitialised threadgroup memory '%s' at byte %zu (never written, or no "
                 "barrier since)",
                 v.name, byte);
  if (s.write.epoch && !ordered(s.write))
    return fault(pc,
                 "race on threadgroup memory '%s' at byte %zu: %s after a write by thread %d with "
                 "no barrier between",
                 v.name, byte, write ? "write" : "read", s.write.thread);
  if (write && s.read.epoch && !ordered(s.read))
    return fault(pc,
                 "race on threadgroup memory '%s' at byte %zu: write after a read by thread %d "
                 "with no barrier between",
                 v.name, byte, s.read.thread);
  uint32_t group = fibers[current].self.simdgroup_index_in_threadgroup;
  Touch now = {barrier_epoch, simdgroup_epoch[group], (int16_t)current};
  if (write) {
    s.write = now;
    return;
  }
  if (s.read.epoch == barrier_epoch && s.read.thread != current && !ordered(s.read)) {
    bool is_same = simdgroup_of(s.read) == (int)group;
    now.thread = is_same ? (int16_t)(several_of_first_simdgroup - (int)group) : several;
  }
  s.read = now;
}

void touch_threadgroup_memory(uintptr_t address, unsigned size, bool write, void* pc) {
  size_t offset = address - (uintptr_t)arena;
  const Variable* v = variable_at(offset, 0);
  if (!v || offset + size > v->offset + v->size) {
    const Variable* near = v ? v : variable_at(offset, 4 * red_zone);
    return fault(pc,
                 "%s of %u bytes outside threadgroup memory (near '%s', offset %ld of %zu bytes)",
                 write ? "write" : "read", size, near ? near->name : "?",
                 near ? (long)offset - (long)near->offset : -1, near ? near->size : 0);
  }
  for (unsigned k = 0; k < size; k++) touch_threadgroup_byte(*v, offset + k, write, pc);
}

void note_conflict(const Buffer& b, ptrdiff_t byte, bool write, void* pc) {
  if (report.conflicts++) return;
  snprintf(report.conflict, sizeof report.conflict, "%s '%s' byte %td that another thread wrote",
           write ? "write of" : "read of", b.name, byte);
  report.conflict_pc = pc;
}

void touch_buffer(Buffer& b, uintptr_t address, unsigned size, bool write, void* pc, bool atomic) {
  ptrdiff_t offset = (char*)address - b.data;
  if (offset < 0 || (size_t)offset + size > b.size)
    return fault(pc, "%s of %u bytes out of bounds of buffer '%s': byte offset %td, size %zu",
                 write ? "write" : "read", size, b.name, offset, b.size);
  if (write && !b.is_output) return fault(pc, "write to input buffer '%s'", b.name);
  if (!b.is_output || b.writer.empty()) return;
  uint32_t me = (uint32_t)(1 + first_thread_number + (uint64_t)current);
  for (unsigned k = 0; k < size; k++) {
    uint32_t& writer = b.writer[offset + k];
    if (atomic) {
      if (write) writer = by_atomics;
      continue;
    }
    if (!write && !writer && !b.has_initial)
      return fault(pc, "read of output '%s' at byte %td before it was written", b.name, offset + k);
    if (writer && writer != me && writer != by_atomics) note_conflict(b, offset + k, write, pc);
    if (write) writer = me;
  }
}

// A buffer sits at the end of its own mapping, before 64 MiB of pages that nobody may touch.
Buffer map_buffer(const BufferArgument& given, bool checked) {
  Buffer b{};
  b.size = given.size;
  b.is_output = given.is_output;
  b.has_initial = given.has_initial;
  b.name = given.name;
  size_t bytes = (b.size + page) / page * page;
  b.map_bytes = bytes + 2 * guard_bytes;
  b.map = (char*)mmap(nullptr, b.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
  if (b.map == MAP_FAILED) abort();
  char* start = b.map + guard_bytes;
  mprotect(start, bytes, PROT_READ | PROT_WRITE);
  b.data = start + bytes - (b.size + 15) / 16 * 16;
  memset(start, 0xFF, bytes);
  memcpy(b.data, given.data, b.size);
  if (!b.is_output) mprotect(start, bytes, PROT_READ);
  if (b.is_output && checked) b.writer.assign(b.size, 0);
  return b;
}

void count_unwritten(const Buffer& b) {
  for (size_t k = 0; k < b.size; k++) {
    if (b.writer[k] || report.unwritten++) continue;
    snprintf(report.unwritten_name, sizeof report.unwritten_name, "%s", b.name);
    report.unwritten_at = k;
  }
}

int widen_image(dl_phdr_info* info, size_t, void*) {
  if (info->dlpi_addr != image_start) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    image_end = std::max<uintptr_t>(image_end, image_start + header.p_vaddr + header.p_memsz);
  }
  return 0;
}
}  // namespace

void map_buffers(BufferArgument* given, int count, bool checked) {
  arguments.clear();
  for (int i = 0; i < count; i++) {
    buffers.push_back(map_buffer(given[i], checked));
    arguments.push_back(buffers.back().data);
  }
}

void unmap_buffers(BufferArgument* given, bool checked) {
  for (size_t i = 0; i < buffers.size(); i++) {
    const Buffer& b = buffers[i];
    if (b.is_output) memcpy(given[i].data, b.data, b.size);
    if (b.is_output && checked && !b.has_initial && !faulted) count_unwritten(b);
    munmap(b.map, b.map_bytes);
  }
  buffers.clear();
}

void set_threadgroup(uint64_t first_thread) {
  if (!arena) {
    arena = (char*)mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    if (arena == MAP_FAILED) abort();
    shadow.resize(arena_bytes);
  }
  first_thread_number = first_thread;
  threadgroup_number++;
  barrier_epoch++;
  arena_used = red_zone;
  report.threadgroup_bytes = 0;
  memset(variables, 0, sizeof variables);
  memset(arena, 0xFF, arena_bytes);
  memset(simdgroup_epoch, 0, sizeof simdgroup_epoch);
}

void set_kernel_image(void* address_in_it) {
  Dl_info info;
  dladdr(address_in_it, &info);
  image_start = image_end = (uintptr_t)info.dli_fbase;
  dl_iterate_phdr(widen_image, nullptr);
}

void access(const volatile void* pointer, unsigned size, bool write, void* pc, bool atomic) {
  if (current < 0) return;
  uintptr_t address = (uintptr_t)pointer;
  report.accesses++;
  if (on_own_stack(address)) return;
  if (address - (uintptr_t)arena < arena_bytes) {
    if (!atomic) touch_threadgroup_memory(address, size, write, pc);
    return;
  }
  for (Buffer& b : buffers) {
    if (address - (uintptr_t)b.map < b.map_bytes)
      return touch_buffer(b, address, size, write, pc, atomic);
  }
  if (address >= image_start && address < image_end) return;  // the kernel's constant tables
  if (address - (uintptr_t)fibers < sizeof fibers) return;    // its thread attributes
  if (on_any_stack(address))
    return fault(pc, "%s of another thread's private memory", write ? "write" : "read");
  fault(pc, "%s of %u bytes at a wild address", write ? "write" : "read", size);
}

void explain_signal(int signal, void* pointer) {
  uintptr_t address = (uintptr_t)pointer;
  for (const Buffer& b : buffers) {
    if (address - (uintptr_t)b.map < b.map_bytes)
      fault(nullptr, "access out of bounds of buffer '%s': byte offset %td, size %zu (guard page)",
            b.name, (char*)address - b.data, b.size);
  }
  if (signal == SIGFPE) fault(nullptr, "integer division by zero");
  fault(nullptr, "memory fault at a wild address (or the thread's stack is full)");
}
}  // namespace emu

size_t emu::threadgroup_limit = 32 << 10;

extern "C" void emu_limit_threadgroup(size_t bytes) { emu::threadgroup_limit = bytes; }

extern "C" void* emu_threadgroup_variable(int id, size_t size, const char* name) {
  using namespace emu;
  if (id >= max_variables) fault(nullptr, "more than %d threadgroup variables", max_variables);
  Variable& v = variables[id];
  if (!v.size) {
    report.threadgroup_bytes += size;
    if (report.threadgroup_bytes > threadgroup_limit)
      fault(nullptr, "threadgroup memory is %u bytes, more than %zu", report.threadgroup_bytes,
            threadgroup_limit);
    v = {arena_used, size, name};
    arena_used += (size + red_zone + 63) / 64 * 64;
  }
  return arena + v.offset;
}
