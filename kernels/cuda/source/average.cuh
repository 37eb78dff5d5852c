// The update of asynchronous model averaging.
#pragma once

#include "packet.cuh"

namespace ddp_compile {

struct AverageArguments {
  u8* x;
  const u8* total;
  const u8* copy;
  u64 numel;
  float count;
};

// x += total / count - copy, in float, rounded once.
template <class T, int kWidth>
DDP_COMPILE_INLINE void average_packet(const AverageArguments& arguments, u64 element) {
  const u64 at = element * kBytes<T>;
  Packet<T, kWidth> packet;
  float x[kWidth], total[kWidth], copy[kWidth];
  packet.load(arguments.x + at);
  packet.decode(x);
  packet.load(arguments.total + at);
  packet.decode(total);
  packet.load(arguments.copy + at);
  packet.decode(copy);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    x[e] = __fadd_rn(x[e], __fsub_rn(__fdiv_rn(total[e], arguments.count), copy[e]));
  }
  packet.encode(x);
  packet.store(arguments.x + at);
}

template <class T>
DDP_COMPILE_INLINE void average_elements(const AverageArguments& arguments) {
  constexpr int kWidth = 16 / kBytes<T>;
  const bool aligned = is_aligned(arguments.x) && is_aligned(arguments.total) && is_aligned(arguments.copy);
  const u64 num_packets = aligned ? arguments.numel / kWidth : 0;
  const u64 stride = u64(gridDim.x) * kThreads;
  const u64 first = u64(blockIdx.x) * kThreads + threadIdx.x;
  for (u64 i = first; i < num_packets; i += stride) average_packet<T, kWidth>(arguments, i * kWidth);
  for (u64 i = num_packets * kWidth + first; i < arguments.numel; i += stride) average_packet<T, 1>(arguments, i);
}

#define DDP_COMPILE_AVERAGE(T) DDP_COMPILE_KERNEL(average_##T, AverageArguments, average_elements<T>(arguments))

}  // namespace ddp_compile
