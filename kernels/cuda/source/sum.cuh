// The sum at the owner: rows that came from all ranks, added up.
#pragma once

#include "packet.cuh"

namespace ddp_compile {

struct AddRowsArguments {
  const u8* rows;
  u8* out;
  u64 numel;  // of a row, and of out
  u32 num_rows;
  float scale;
};

// out = (row 0 + row 1 + ...) * scale, added up in the order of rows in float, rounded once.
template <class T, int kWidth>
DDP_COMPILE_INLINE void add_packets(const AddRowsArguments& arguments, u64 element) {
  Packet<T, kWidth> packet;
  float total[kWidth], values[kWidth];
  const u8* place = arguments.rows + element * kBytes<T>;
  packet.load(place);
  packet.decode(total);
  for (u32 row = 1; row < arguments.num_rows; ++row) {
    place += arguments.numel * kBytes<T>;
    packet.load(place);
    packet.decode(values);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) total[e] = __fadd_rn(total[e], values[e]);
  }
#pragma unroll
  for (int e = 0; e < kWidth; ++e) total[e] = __fmul_rn(total[e], arguments.scale);
  packet.encode(total);
  packet.store(arguments.out + element * kBytes<T>);
}

template <class T>
DDP_COMPILE_INLINE void add_rows(const AddRowsArguments& arguments) {
  constexpr int kWidth = 16 / kBytes<T>;
  const bool aligned = is_aligned(arguments.rows) && is_aligned(arguments.out) && arguments.numel % kWidth == 0;
  const u64 num_packets = aligned ? arguments.numel / kWidth : 0;
  const u64 stride = u64(gridDim.x) * kThreads;
  const u64 first = u64(blockIdx.x) * kThreads + threadIdx.x;
  for (u64 i = first; i < num_packets; i += stride) add_packets<T, kWidth>(arguments, i * kWidth);
  for (u64 i = num_packets * kWidth + first; i < arguments.numel; i += stride) add_packets<T, 1>(arguments, i);
}

#define DDP_COMPILE_ADD_ROWS(T) DDP_COMPILE_KERNEL(add_rows_##T, AddRowsArguments, add_rows<T>(arguments))

}  // namespace ddp_compile
