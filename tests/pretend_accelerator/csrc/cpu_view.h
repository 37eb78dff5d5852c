// The memory of a device's tensor as a CPU tensor, which owns none of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace pretend {

inline at::Tensor cpu_view(const at::Tensor& tensor) {
  auto view = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                            at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  if (tensor.is_neg()) view._set_neg(true);
  if (tensor.is_conj()) view._set_conj(true);
  return view;
}

}  // namespace pretend
