// The number formats of gradients, and statistics about their values.
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

// Statistics about the written values. kernels/flatten_plan.py reads these 16 bytes.
struct Stats {
  double sum_of_squares = 0;  // of the scaled values, before they were rounded to the destination's format
  uint8_t non_finite = 0;     // whether a written value is infinite or NaN
  uint8_t padding[7] = {};
};
static_assert(sizeof(Stats) == 16, "16 bytes");

}  // namespace ddp_compile
