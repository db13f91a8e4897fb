// Copies, and every operator of torch, queued.
//
// An operator runs as the CPU's own kernel on the device's pages, when the adversary runs it. Like
// a real device's queue, ours knows addresses only: it keeps no tensor alive.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "backend.h"

namespace sim {
namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::IValue, c10::Stream;
using torch::jit::Stack;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// Random numbers are drawn from a seed that is taken when an operator is queued, so that the order
// in which operators run changes nothing.
uint64_t draw_seed(DeviceIndex device) {
  uint64_t mixed = (random_states[device] += 0x9E3779B97F4A7C15);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  return mixed ^ (mixed >> 27);
}

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

// The same elements as a tensor of the CPU, which owns nothing.
Tensor on_pages(const Tensor& tensor) {
  auto* begin = sim::writable(tensor.unsafeGetTensorImpl()->storage().data());
  auto offset = tensor.storage_offset() * tensor.itemsize();
  auto alias = at::from_blob(static_cast<char*>(begin) + offset, tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.scalar_type()));
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor without_data(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// A tensor of the CPU is an operator's parameter: its value is taken when the operator is queued.
Tensor for_pages(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return is_ours(tensor) ? on_pages(tensor) : tensor.clone();
}

Tensor for_meta(const Tensor& tensor) { return tensor.defined() ? without_data(tensor) : tensor; }

IValue map_tensors(const IValue& value, Tensor (*change)(const Tensor&)) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& each : value.toOptionalTensorVector())
      changed.push_back(each ? std::optional(change(*each)) : std::nullopt);
    return changed;
  }
  return value;
}

Stack map_arguments(at::ArrayRef<IValue> arguments, Tensor (*change)(const Tensor&), Device device) {
  Stack changed;
  for (auto& each : arguments)
    changed.push_back(each.isDevice() ? IValue(device) : map_tensors(each, change));
  return changed;
}

// The device of an operator's tensors; they must be on one.
DeviceIndex device_of(const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  int found = -1;
  auto look = [&](const Tensor& tensor) {
    if (!is_ours(tensor)) return;
    TORCH_CHECK(found < 0 || found == tensor.device().index(), schema.name(), ": tensors on sim:", found,
                " and ", tensor.device());
    found = tensor.device().index();
  };
  for (auto& each : arguments) {
    if (each.isTensor()) look(each.toTensor());
    if (each.isTensorList())
      for (const Tensor& one : each.toTensorVector()) look(one);
  }
  return found < 0 ? current_device : found;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

Tensor empty_like_meta(const Tensor& meta, DeviceIndex device) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(Device(SIM, device)));
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// What the operator returns that it was not given: known without running it, if torch knows.
std::optional<Stack> shapes_of_results(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  for (auto& each : op.schema().returns())
    if (each.type()->kind() != c10::TypeKind::TensorType) return std::nullopt;
  auto stack = map_arguments(arguments, for_meta, c10::kMeta);
  try {
    call(op, stack);
  } catch (const std::exception&) {  // from C++ or from Python: running it will tell
    return std::nullopt;
  }
  return stack;
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>);

// Every operator that is not registered below.
void queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  const auto& returns = schema.returns();
  const auto device = device_of(schema, arguments);
  const auto stream = stream_of(device);
  c10::DeviceGuard guard(Device(SIM, device));

  bool fresh = false, resizes = false;
  std::vector<size_t> given(returns.size());  // for each result, the argument that it is
  for (size_t k = 0; k < returns.size(); ++k) {
    auto* alias = returns[k].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), schema.name(), ": is a view");
    fresh |= !alias;
    if (!alias) continue;
    while (!is_written(schema.arguments()[given[k]]) ||
           schema.arguments()[given[k]].alias_info()->beforeSets() != alias->beforeSets())
      ++given[k];
    resizes |= arguments[given[k]].isTensor() && arguments[given[k]].toTensor().numel() == 0;
  }
  std::optional<Stack> shapes;
  if (fresh || resizes) shapes = shapes_of_results(op, arguments);
  const bool must_wait = fresh && !shapes;
  if (resizes && shapes)
    for (size_t k = 0; k < returns.size(); ++k)
      if (returns[k].alias_info()) resize(arguments[given[k]].toTensor(), (*shapes)[k].toTensor().sizes(), {});

  auto work = std::make_shared<Stack>(map_arguments(arguments, for_pages, c10::kCPU));
  for (size_t k = 0; k < count; ++k)
    if (schema.arguments()[k].type()->str().find("Generator") != std::string::npos)
      (*work)[k] = IValue(at::detail::createCPUGenerator(draw_seed(device)));
  std::vector<Tensor> results(returns.size()), pages(returns.size());
  if (shapes)
    for (size_t k = 0; k < returns.size(); ++k)
      if (!returns[k].alias_info()) {
        results[k] = empty_like_meta((*shapes)[k].toTensor(), device);
        if (results[k].defined()) pages[k] = on_pages(results[k]);
      }
  scheduler().push(device, stream, schema.name(), [op, work, pages] {
    call(op, *work);
    for (size_t k = 0; k < pages.size(); ++k)
      if (pages[k].defined()) pages[k].copy_((*work)[k].toTensor());
  });
  if (must_wait) synchronize(device, schema.name());

  torch::jit::drop(*stack, count);
  for (size_t k = 0; k < returns.size(); ++k) {
    if (returns[k].alias_info()) {
      stack->push_back(arguments[given[k]]);
    } else if (shapes) {
      stack->push_back(results[k]);
    } else if ((*work)[k].isTensor() && (*work)[k].toTensor().defined()) {
      auto computed = (*work)[k].toTensor();
      auto result = empty_like_meta(computed, device);
      auto to = on_pages(result);
      scheduler().push(device, stream, "result", [=] { to.copy_(computed); });
      stack->push_back(result);
    } else {
      stack->push_back((*work)[k]);
    }
  }
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(SIM, device ? index_of(*device) : current_device));
  return at::detail::empty_generic(size, device_memory(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(SIM, device ? index_of(*device) : current_device));
  return at::detail::empty_strided_generic(size, stride, device_memory(), KEYS,
                                           c10::dtype_or_default(dtype));
}

// Shrinks and grows; what was there is copied in stream order.
const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto storage = impl->storage();
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize(), had = storage.nbytes();
  if (needed > had) {
    c10::DeviceGuard guard(self.device());
    auto larger = device_memory()->allocate(needed);
    if (had) device_memory()->copy_data(larger.mutable_get(), storage.data(), had);
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(needed);
  }
  return self;
}

// One device: in its current stream. Two: each stream waits for the other, as on CUDA. Host memory
// is read or written when the copy runs only if it is pinned, dense and of the same dtype;
// otherwise the host waits, or the value is taken now.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (self.numel() == 0) return target;
  const Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  auto copy = [](const Tensor& to, const Tensor& from) {
    return [=] {
      at::AutoDispatchBelowADInplaceOrView below;
      to.copy_(from);
    };
  };
  if (is_ours(source) && is_ours(target)) {
    auto from = source.device().index(), to = target.device().index();
    if (from != to) scheduler().wait(from, stream_of(from), scheduler().record(to, stream_of(to)));
    scheduler().push(from, stream_of(from), "copy", copy(on_pages(target), on_pages(source)));
    if (from != to) scheduler().wait(to, stream_of(to), scheduler().record(from, stream_of(from)));
    return target;
  }
  const auto& host = is_ours(source) ? target : source;
  const auto device = (is_ours(source) ? source : target).device().index();
  const auto stream = stream_of(device);
  const bool dense = host.is_contiguous() && !host.is_conj() && !host.is_neg();
  const bool later = non_blocking && dense && sim::is_pinned(host.const_data_ptr());
  auto bytes = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
  if (is_ours(target)) {
    const bool as_is = later && source.scalar_type() == target.scalar_type();
    scheduler().push(device, stream, "copy to device", copy(on_pages(target), as_is ? bytes : source.clone()));
    if (as_is) sim::record_pinned_use(host.const_data_ptr(), scheduler().record(device, stream));
    else if (!non_blocking) synchronize(device, "blocking copy to device");
  } else {
    if (host.is_conj()) bytes._set_conj(true);
    if (host.is_neg()) bytes._set_neg(true);
    scheduler().push(device, stream, "copy to host", copy(bytes, on_pages(source)));
    if (later) sim::record_pinned_use(host.const_data_ptr(), scheduler().record(device, stream));
    else synchronize(device, non_blocking ? "copy to pageable memory" : "blocking copy to host");
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.numel() == 0 && self.numel()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize(self.device().index(), "item");
  return on_pages(self).item();
}

// Has no generator among its arguments; composed, it draws its numbers when it is queued.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool>) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(at::Scalar(p < 1 ? 1 / (1 - p) : 0.0)), mask};
}

void record_stream(Tensor& self, Stream stream) {
  sim::record_use(self.unsafeGetTensorImpl()->storage().data(), stream.id());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_operator>());
}

// Our copies see to these bits themselves; torch would resolve them by a copy, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace sim
