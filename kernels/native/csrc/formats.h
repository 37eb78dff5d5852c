// The number formats of gradients.
#pragma once

#include <cstdint>
#include <cstring>

namespace ddp_compile {

// The numbers in DTYPE_CODES of kernels/native/library.py.
enum Dtype : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kOther = 255 };

struct Float32 {
  float value;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace ddp_compile
