// The min-max codec with eight bits a value. A row holds one chunk: its minimum and maximum as two floats, a code for
// each value, then zeros. Arithmetic is in double, in the same steps as in native/csrc/loops.h, for the same bits.
//
// Chunks can be few and large, so each one is cut into slices, one for each block.
#pragma once

#include "packet.cuh"

namespace ddp_compile {

constexpr int kHeaderBytes = 8;
// Values that a thread handles at a time; their codes are eight aligned bytes.
constexpr int kCodes = 8;

struct CodecArguments {
  u8* values;
  u8* rows;
  float* partials;  // minimum and maximum of each slice, NaN if one of its values is
  u64 numel;
  u64 chunk_numel;
  u64 row_bytes;
  u64 slice_numel;  // a multiple of kCodes
  u32 num_slices;   // of each chunk
  u32 skipped;      // when compressing, a chunk whose values and row are not touched; kNone for none
};

constexpr u32 kNone = ~u32(0);

// The part of one block. The slices of a chunk cover all codes of its row, including the zeros after them.
template <class T>
struct Slice {
  u64 begin, end;  // counted in the chunk
  u64 count;       // values of the chunk; at the end, fewer than codes, or none
  bool is_skipped;
  u8* values;      // of the chunk
  u8* row;
  const float* partials;  // of the chunk

  DDP_COMPILE_INLINE explicit Slice(const CodecArguments& arguments) {
    const u32 chunk = blockIdx.x / arguments.num_slices;
    is_skipped = chunk == arguments.skipped;
    const u64 chunk_begin = chunk * arguments.chunk_numel;
    const u64 left = arguments.numel > chunk_begin ? arguments.numel - chunk_begin : 0;
    count = left < arguments.chunk_numel ? left : arguments.chunk_numel;
    const u64 num_codes = arguments.row_bytes - kHeaderBytes;
    const u64 slice_begin = (blockIdx.x % arguments.num_slices) * arguments.slice_numel;
    begin = slice_begin < num_codes ? slice_begin : num_codes;
    end = begin + arguments.slice_numel < num_codes ? begin + arguments.slice_numel : num_codes;
    values = arguments.values + chunk_begin * kBytes<T>;
    row = arguments.rows + chunk * arguments.row_bytes;
    partials = arguments.partials + 2 * chunk * arguments.num_slices;
  }
};

// Up to kCodes values from `first` on; returns how many there are.
template <class T>
DDP_COMPILE_INLINE int read_values(const u8* values, u64 first, u64 count, float (&out)[kCodes]) {
  const u8* from = values + first * kBytes<T>;
  if (first + kCodes <= count && is_aligned(from)) {
    Packet<T, kCodes> packet;
    packet.load(from);
    packet.decode(out);
    return kCodes;
  }
  const int available = first >= count ? 0 : first + kCodes <= count ? kCodes : int(count - first);
#pragma unroll
  for (int e = 0; e < kCodes; ++e) {
    Packet<T, 1> packet;
    float value[1] = {0};
    if (e < available) {
      packet.load(from + e * kBytes<T>);
      packet.decode(value);
    }
    out[e] = value[0];
  }
  return available;
}

struct MinMax {
  float minimum;
  float maximum;

  DDP_COMPILE_INLINE void add(const MinMax& other) {
    minimum = min_or_nan(minimum, other.minimum);
    maximum = max_or_nan(maximum, other.maximum);
  }
};

// The range of no values.
DDP_COMPILE_INLINE MinMax no_minmax() { return {as_float(0x7f800000u), as_float(0xff800000u)}; }

// The range of all threads of a block. Only thread 0 gets the result.
DDP_COMPILE_INLINE MinMax combine_block(MinMax mine) {
  __shared__ MinMax values[kThreads];
  values[threadIdx.x] = mine;
#pragma unroll
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) {
      mine.add(values[threadIdx.x + half]);
      values[threadIdx.x] = mine;
    }
  }
  return mine;
}

template <class T>
DDP_COMPILE_INLINE void find_minmax(const CodecArguments& arguments) {
  const Slice<T> slice(arguments);
  if (slice.is_skipped) return;
  MinMax mine = no_minmax();
  for (u64 first = slice.begin + kCodes * threadIdx.x; first < slice.end; first += kCodes * kThreads) {
    float in[kCodes];
    const int available = read_values<T>(slice.values, first, slice.count, in);
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      if (e < available) mine.add({in[e], in[e]});
    }
  }
  const MinMax total = combine_block(mine);
  if (threadIdx.x == 0) {
    arguments.partials[2 * blockIdx.x] = total.minimum;
    arguments.partials[2 * blockIdx.x + 1] = total.maximum;
  }
}

// Minimum and maximum of a chunk in the form of its header: NaN if a value is not finite, zero if there are no values.
template <class T>
DDP_COMPILE_INLINE MinMax header_of(const Slice<T>& slice, u32 num_slices) {
  MinMax mine = no_minmax();
  for (u32 i = threadIdx.x; i < num_slices; i += kThreads) {
    mine.add({slice.partials[2 * i], slice.partials[2 * i + 1]});
  }
  const MinMax total = combine_block(mine);
  __shared__ MinMax header;
  if (threadIdx.x == 0) {
    const float infinity = as_float(0x7f800000u), nan = as_float(Float32::kNan);
    const bool finite = fabsf(total.minimum) < infinity && fabsf(total.maximum) < infinity;
    // Adding zero makes a negative zero positive, so that the order of the values does not matter.
    header.minimum = slice.count == 0 ? 0.0f : finite ? __fadd_rn(total.minimum, 0.0f) : nan;
    header.maximum = slice.count == 0 ? 0.0f : finite ? __fadd_rn(total.maximum, 0.0f) : nan;
  }
  __syncthreads();
  return header;
}

template <class T>
DDP_COMPILE_INLINE void write_codes(const CodecArguments& arguments) {
  const Slice<T> slice(arguments);
  if (slice.is_skipped) return;
  const MinMax header = header_of(slice, arguments.num_slices);
  if (slice.begin == 0 && threadIdx.x == 0) {
    const u32 words[2] = {as_bits(header.minimum), as_bits(header.maximum)};
    store_pair(slice.row, words);
  }
  const double minimum = header.minimum;
  const double range = __dsub_rn(header.maximum, minimum);
  // Not if the chunk is constant or has a value that is not finite: then its codes are zero.
  const bool has_range = range > 0;
  const double inverse = has_range ? __ddiv_rn(255.0, range) : 0;
  // Adding 2^52 leaves the integer, rounded to nearest even, in the low bits.
  const double shift = 4503599627370496.0;
  for (u64 first = slice.begin + kCodes * threadIdx.x; first < slice.end; first += kCodes * kThreads) {
    float in[kCodes];
    const int available = read_values<T>(slice.values, first, slice.count, in);
    u32 words[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      double steps = __dmul_rn(__dsub_rn(in[e], minimum), inverse);
      steps = steps < 0 ? 0 : steps > 255 ? 255 : steps;
      const u32 code = has_range && e < available ? low_bits(__dadd_rn(steps, shift)) : 0;
      words[e / 4] |= code << (8 * (e % 4));
    }
    store_pair(slice.row + kHeaderBytes + first, words);
  }
}

// Writes the value of each code.
template <class T>
struct WriteDecoded {
  using Level = typename T::Bits;
  static DDP_COMPILE_INLINE Level level(float value) { return value == value ? T::encode(value) : T::kNan; }

  static DDP_COMPILE_INLINE void apply(u8* to, const Level (&levels)[kCodes]) {
    Packet<T, kCodes> packet;
#pragma unroll
    for (int word = 0; word < packet.kWords; ++word) packet.words[word] = 0;
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      packet.words[e * kBytes<T> / 4] |= u32(levels[e]) << (8 * (e * kBytes<T> % 4));
    }
    packet.store(to);
  }
  static DDP_COMPILE_INLINE void apply(u8* to, const Level (&level)[1]) { *reinterpret_cast<Level*>(to) = level[0]; }
};

// Adds the value of each code to the destination, in float, rounded once.
template <class T>
struct AddDecoded {
  using Level = float;
  static DDP_COMPILE_INLINE Level level(float value) { return value; }

  template <int kWidth>
  static DDP_COMPILE_INLINE void apply(u8* to, const Level (&levels)[kWidth]) {
    Packet<T, kWidth> packet;
    float values[kWidth];
    packet.load(to);
    packet.decode(values);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) values[e] = __fadd_rn(values[e], levels[e]);
    packet.encode(values);
    packet.store(to);
  }
};

template <class T, class Operation>
DDP_COMPILE_INLINE void read_codes(const CodecArguments& arguments) {
  using Level = typename Operation::Level;
  const Slice<T> slice(arguments);
  // There are only 256 different values: each thread decodes one.
  __shared__ Level decoded[256];
  u32 header[2];
  load_pair(slice.row, header);
  const double minimum = as_float(header[0]);
  const double step = __ddiv_rn(__dsub_rn(as_float(header[1]), minimum), 255.0);
  const float value = float(__dadd_rn(__dmul_rn(double(threadIdx.x), step), minimum));
  decoded[threadIdx.x] = Operation::level(value);
  __syncthreads();

  const u8* const codes = slice.row + kHeaderBytes;
  const u64 end = slice.end < slice.count ? slice.end : slice.count;
  const u64 begin = slice.begin < end ? slice.begin : end;
  const u64 num_packets = is_aligned(slice.values + begin * kBytes<T>) ? (end - begin) / kCodes : 0;
  for (u64 i = threadIdx.x; i < num_packets; i += kThreads) {
    const u64 first = begin + i * kCodes;
    u32 in[2];
    load_pair(codes + first, in);
    Level levels[kCodes];
#pragma unroll
    for (int e = 0; e < kCodes; ++e) levels[e] = decoded[in[e / 4] >> (8 * (e % 4)) & 255u];
    Operation::apply(slice.values + first * kBytes<T>, levels);
  }
  for (u64 i = begin + num_packets * kCodes + threadIdx.x; i < end; i += kThreads) {
    const Level level[1] = {decoded[codes[i]]};
    Operation::apply(slice.values + i * kBytes<T>, level);
  }
}

static_assert(kThreads == 256, "one thread for each code");

#define DDP_COMPILE_CODEC(T)                                                                   \
  DDP_COMPILE_KERNEL(find_minmax_##T, CodecArguments, find_minmax<T>(arguments))               \
  DDP_COMPILE_KERNEL(write_codes_##T, CodecArguments, write_codes<T>(arguments))               \
  DDP_COMPILE_KERNEL(read_codes_##T, CodecArguments, read_codes<T, WriteDecoded<T>>(arguments)) \
  DDP_COMPILE_KERNEL(add_codes_##T, CodecArguments, read_codes<T, AddDecoded<T>>(arguments))

}  // namespace ddp_compile
