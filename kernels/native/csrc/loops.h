// The loops over elements. simd.cpp includes this file once for each instruction set, each time inside another namespace:
// so there is no include guard, and nothing is included from here.
//
// GCC's and clang's vector types say 16 lanes and leave it to the compiler how many registers that takes. Other
// compilers get the one-element loops alone, which handle the last few elements everywhere else.

#if defined(__GNUC__)
constexpr int kLanes = 16;
typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef uint32_t u32v __attribute__((vector_size(64)));
typedef uint16_t u16v __attribute__((vector_size(32)));
typedef uint8_t u8v8 __attribute__((vector_size(8)));
typedef float f32v8 __attribute__((vector_size(32)));
typedef double f64v8 __attribute__((vector_size(64)));
typedef uint64_t u64v8 __attribute__((vector_size(64)));
#endif

template <class V>
inline V load(const void* from) {
  V value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
inline void store(void* to, V value) {
  memcpy(to, &value, sizeof value);
}

// A store that leaves the caches alone, to an address that is a multiple of the vector's size.
#if defined(DDP_COMPILE_X86) && defined(__GNUC__)
template <class V>
inline void stream(void* to, V value) {
#if defined(__AVX512F__)
  if (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), load<__m512i>(&value));
#endif
  for (size_t i = 0; i < sizeof(V); i += 16) {
    const char* part = reinterpret_cast<const char*>(&value) + i;
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i), load<__m128i>(part));
  }
}
inline void end_streaming() { _mm_sfence(); }
#else
template <class V>
inline void stream(void* to, V value) { store(to, value); }
inline void end_streaming() {}
#endif

// Bit casts and selections, for one element and for vectors alike.
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// U: uint32_t or a vector of it; F: float or a vector of it. Round to nearest, ties to even; a NaN stays a NaN.
template <class U, class F>
inline U bfloat16_bits(F value) {
  const U bits = bit_cast<U>(value);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? (rounded & 0u) + 0x7fc0u : rounded;
}

template <class U, class F>
inline U float16_bits(F value) {
  const U bits = bit_cast<U>(value);
  const U magnitude = bits & 0x7fffffffu;
  const U sign = (bits >> 16) & 0x8000u;
  // Exponents from -14 on: shift the bias from 127 to 15. What rounds up to 2^16 becomes infinite by itself.
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 an addition of 0.5 aligns the last bit of a subnormal with that of the sum, rounding to even.
  const F half = bit_cast<F>((magnitude & 0u) + 0x3f000000u);
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude) + half) - 0x3f000000u;
  U result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? (result & 0u) + 0x7c00u : result;
  result = magnitude > 0x7f800000u ? (result & 0u) + 0x7e00u : result;
  return result | sign;
}

template <class U, class F>
inline F float16_value(U half) {
  const U magnitude = (half & 0x7fffu) << 13;
  // The bias goes from 15 to 127. A subnormal is what it adds to 2^-14; as a float32 it would be subnormal as well, which
  // threads that flush those take for zero.
  const F smallest_normal = bit_cast<F>((half & 0u) + (113u << 23));
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude + (113u << 23)) - smallest_normal);
  const U finite = magnitude < (1u << 23) ? subnormal : magnitude + (112u << 23);
  const U special = magnitude | 0x7f800000u;
  const U bits = magnitude >= (31u << 23) ? special : finite;
  return bit_cast<F>(bits | ((half & 0x8000u) << 16));
}

inline float read(const Float32* from) { return from->value; }
inline float read(const BFloat16* from) { return bit_cast<float>(uint32_t(from->bits) << 16); }
inline float read(const Float16* from) { return float16_value<uint32_t, float>(from->bits); }

// What the magnitude of an infinity is in each format, in bits; a NaN's is larger.
inline uint32_t infinity_of(const Float32*) { return 0x7f800000u; }
inline uint32_t infinity_of(const BFloat16*) { return 0x7f80u; }
inline uint32_t infinity_of(const Float16*) { return 0x7c00u; }

// Each write returns the magnitude that was written, in bits.
inline uint32_t write(Float32* to, float value) {
  to->value = value;
  return bit_cast<uint32_t>(value) & 0x7fffffffu;
}
inline uint32_t write(BFloat16* to, float value) {
  to->bits = uint16_t(bfloat16_bits<uint32_t>(value));
  return to->bits & 0x7fffu;
}
inline uint32_t write(Float16* to, float value) {
  to->bits = uint16_t(float16_bits<uint32_t>(value));
  return to->bits & 0x7fffu;
}

template <class U>
inline U larger(U a, U b) {
  return a > b ? a : b;
}

#if defined(__GNUC__)
inline u32v widened(const void* from) { return __builtin_convertvector(load<u16v>(from), u32v); }
inline f32v read_lanes(const Float32* from) { return load<f32v>(from); }
inline f32v read_lanes(const BFloat16* from) { return bit_cast<f32v>(widened(from) << 16); }
inline f32v read_lanes(const Float16* from) { return float16_value<u32v, f32v>(widened(from)); }

template <bool kStreaming, class V>
inline void put(void* to, V value) {
  if (kStreaming) {
    stream(to, value);
  } else {
    store(to, value);
  }
}

template <bool kStreaming = false>
inline u32v write_lanes(Float32* to, f32v value) {
  put<kStreaming>(to, value);
  return bit_cast<u32v>(value) & 0x7fffffffu;
}
template <bool kStreaming = false>
inline u32v write_lanes(BFloat16* to, f32v value) {
  const u32v bits = bfloat16_bits<u32v>(value);
  put<kStreaming>(to, __builtin_convertvector(bits, u16v));
  return bits & 0x7fffu;
}
template <bool kStreaming = false>
inline u32v write_lanes(Float16* to, f32v value) {
  const u32v bits = float16_bits<u32v>(value);
  put<kStreaming>(to, __builtin_convertvector(bits, u16v));
  return bits & 0x7fffu;
}
#endif

template <class S, class D, bool kWithStats, bool kStreaming>
void scale_elements(const S* from, D* to, int64_t count, float scale, Stats* stats) {
  int64_t i = 0;
  uint32_t largest = 0;
  double total = 0;
#if defined(__GNUC__)
  u32v largest_lanes = {};
  while (i + 4 * kLanes <= count) {
    // Squares are added in float for 8192 elements at a time, in four sums, then in double.
    const int64_t end = count < i + 8192 ? count : i + 8192;
    f32v sum0 = {}, sum1 = {}, sum2 = {}, sum3 = {};
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      const f32v value0 = read_lanes(from + i) * scale;
      const f32v value1 = read_lanes(from + i + kLanes) * scale;
      const f32v value2 = read_lanes(from + i + 2 * kLanes) * scale;
      const f32v value3 = read_lanes(from + i + 3 * kLanes) * scale;
      const u32v bits0 = write_lanes<kStreaming>(to + i, value0);
      const u32v bits1 = write_lanes<kStreaming>(to + i + kLanes, value1);
      const u32v bits2 = write_lanes<kStreaming>(to + i + 2 * kLanes, value2);
      const u32v bits3 = write_lanes<kStreaming>(to + i + 3 * kLanes, value3);
      if (kWithStats) {
        sum0 += value0 * value0;
        sum1 += value1 * value1;
        sum2 += value2 * value2;
        sum3 += value3 * value3;
        largest_lanes = larger(largest_lanes, larger(larger(bits0, bits1), larger(bits2, bits3)));
      }
    }
    if (kWithStats) {
      const f32v sum = (sum0 + sum1) + (sum2 + sum3);
      for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) largest = larger(largest, uint32_t(largest_lanes[lane]));
#endif
  for (; i < count; ++i) {
    const float value = read(from + i) * scale;
    largest = larger(largest, write(to + i, value));
    if (kWithStats) total += double(value) * double(value);
  }
  if (kStreaming) end_streaming();
  if (kWithStats) {
    stats->sum_of_squares += total;
    stats->non_finite |= largest >= infinity_of(to);
  }
}

template <class S, class D, bool kStreaming>
void scale_elements(const S* from, D* to, int64_t count, float scale, Stats* stats) {
  if (stats != nullptr) {
    scale_elements<S, D, true, kStreaming>(from, to, count, scale, stats);
  } else {
    scale_elements<S, D, false, kStreaming>(from, to, count, scale, stats);
  }
}

template <class S, class D>
void scale_elements(const void* source, void* destination, int64_t count, float scale, bool streaming, Stats* stats) {
  const S* from = static_cast<const S*>(source);
  D* to = static_cast<D*>(destination);
  // Scaling in place has fetched what it writes; memory that is not even aligned to its elements never gets aligned.
  const bool is_odd = reinterpret_cast<uintptr_t>(to) % sizeof(D) != 0;
  if (!streaming || source == destination || is_odd) return scale_elements<S, D, false>(from, to, count, scale, stats);
  const int64_t misaligned = int64_t(-reinterpret_cast<intptr_t>(to) & 63) / int64_t(sizeof(D));
  const int64_t head = misaligned < count ? misaligned : count;
  scale_elements<S, D, false>(from, to, head, scale, stats);
  scale_elements<S, D, true>(from + head, to + head, count - head, scale, stats);
}

template <class S>
void scale_from(
    Dtype to, const void* source, void* destination, int64_t count, float scale, bool streaming, Stats* stats) {
  switch (to) {
    case kFloat32: return scale_elements<S, Float32>(source, destination, count, scale, streaming, stats);
    case kBFloat16: return scale_elements<S, BFloat16>(source, destination, count, scale, streaming, stats);
    default: return scale_elements<S, Float16>(source, destination, count, scale, streaming, stats);
  }
}

void scale_elements(Dtype from, Dtype to, const void* source, void* destination, int64_t count, float scale,
                    bool streaming, Stats* stats) {
  switch (from) {
    case kFloat32: return scale_from<Float32>(to, source, destination, count, scale, streaming, stats);
    case kBFloat16: return scale_from<BFloat16>(to, source, destination, count, scale, streaming, stats);
    default: return scale_from<Float16>(to, source, destination, count, scale, streaming, stats);
  }
}

// x[i] += sum[i] / world_size - copy[i], in float, rounded once.
template <class T>
void average_elements(void* x, const void* sum, const void* copy, int64_t count, float world_size) {
  T* to = static_cast<T*>(x);
  const T* sums = static_cast<const T*>(sum);
  const T* copies = static_cast<const T*>(copy);
  int64_t i = 0;
#if defined(__GNUC__)
  for (; i + kLanes <= count; i += kLanes) {
    write_lanes(to + i, read_lanes(to + i) + (read_lanes(sums + i) / world_size - read_lanes(copies + i)));
  }
#endif
  for (; i < count; ++i) write(to + i, read(to + i) + (read(sums + i) / world_size - read(copies + i)));
}

void average_elements(Dtype dtype, void* x, const void* sum, const void* copy, int64_t count, float world_size) {
  switch (dtype) {
    case kFloat32: return average_elements<Float32>(x, sum, copy, count, world_size);
    case kBFloat16: return average_elements<BFloat16>(x, sum, copy, count, world_size);
    default: return average_elements<Float16>(x, sum, copy, count, world_size);
  }
}

// The smallest and largest value of a chunk; both NaN if a value is infinite or NaN.
template <class T>
void minmax_of(const T* from, int64_t count, float* minimum, float* maximum) {
  float lowest = read(from), highest = lowest;
  uint32_t bad = 0;
  int64_t i = 0;
#if defined(__GNUC__)
  if (count >= kLanes) {
    f32v low = read_lanes(from), high = low;
    u32v bad_lanes = {};
    for (; i + kLanes <= count; i += kLanes) {
      const f32v value = read_lanes(from + i);
      low = value < low ? value : low;
      high = value > high ? value : high;
      bad_lanes |= bit_cast<u32v>(value - value);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      lowest = low[lane] < lowest ? low[lane] : lowest;
      highest = high[lane] > highest ? high[lane] : highest;
      bad |= bad_lanes[lane];
    }
  }
#endif
  for (; i < count; ++i) {
    const float value = read(from + i);
    lowest = value < lowest ? value : lowest;
    highest = value > highest ? value : highest;
    bad |= bit_cast<uint32_t>(value - value);
  }
  const float nan = bit_cast<float>(uint32_t(0x7fc00000));
  // Adding zero makes both kinds of zero the positive one: which of them came first is not to matter.
  *minimum = bad ? nan : lowest + 0.0f;
  *maximum = bad ? nan : highest + 0.0f;
}

// codes[i] = round((from[i] - minimum) * 255 / (maximum - minimum)) within 0..255, computed in double: neither the
// difference of two large floats nor a step below the smallest normal float is lost.
template <class T>
void compress_chunk(const T* from, int64_t count, float* header, uint8_t* codes) {
  minmax_of(from, count, &header[0], &header[1]);
  const double minimum = header[0];
  const double range = double(header[1]) - minimum;
  if (!(range > 0)) {  // constant, or not finite
    memset(codes, 0, size_t(count));
    return;
  }
  const double inverse = 255.0 / range;
  // Adding 2^52 leaves the integer, rounded to nearest even, in the low bits.
  const double shift = 4503599627370496.0;
  int64_t i = 0;
#if defined(__GNUC__)
  for (; i + kLanes <= count; i += kLanes) {
    const f32v values = read_lanes(from + i);
    for (int part = 0; part < 2; ++part) {
      f32v8 half;
      memcpy(&half, reinterpret_cast<const float*>(&values) + 8 * part, sizeof half);
      f64v8 steps = (__builtin_convertvector(half, f64v8) - minimum) * inverse;
      const f64v8 zero = {}, top = zero + 255.0;
      steps = steps < zero ? zero : steps;
      steps = steps > top ? top : steps;
      store(codes + i + 8 * part, __builtin_convertvector(bit_cast<u64v8>(steps + shift), u8v8));
    }
  }
#endif
  for (; i < count; ++i) {
    double steps = (double(read(from + i)) - minimum) * inverse;
    steps = steps < 0.0 ? 0.0 : steps > 255.0 ? 255.0 : steps;
    codes[i] = uint8_t(bit_cast<uint64_t>(steps + shift));
  }
}

template <class T>
void decompress_chunk(const float* header, const uint8_t* codes, int64_t count, T* to) {
  const double minimum = header[0];
  const double step = (double(header[1]) - minimum) / 255.0;
  int64_t i = 0;
#if defined(__GNUC__)
  for (; i + kLanes <= count; i += kLanes) {
    f32v values;
    for (int part = 0; part < 2; ++part) {
      const f64v8 steps = __builtin_convertvector(load<u8v8>(codes + i + 8 * part), f64v8);
      const f32v8 half = __builtin_convertvector(steps * step + minimum, f32v8);
      memcpy(reinterpret_cast<float*>(&values) + 8 * part, &half, sizeof half);
    }
    write_lanes(to + i, values);
  }
#endif
  for (; i < count; ++i) write(to + i, float(double(codes[i]) * step + minimum));
}

void compress_chunk(Dtype dtype, const void* from, int64_t count, float* header, uint8_t* codes) {
  switch (dtype) {
    case kFloat32: return compress_chunk(static_cast<const Float32*>(from), count, header, codes);
    case kBFloat16: return compress_chunk(static_cast<const BFloat16*>(from), count, header, codes);
    default: return compress_chunk(static_cast<const Float16*>(from), count, header, codes);
  }
}

void decompress_chunk(Dtype dtype, const float* header, const uint8_t* codes, int64_t count, void* to) {
  switch (dtype) {
    case kFloat32: return decompress_chunk(header, codes, count, static_cast<Float32*>(to));
    case kBFloat16: return decompress_chunk(header, codes, count, static_cast<BFloat16*>(to));
    default: return decompress_chunk(header, codes, count, static_cast<Float16*>(to));
  }
}

const Loops kLoops = {scale_elements, average_elements, compress_chunk, decompress_chunk};
