// Operators. What makes tensors and views, and copies, is written here; anything else runs on the CPU.
#include "device.h"

#include <cstring>
#include <set>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "cpu_view.h"

namespace at::autocast {
// Of <ATen/autocast_mode.h>, which takes the compiler ten seconds.
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace pretend {

namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using c10::SymIntArrayRef;
using torch::jit::Stack;

// The CPU reads what it computes on, which is no wait that a real device would have.
thread_local bool is_in_fallback = false;

void host_reads(const at::Tensor& tensor) {
  if (!is_in_fallback) ++num_host_waits;
  drain(current_stream(tensor.device().index()));
}

// Making tensors and views.

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_place(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                      c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// Copies.

void copy_on_cpu(const at::Tensor& from, at::Tensor to) {
  at::NoGradGuard no_grad;
  to.copy_(from);
}

// Between two tensors of one device it runs on the current stream, as does one with non_blocking between a device and
// the CPU. Any other copy makes the host wait.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const auto device = (self.is_cpu() ? to : self).device();
  const bool is_on_device = self.device() == to.device();
  const at::Tensor source = self.is_cpu() ? self : cpu_view(self);
  const at::Tensor target = to.is_cpu() ? to : cpu_view(to);
  // The task must own no memory of the device; and a host tensor that is converted has to be there until then.
  const bool is_plain = source.is_contiguous() && target.is_contiguous() && source.dtype() == target.dtype();
  if (is_on_device || (non_blocking && is_plain && (self.is_cpu() || to.is_cpu()))) {
    enqueue(current_stream(device.index()), [source, target] {
      pause();
      copy_on_cpu(source, target);
    });
    return to;
  }
  if (!self.is_cpu()) host_reads(self);
  if (!to.is_cpu()) drain(current_stream(to.device().index()));
  copy_on_cpu(source, target);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) {
  host_reads(self);
  return cpu_view(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) { used_on(self.storage().data(), stream); }

// All other operators.

void note_device(const c10::IValue& value, std::set<c10::DeviceIndex>& devices) {
  if (value.isTensor() && value.toTensor().is_privateuseone()) {
    devices.insert(value.toTensor().device().index());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& each : value.toListRef()) note_device(each, devices);
  } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
    devices.insert(index_of(value.toDevice()));
  }
}

void run_on_cpu(const OperatorHandle& op, Stack* stack) {
  std::set<c10::DeviceIndex> devices;
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) note_device(argument, devices);
  for (auto device : devices) drain(current_stream(device));
  c10::OptionalDeviceGuard guard;
  if (devices.size() == 1) guard.reset_device(c10::Device(kType, *devices.begin()));
  const bool was_in_fallback = std::exchange(is_in_fallback, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    is_in_fallback = was_in_fallback;
    throw;
  }
  is_in_fallback = was_in_fallback;
}

// Autocast: products in the lower precision, sums in float32, and everything else as it comes.

void cast_and_call(const OperatorHandle& op, Stack* stack, c10::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard without_autocast(DispatchKey::AutocastPrivateUse1);
  const auto num_arguments = op.schema().arguments().size();
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
    auto& argument = (*stack)[i];
    if (argument.isTensor()) argument = at::autocast::cached_cast(dtype, argument.toTensor(), kType);
  }
  op.callBoxed(stack);
}

void in_lower_precision(const OperatorHandle& op, Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(kType));
}

void in_float32(const OperatorHandle& op, Stack* stack) { cast_and_call(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_place);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "conv1d", "conv2d",
                    "conv3d", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  for (auto name : {"mse_loss", "l1_loss", "nll_loss", "cross_entropy_loss", "softmax.int", "log_softmax.int",
                    "layer_norm", "exp", "log", "pow.Tensor_Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
}

}  // namespace

}  // namespace pretend
