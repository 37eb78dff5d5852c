// Adds up the statistics of the blocks of one move. It runs as one block, so that the order is always the same.
#pragma once

#include "move.cuh"

namespace ddp_compile {

struct StatsArguments {
  const Stats* partials;
  Stats* stats;
  u32 num_partials;
};

struct Total {
  double squares;
  u64 non_finite;

  DDP_COMPILE_INLINE void add(const Total& other) {
    squares = __dadd_rn(squares, other.squares);
    non_finite |= other.non_finite;
  }
};

DDP_COMPILE_INLINE void add_partials(const StatsArguments& arguments) {
  Total mine = {0, 0};
  for (u32 i = threadIdx.x; i < arguments.num_partials; i += kThreads) {
    const Stats& partial = arguments.partials[i];
    mine.add({partial.sum_of_squares, partial.non_finite});
  }
  const Total total = combine_block(mine);
  if (threadIdx.x == 0) *arguments.stats = {total.squares, total.non_finite};
}

#define DDP_COMPILE_STATS() DDP_COMPILE_KERNEL(add_partials_of_move, StatsArguments, add_partials(arguments))

}  // namespace ddp_compile
