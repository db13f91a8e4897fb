// Allocators that reuse as early as the rules allow, poison, and the fault that names the tensor.
#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <list>
#include <set>
#include <stdexcept>

namespace sim {

namespace {

using Guard = std::lock_guard<std::recursive_mutex>;
constexpr size_t PAGE = 4096, ARENA = size_t(1) << 36;

struct Block {
  size_t size;  // whole pages
  int64_t stream;
  bool live = true;
  std::set<int64_t> used_on = {};      // other streams, as record_stream said
  std::vector<MarkPtr> pending = {};   // where those were when it was freed
};

struct Arena {
  int device;
  char *locked, *open;  // the same pages without rights, and with
  size_t top = 0, live = 0, capacity = ARENA;
  std::map<size_t, Block> blocks;  // by offset
  std::list<size_t> free, freeing;   // newest first; freed, but other streams may still use it

  explicit Arena(int device) : device(device) {
    int file = memfd_create("sim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, ARENA)) throw std::runtime_error("sim: no memory file");
    auto map = [&](int rights) {
      return static_cast<char*>(mmap(nullptr, ARENA, rights, MAP_SHARED | MAP_NORESERVE, file, 0));
    };
    locked = map(PROT_NONE);
    open = map(PROT_READ | PROT_WRITE);
    close(file);
    if (locked == MAP_FAILED || open == MAP_FAILED) throw std::runtime_error("sim: no addresses");
  }

  bool holds(const void* pointer) const { return pointer >= locked && pointer < locked + ARENA; }

  // Poison in stream order: what is queued on the stream may still use the memory, nothing else.
  void release(size_t offset) {
    auto& block = blocks.at(offset);
    auto* begin = open + offset;
    auto size = block.size;
    scheduler().push(device, block.stream, "poison", [=] { std::memset(begin, POISON, size); });
    free.push_front(offset);
  }

  void release_finished() {
    for (auto at = freeing.begin(); at != freeing.end();) {
      bool done = true;
      for (auto& mark : blocks.at(*at).pending) done &= mark->done;
      if (done) release(*at);
      at = done ? freeing.erase(at) : std::next(at);
    }
  }
};

Arena& arena(int device) {
  static Arena* all[DEVICES] = {new Arena(0), new Arena(1)};
  return *all[device];
}

Arena* arena_of(const void* pointer) {
  for (int device = 0; device < DEVICES; ++device)
    if (arena(device).holds(pointer)) return &arena(device);
  return nullptr;
}

std::pair<const size_t, Block>* block_of(Arena& in, const void* pointer) {
  size_t offset = static_cast<const char*>(pointer) - in.locked;
  auto at = in.blocks.upper_bound(offset);
  return at == in.blocks.begin() ? nullptr : &*--at;
}

struct sigaction before;

// No lock: the process ends here, and whoever holds the lock may be this thread.
void name_the_tensor(int, siginfo_t* info, void*) {
  char text[400];
  if (auto* in = arena_of(info->si_addr)) {
    auto* found = block_of(*in, info->si_addr);
    size_t offset = static_cast<char*>(info->si_addr) - in->locked - (found ? found->first : 0);
    int length = std::snprintf(
        text, sizeof text, "sim: the CPU touched device memory: byte %zu of %s%s on sim:%d\n", offset,
        found ? "a tensor" : "nothing",
        found && !found->second.live ? " (freed)" : "", in->device);
    if (write(2, text, length) < 0) _exit(139);
  }
  sigaction(SIGSEGV, &before, nullptr);  // the same access faults again, and ends the process
}

struct Handler {
  Handler() {
    struct sigaction ours = {};
    ours.sa_sigaction = name_the_tensor;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &ours, &before);
  }
} handler;

}  // namespace

void* allocate(int device, int64_t stream, size_t bytes) {
  Guard guard(scheduler().lock);
  auto& in = arena(device);
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  if (in.live + size > in.capacity) return nullptr;
  in.release_finished();
  size_t offset = in.top;
  auto at = in.free.begin();
  for (; at != in.free.end(); ++at) {  // the newest that fits
    auto& block = in.blocks.at(*at);
    if (block.stream == stream && block.size == size) break;
  }
  if (at != in.free.end()) {
    offset = *at;
    in.free.erase(at);
  } else {
    if (in.top + size > ARENA) return nullptr;
    in.top += size;
    std::memset(in.open + offset, POISON, size);  // nobody has had it before
  }
  in.live += size;
  in.blocks[offset] = Block{size, stream};
  return in.locked + offset;
}

void free(void* pointer) {
  Guard guard(scheduler().lock);
  auto& in = *arena_of(pointer);
  auto& [offset, block] = *block_of(in, pointer);
  block.live = false;
  in.live -= block.size;
  for (auto stream : block.used_on) block.pending.push_back(scheduler().record(in.device, stream));
  if (block.pending.empty())
    in.release(offset);
  else
    in.freeing.push_front(offset);
  in.release_finished();
}

void record_use(const void* pointer, int64_t stream) {
  Guard guard(scheduler().lock);
  auto* in = arena_of(pointer);
  if (!in) return;
  auto& block = block_of(*in, pointer)->second;
  if (stream != block.stream) block.used_on.insert(stream);
}

void* writable(const void* pointer) {
  auto* in = arena_of(pointer);
  auto* begin = const_cast<char*>(static_cast<const char*>(pointer));
  return in ? in->open + (begin - in->locked) : begin;
}

int device_of(const void* pointer) {
  auto* in = arena_of(pointer);
  return in ? in->device : -1;
}

void set_capacity(int device, size_t bytes) {
  Guard guard(scheduler().lock);
  arena(device).capacity = bytes ? bytes : ARENA;
}

size_t live_bytes(int device) { return arena(device).live; }

namespace {

struct Pinned {
  size_t size;
  bool live = true;
  std::vector<MarkPtr> uses = {};
};

std::map<const char*, Pinned>& pinned() {
  static auto* all = new std::map<const char*, Pinned>;
  return *all;
}

std::map<const char*, size_t>& pinned_ranges() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

bool is_unused(Pinned& block) {
  for (auto& mark : block.uses)
    if (!mark->done) return false;
  return true;
}

}  // namespace

void* allocate_pinned(size_t bytes) {
  Guard guard(scheduler().lock);
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  for (auto& [begin, block] : pinned()) {
    if (block.live || block.size != size || !is_unused(block)) continue;
    block = Pinned{size};
    auto* memory = const_cast<char*>(begin);
    std::memset(memory, POISON, size);
    return memory;
  }
  void* memory = mmap(nullptr, size ? size : PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  std::memset(memory, POISON, size);
  pinned()[static_cast<char*>(memory)] = Pinned{size};
  return memory;
}

void free_pinned(void* pointer) {
  Guard guard(scheduler().lock);
  auto& block = pinned().at(static_cast<char*>(pointer));
  block.live = false;
  if (is_unused(block)) std::memset(pointer, POISON, block.size);
}

// Only the address that was handed out is known, as in torch's own allocator for CUDA: a view into
// the middle of it, made by way of numpy, protects nothing.
void record_pinned_use(const void* pointer, const MarkPtr& mark) {
  Guard guard(scheduler().lock);
  auto at = pinned().find(static_cast<const char*>(pointer));
  if (at != pinned().end()) at->second.uses.push_back(mark);
}

bool is_pinned(const void* pointer) {
  Guard guard(scheduler().lock);
  auto* byte = static_cast<const char*>(pointer);
  auto at = pinned().upper_bound(byte);
  if (at != pinned().begin() && (--at)->second.live && byte < at->first + at->second.size) return true;
  auto range = pinned_ranges().upper_bound(byte);
  return range != pinned_ranges().begin() && byte < (--range)->first + range->second;
}

void pin_range(void* pointer, size_t bytes) {
  Guard guard(scheduler().lock);
  pinned_ranges()[static_cast<char*>(pointer)] = bytes;
}

bool unpin_range(void* pointer) {
  Guard guard(scheduler().lock);
  return pinned_ranges().erase(static_cast<char*>(pointer)) == 1;
}

}  // namespace sim
