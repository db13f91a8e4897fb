// What the device and its operators share: the current device and streams, and waiting for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>

#include "memory.h"

namespace sim {

constexpr auto SIM = c10::DeviceType::PrivateUse1;

extern thread_local c10::DeviceIndex current_device;
extern thread_local std::array<int64_t, DEVICES> current_streams;
extern std::array<std::atomic<uint64_t>, DEVICES> random_states;

c10::DeviceIndex index_of(c10::Device device);
inline int64_t stream_of(c10::DeviceIndex device) { return current_streams[device]; }
inline void synchronize(c10::DeviceIndex device, const std::string& why) {
  scheduler().finish(scheduler().record(device, stream_of(device)), why);
}
c10::Allocator* device_memory();

}  // namespace sim
