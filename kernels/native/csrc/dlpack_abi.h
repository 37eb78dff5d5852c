// The part of DLPack 1.3 that is used here, to read a torch.Tensor without torch's headers.
// The layout is a standard (https://github.com/dmlc/dlpack, include/dlpack/dlpack.h), the same for all versions 1.x.
#pragma once

#include <cstdint>

extern "C" {

struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  // Fills a DLTensor that borrows from the Python tensor; not 0, with a Python exception set, if it cannot.
  int (*tensor_from_py_object)(void* object, DLTensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // extern "C"

namespace ddp_compile {
constexpr uint8_t kDLFloat = 2;
constexpr uint8_t kDLBfloat = 4;
}  // namespace ddp_compile
