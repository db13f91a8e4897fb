// Memory of the simulated devices, which the CPU can't touch, and pinned memory of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "scheduler.h"

namespace sim {

constexpr int DEVICES = 2;
constexpr unsigned char POISON = 0xDB;  // as a float a huge negative number, as an index out of range

// Device memory. It is mapped twice: tensors have the addresses of pages without any rights, and
// only operations know where the same pages can be read and written.
void* allocate(int device, int64_t stream, size_t bytes);  // null when there is no room
void free(void* pointer);
void record_use(const void* pointer, int64_t stream);
void* writable(const void* pointer);  // of a device's memory; others as they are
int device_of(const void* pointer);   // -1: not a device's
void set_capacity(int device, size_t bytes);
size_t live_bytes(int device);

// Pinned host memory. What a queued copy still uses is not handed out again.
void* allocate_pinned(size_t bytes);
void free_pinned(void* pointer);
void record_pinned_use(const void* pointer, const MarkPtr& mark);
bool is_pinned(const void* pointer);
void pin_range(void* pointer, size_t bytes);
bool unpin_range(void* pointer);

}  // namespace sim
