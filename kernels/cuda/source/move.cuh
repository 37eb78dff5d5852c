// Moves the tensors of a bucket to or from its flat buffer, with a factor and a cast.
#pragma once

#include "packet.cuh"

namespace ddp_compile {

// Elements of a tensor that a block moves at a time: 32 KiB of float32. kernels/cuda/arguments.py has the same number.
constexpr int kChunk = 8192;

struct Move {
  u8* flat;
  const double* scale_at;  // where the scale is; null if it is `scale`
  u32 num_chunks;
  u32 num_tensors;
  float scale;
  u32 to_flat;  // whether the flat buffer is written, or the tensors
};

// Chunks are numbered over all tensors; those of tensor i end before end_chunks[i], and the last one of them has
// last_counts[i] elements. Empty tensors have no chunks.
template <int kTensors>
struct MoveArguments {
  Move move;
  u8* addresses[kTensors];  // null for a tensor that is not to be moved
  u64 offsets[kTensors];    // in elements of the flat buffer
  u32 end_chunks[kTensors];
  u32 last_counts[kTensors];
};

// Packets of kWidth elements, one after another except for a gap of `gap` elements at element `gap_at`.
template <class Source, class Destination, int kWidth>
DDP_COMPILE_INLINE void move_packets(
    const u8* from, u8* to, int num_packets, int gap_at, int gap, float scale) {
  // Enough loads before the first use to keep the memory busy: 64 bytes of each thread, or eight narrow packets.
  constexpr int kUnroll = kWidth * kBytes<Source> < 8 ? 8 : 64 / (kWidth * kBytes<Source>);
  for (int first = int(threadIdx.x); first < num_packets; first += kUnroll * kThreads) {
    // Without a first value, a packet that is not loaded would keep its registers from the loops before this one.
    Packet<Source, kWidth> packets[kUnroll] = {};
    int elements[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kThreads;
      elements[u] = i * kWidth < gap_at ? i * kWidth : i * kWidth + gap;
      if (i < num_packets) packets[u].load(from + elements[u] * kBytes<Source>);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= num_packets) continue;
      float values[kWidth];
      packets[u].decode(values);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[e] = __fmul_rn(values[e], scale);
      Packet<Destination, kWidth> written;
      written.encode(values);
      written.store(to + elements[u] * kBytes<Destination>);
    }
  }
}

// Elements of a run that are moved in packets.
struct Body {
  int begin;
  int count;
};

// Moves packets of kWidth elements, from the first element on at which both sides are aligned for them. If there is
// none, packets are narrower; if they would be single elements, nothing is moved.
template <class Source, class Destination, int kWidth>
DDP_COMPILE_INLINE Body move_body(const u8* from, u8* to, int count, float scale) {
  if constexpr (kWidth == 1) {
    return {count, 0};
  } else {
    // Every kWidth-th of the smaller elements is aligned. The larger ones are aligned there too, or never together.
    const u64 number = kBytes<Source> < kBytes<Destination> ? reinterpret_cast<u64>(from) / kBytes<Source>
                                                            : reinterpret_cast<u64>(to) / kBytes<Destination>;
    const int begin = int((0 - number) % kWidth);
    const u8* first = from + begin * kBytes<Source>;
    u8* place = to + begin * kBytes<Destination>;
    if (begin > count || !is_aligned(first, Packet<Source, kWidth>::kAlignment) ||
        !is_aligned(place, Packet<Destination, kWidth>::kAlignment)) {
      // 32 bytes on one side need no other alignment than half of them.
      constexpr int kNarrower = Packet<Source, kWidth>::kWords + Packet<Destination, kWidth>::kWords > 8 ? 4 : 2;
      return move_body<Source, Destination, kWidth / kNarrower>(from, to, count, scale);
    }
    const int num_packets = (count - begin) / kWidth;
    move_packets<Source, Destination, kWidth>(first, place, num_packets, 0, 0, scale);
    return {begin, num_packets * kWidth};
  }
}

// Packets, then the single elements before and after them.
template <class Source, class Destination>
DDP_COMPILE_INLINE void move_run(const u8* from, u8* to, int count, float scale) {
  constexpr int kWidth = 16 / (kBytes<Source> < kBytes<Destination> ? kBytes<Source> : kBytes<Destination>);
  const Body body = move_body<Source, Destination, kWidth>(from, to, count, scale);
  move_packets<Source, Destination, 1>(from, to, count - body.count, body.begin, body.count, scale);
}

template <class Source, class Destination, int kTensors>
DDP_COMPILE_INLINE void move_chunks(const MoveArguments<kTensors>& arguments) {
  const Move& move = arguments.move;
  const float scale = move.scale_at == nullptr ? move.scale : float(*move.scale_at);
  for (u32 chunk = blockIdx.x; chunk < move.num_chunks; chunk += gridDim.x) {
    // The first tensor that ends after the chunk.
    u32 tensor = 0;
    for (u32 end = move.num_tensors - 1; tensor < end;) {
      const u32 middle = (tensor + end) / 2;
      if (arguments.end_chunks[middle] <= chunk) {
        tensor = middle + 1;
      } else {
        end = middle;
      }
    }
    u8* const address = arguments.addresses[tensor];
    if (address == nullptr) continue;
    const u32 begin_chunk = tensor == 0 ? 0 : arguments.end_chunks[tensor - 1];
    const u64 first = u64(chunk - begin_chunk) * kChunk;
    const u64 place = arguments.offsets[tensor] + first;
    const int count = chunk + 1 == arguments.end_chunks[tensor] ? int(arguments.last_counts[tensor]) : kChunk;
    const u8* from = move.to_flat ? address + first * kBytes<Source> : move.flat + place * kBytes<Source>;
    u8* to = move.to_flat ? move.flat + place * kBytes<Destination> : address + first * kBytes<Destination>;
    // The tensor is already in its place.
    if (from == to && scale == 1.0f) continue;
    move_run<Source, Destination>(from, to, count, scale);
  }
}

#define DDP_COMPILE_MOVE(Source, Destination, kTensors)                                            \
  DDP_COMPILE_KERNEL(move_##Source##_##Destination##_##kTensors, MoveArguments<kTensors>,          \
                     move_chunks<Source, Destination>(arguments))

}  // namespace ddp_compile
