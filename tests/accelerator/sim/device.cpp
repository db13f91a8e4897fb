// The device as torch sees it: guard, events, hooks, allocators; and what tests turn and read.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "backend.h"

namespace sim {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, DEVICES> current_streams{};
std::array<std::atomic<uint64_t>, DEVICES> random_states{};

c10::DeviceIndex index_of(c10::Device device) {
  auto index = device.has_index() ? device.index() : current_device;
  TORCH_CHECK(index >= 0 && index < DEVICES, "sim:", int(index), ", expected less than ", DEVICES);
  return index;
}

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;

constexpr uint64_t POOL = 32;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    Device before(SIM, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {SIM, current_device}; }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return sim::DEVICES; }

  Stream getStream(Device device) const override {
    auto index = index_of(device);
    return Stream(Stream::UNSAFE, {SIM, index}, stream_of(index));
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, {SIM, index_of(device)}, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<uint64_t> made{0};  // of a pool and in turn, as torch's streams of CUDA
    return Stream(Stream::UNSAFE, {SIM, index_of(device)}, int64_t(made++ % POOL) + 1);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[index_of(stream.device())] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    return scheduler().is_empty(stream.device_index(), stream.id());
  }
  void synchronizeStream(const Stream& stream) const override {
    scheduler().finish(scheduler().record(stream.device_index(), stream.id()), "stream.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    scheduler().finish_device(device, "device synchronize");
  }

  // An event is the mark it was last recorded at.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = scheduler().record(stream.device_index(), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) scheduler().wait(stream.device_index(), stream.id(), *static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || scheduler().is_done(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) scheduler().finish(*static_cast<MarkPtr*>(event), "event.synchronize");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    sim::record_use(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(SIM, current_device);
    if (bytes == 0) return {nullptr, device};
    void* memory = sim::allocate(current_device, stream_of(current_device), bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, memory, "sim:", int(current_device), " out of memory: ", bytes,
                     " bytes asked for, ", sim::live_bytes(current_device), " in use");
    return {memory, memory, &sim::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    to = sim::writable(to);
    from = sim::writable(from);
    scheduler().push(current_device, stream_of(current_device), "copy_data",
                     [=] { std::memcpy(to, from, count); });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? sim::allocate_pinned(bytes) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, memory || !bytes, "sim: no pinned memory");
    return {memory, memory, memory ? &sim::free_pinned : [](void*) {}, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return sim::DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return sim::is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* pointer) const override {
    return {SIM, static_cast<DeviceIndex>(sim::device_of(pointer))};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registered;

}  // namespace

c10::Allocator* device_memory() { return &device_allocator; }

}  // namespace sim

// What the tests turn and read, by way of ctypes.
extern "C" {
void sim_seed(uint64_t seed) { sim::scheduler().seed(seed); }
void sim_fail_next(const char* name) { sim::scheduler().fail_next(name); }
void sim_capacity(int device, size_t bytes) { sim::set_capacity(device, bytes); }
size_t sim_live_bytes(int device) { return sim::live_bytes(device); }
void sim_pin(void* pointer, size_t bytes) { sim::pin_range(pointer, bytes); }
int sim_unpin(void* pointer) { return sim::unpin_range(pointer) ? 0 : 1; }
uint64_t sim_random_state(int device) { return sim::random_states[device]; }
void sim_set_random_state(int device, uint64_t state) { sim::random_states[device] = state; }
void sim_reset_counts() {
  std::lock_guard guard(sim::scheduler().lock);
  sim::scheduler().host_waits.clear();
  sim::scheduler().executed.clear();
}
// Lines "kind<tab>what<tab>count".
const char* sim_report() {
  thread_local std::string answer;
  std::lock_guard guard(sim::scheduler().lock);
  answer.clear();
  for (auto& [what, count] : sim::scheduler().host_waits)
    answer += "wait\t" + what + "\t" + std::to_string(count) + "\n";
  for (auto& [what, count] : sim::scheduler().executed)
    answer += "ran\t" + what + "\t" + std::to_string(count) + "\n";
  return answer.c_str();
}
}
