// The loops over elements, in the fastest instruction set that this processor has.
#pragma once

#include "formats.h"

namespace ddp_compile {

// The smallest and largest value of a chunk, as stored at the start of its compressed form.
struct Extremes {
  float minimum;
  float maximum;
};
static_assert(sizeof(Extremes) == 8, "8 bytes");

struct Loops {
  // destination[i] = source[i] * scale; streaming bypasses the caches.
  void (*scale)(Dtype from, Dtype to, const void* source, void* destination, int64_t count, float scale, bool streaming);
  void (*average)(Dtype dtype, void* x, const void* sum, const void* copy, int64_t count, float world_size);
  // to[i] = (row 0's value + row 1's + ...) * scale; rows begin stride elements after each other.
  void (*add_rows)(Dtype dtype, const void* rows, int64_t num_rows, int64_t stride, int64_t count, float scale, void* to);
  void (*find_extremes)(Dtype dtype, const void* from, int64_t count, Extremes* found);
  void (*encode)(Dtype dtype, const void* from, int64_t count, const Extremes& extremes, uint8_t* codes);
  // to[i] = value of codes[i], or to[i] += value of codes[i].
  void (*decode)(Dtype dtype, const Extremes& extremes, const uint8_t* codes, int64_t count, bool accumulate, void* to);
};

const Loops& loops();

// Names of the instruction sets that have loops here and that this processor supports, fastest first, then null.
const char* instruction_set_at(int64_t index);

// Selects the result of `loops`, initially the fastest. False if there is no set of that name.
const char* instruction_set();
bool use_instruction_set(const char* name);

}  // namespace ddp_compile
