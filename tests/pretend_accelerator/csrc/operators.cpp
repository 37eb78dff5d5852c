// Operators. What makes tensors and views, and copies, is written here; anything else runs on the CPU.
#include "device.h"

#include <cstring>
#include <set>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
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
    enqueue(current_stream(device.index()), [source, target, is_inference = c10::InferenceMode::is_enabled()] {
      pause();
      c10::InferenceMode mode(is_inference);
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

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The values of tensors, on their own or in lists, changed by a function.
template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (!value.isList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, with_tensors(c10::IValue(list.get(i)), change));
  return list;
}

struct Arguments {
  std::vector<c10::IValue> values;
  std::set<c10::DeviceIndex> devices;

  Arguments(const OperatorHandle& op, const Stack& stack) {
    const auto last = torch::jit::last(stack, op.schema().arguments().size());
    values.assign(last.begin(), last.end());
    for (const auto& value : values) {
      if (value.isDevice() && value.toDevice().is_privateuseone()) devices.insert(index_of(value.toDevice()));
      with_tensors(value, [this](const at::Tensor& tensor) {
        if (tensor.is_privateuseone()) devices.insert(tensor.device().index());
        return tensor;
      });
    }
  }

  Stack changed(const std::function<at::Tensor(const at::Tensor&)>& change) const {
    Stack result;
    for (const auto& value : values) result.push_back(with_tensors(value, change));
    return result;
  }
};

// Whether an operator can run later: what it writes is said by its schema, and the host needs nothing of it at once.
bool can_be_queued(const OperatorHandle& op, const Arguments& arguments) {
  const auto& schema = op.schema();
  if (arguments.devices.size() != 1 || op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) return false;
  for (const auto& value : arguments.values)
    if (value.isDevice()) return false;  // makes or moves tensors
  for (const auto& result : schema.returns()) {
    const bool is_tensor = result.type()->kind() == c10::TypeKind::TensorType ||
                           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!is_tensor || (result.alias_info() != nullptr && !writes(result))) return false;
  }
  return true;
}

// A Python number that an operator has taken as a tensor. It stays one, so that no dtype is promoted for it.
bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

at::Tensor on_meta(const at::Tensor& tensor) {
  if (is_number(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// What an operator returns: arguments that it writes, and new tensors, whose shapes a run on meta tensors tells.
std::vector<c10::IValue> make_results(const OperatorHandle& op, const Arguments& arguments) {
  const auto& schema = op.schema();
  Stack shapes;
  bool needs_shapes = false, has_out = false;
  for (const auto& result : schema.returns()) needs_shapes |= !writes(result);
  for (const auto& argument : schema.arguments()) has_out |= argument.kwarg_only() && writes(argument);
  if (needs_shapes || has_out) {
    shapes = arguments.changed(on_meta);
    op.callBoxed(&shapes);
  }
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (!writes(schema.returns()[i])) {
      results.push_back(with_tensors(shapes[i], [](const at::Tensor& shape) {
        return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, c10::Device(kType), {});
      }));
      continue;
    }
    for (size_t j = 0; j < schema.arguments().size(); ++j) {
      const auto* alias = schema.arguments()[j].alias_info();
      if (alias == nullptr || !(*alias == *schema.returns()[i].alias_info())) continue;
      const auto& written = arguments.values[j];
      TORCH_CHECK(!has_out || !written.isTensor() || written.toTensor().sizes() == shapes[i].toTensor().sizes(),
                  "to be resized, which needs the host");
      results.push_back(written);
    }
  }
  return results;
}

// The task reads and writes memory that it does not own, as a kernel does.
void queue(const OperatorHandle& op, const Arguments& arguments, const std::vector<c10::IValue>& results) {
  auto view = [](const at::Tensor& tensor) -> at::Tensor {
    if (tensor.is_privateuseone()) return cpu_view(tensor);
    if (tensor.dim() != 0) return tensor;
    auto by_value = tensor.clone();  // as a kernel gets it
    if (is_number(tensor)) by_value.unsafeGetTensorImpl()->set_wrapped_number(true);
    return by_value;
  };
  std::vector<c10::IValue> targets;
  for (size_t i = 0; i < results.size(); ++i)
    targets.push_back(writes(op.schema().returns()[i]) ? c10::IValue() : with_tensors(results[i], view));
  enqueue(current_stream(*arguments.devices.begin()), [op, targets, stack = arguments.changed(view),
                                                       is_inference = c10::InferenceMode::is_enabled()]() mutable {
    pause();
    c10::InferenceMode mode(is_inference);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(&stack);
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].isTensor()) targets[i].toTensor().copy_(stack[i].toTensor());
      if (!targets[i].isTensorList()) continue;
      const auto to = targets[i].toTensorVector(), from = stack[i].toTensorVector();
      for (size_t j = 0; j < to.size(); ++j) to[j].copy_(from[j]);
    }
  });
}

void run_now(const OperatorHandle& op, Stack* stack, const Arguments& arguments) {
  ++num_host_waits;
  for (auto device : arguments.devices) drain(current_stream(device));
  const bool was_in_fallback = std::exchange(is_in_fallback, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    is_in_fallback = was_in_fallback;
    throw;
  }
  is_in_fallback = was_in_fallback;
}

void run_on_cpu(const OperatorHandle& op, Stack* stack) {
  const Arguments arguments(op, *stack);
  c10::OptionalDeviceGuard guard;
  if (arguments.devices.size() == 1) guard.reset_device(c10::Device(kType, *arguments.devices.begin()));
  if (can_be_queued(op, arguments)) {
    std::vector<c10::IValue> results;
    bool are_known = true;
    try {
      results = make_results(op, arguments);
    } catch (const c10::Error&) {  // no kernel for meta tensors, out= of another size, or an error that the CPU has too
      are_known = false;
    }
    if (are_known) {
      queue(op, arguments, results);
      torch::jit::drop(*stack, arguments.values.size());
      stack->insert(stack->end(), results.begin(), results.end());
      return;
    }
  }
  run_now(op, stack, arguments);
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
