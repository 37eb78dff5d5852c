// The loops over elements, in the fastest instruction set that this processor has.
#pragma once

#include "formats.h"

namespace ddp_compile {

struct Loops {
  // destination[i] = source[i] * scale, with stats (unless null) of what was written; streaming writes past the caches.
  void (*scale)(Dtype from, Dtype to, const void* source, void* destination, int64_t count, float scale, bool streaming,
                Stats* stats);
  void (*average)(Dtype dtype, void* x, const void* sum, const void* copy, int64_t count, float world_size);
  void (*compress)(Dtype dtype, const void* from, int64_t count, float* header, uint8_t* codes);
  void (*decompress)(Dtype dtype, const float* header, const uint8_t* codes, int64_t count, void* to);
};

const Loops& loops();
const char* instruction_set();

}  // namespace ddp_compile
