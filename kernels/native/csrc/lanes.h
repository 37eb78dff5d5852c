// Reading, converting and writing elements, one at a time and a register at a time. simd.cpp includes this file and
// loops.h once for each instruction set, each time inside another namespace. So there is no include guard, and this
// file includes nothing.
//
// Vectors are those of GCC and clang, as wide as the registers. Wider ones are also correct, but GCC keeps them in
// memory. x86 intrinsics do what the vector types cannot express; there, DDP_COMPILE_AVX is 0, 2 or 512. (__AVX2__ and
// __AVX512F__ depend on the command line only: GCC 12 does not change them if a pragma chooses the instruction set.)

#if defined(DDP_COMPILE_VECTORS)
#if DDP_COMPILE_AVX == 512
constexpr int kLanes = 16;
#elif DDP_COMPILE_AVX == 2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));
// Double precision has half as many lanes.
constexpr int kHalf = kLanes / 2;
typedef double f64v __attribute__((vector_size(4 * kLanes)));
typedef uint64_t u64v __attribute__((vector_size(4 * kLanes)));
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

// For one element and for vectors.
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// U: uint32_t or a vector of it; F: float or a vector of it. The upper halves of the results are the bfloat16, rounded
// to nearest, ties to even; a NaN stays a NaN.
template <class U, class F>
inline U bfloat16_in_upper_half(F value) {
  const U bits = bit_cast<U>(value);
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? (rounded & 0u) + 0x7fc00000u : rounded;
}

template <class U, class F>
inline U float16_bits(F value) {
  const U bits = bit_cast<U>(value);
  const U magnitude = bits & 0x7fffffffu;
  const U sign = (bits >> 16) & 0x8000u;
  // Exponents from -14 on: shift the bias from 127 to 15. A value that rounds up to 2^16 becomes infinite by this.
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
  // The bias goes from 15 to 127. A subnormal is the amount that it adds to 2^-14: as a float32 it would be subnormal
  // too, and threads that flush subnormals would take it for zero.
  const F smallest_normal = bit_cast<F>((half & 0u) + (113u << 23));
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude + (113u << 23)) - smallest_normal);
  const U finite = magnitude < (1u << 23) ? subnormal : magnitude + (112u << 23);
  const U special = magnitude | 0x7f800000u;
  const U bits = magnitude >= (31u << 23) ? special : finite;
  return bit_cast<F>(bits | ((half & 0x8000u) << 16));
}

inline float read(const Float32* from) { return from->value; }
inline float read(const BFloat16* from) { return bit_cast<float>(uint32_t(from->bits) << 16); }
inline void write(Float32* to, float value) { to->value = value; }
inline void write(BFloat16* to, float value) { to->bits = uint16_t(bfloat16_in_upper_half<uint32_t>(value) >> 16); }

// One element is converted by the same instruction as sixteen, so that a NaN becomes the same NaN at any position.
#if DDP_COMPILE_AVX
inline float read(const Float16* from) { return _cvtsh_ss(from->bits); }
inline void write(Float16* to, float value) { to->bits = uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }
#else
inline float read(const Float16* from) { return float16_value<uint32_t, float>(from->bits); }
inline void write(Float16* to, float value) { to->bits = uint16_t(float16_bits<uint32_t>(value)); }
#endif

// Adding 2^52 to a small double leaves it as an integer, rounded to nearest even, in the low bits.
constexpr double kRounding = 4503599627370496.0;

#if defined(DDP_COMPILE_VECTORS)

inline u32v widened(const void* from) { return __builtin_convertvector(load<u16v>(from), u32v); }
inline f32v read_lanes(const Float32* from) { return load<f32v>(from); }
inline f32v read_lanes(const BFloat16* from) { return bit_cast<f32v>(widened(from) << 16); }
inline void write_lanes(Float32* to, f32v value) { store(to, value); }
inline void write_lanes(BFloat16* to, f32v value) {
  store(to, __builtin_convertvector(bfloat16_in_upper_half<u32v>(value) >> 16, u16v));
}

#if DDP_COMPILE_AVX == 512
inline f32v read_lanes(const Float16* from) { return bit_cast<f32v>(_mm512_cvtph_ps(load<__m256i>(from))); }
inline u16v float16_lanes(f32v value) {
  return bit_cast<u16v>(_mm512_cvtps_ph(bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}
#elif DDP_COMPILE_AVX == 2
inline f32v read_lanes(const Float16* from) { return bit_cast<f32v>(_mm256_cvtph_ps(load<__m128i>(from))); }
inline u16v float16_lanes(f32v value) {
  return bit_cast<u16v>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}
#else
inline f32v read_lanes(const Float16* from) { return float16_value<u32v, f32v>(widened(from)); }
inline u16v float16_lanes(f32v value) { return __builtin_convertvector(float16_bits<u32v>(value), u16v); }
#endif
inline void write_lanes(Float16* to, f32v value) { store(to, float16_lanes(value)); }

// write_two: writes two vectors. If kStreaming, it bypasses the caches, and the address must be a multiple of a
// register's size. Two vectors of a half format fill one register.
#if defined(DDP_COMPILE_X86)

#if DDP_COMPILE_AVX == 512
typedef __m512i Register;
inline void stream(void* to, Register value) { _mm512_stream_si512(static_cast<Register*>(to), value); }
inline Register upper_halves(u32v first, u32v second) {
  static const uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(bit_cast<Register>(first), load<Register>(kOdd), bit_cast<Register>(second));
}
inline Register float16_register(f32v first, f32v second) {
  const Register low = _mm512_castsi256_si512(bit_cast<__m256i>(float16_lanes(first)));
  return _mm512_inserti64x4(low, bit_cast<__m256i>(float16_lanes(second)), 1);
}
#elif DDP_COMPILE_AVX == 2
typedef __m256i Register;
inline void stream(void* to, Register value) { _mm256_stream_si256(static_cast<Register*>(to), value); }
inline Register upper_halves(u32v first, u32v second) {
  const Register low = _mm256_srli_epi32(bit_cast<Register>(first), 16);
  const Register high = _mm256_srli_epi32(bit_cast<Register>(second), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);  // packing works on halves of the register
}
inline Register float16_register(f32v first, f32v second) {
  const Register low = _mm256_castsi128_si256(bit_cast<__m128i>(float16_lanes(first)));
  return _mm256_inserti128_si256(low, bit_cast<__m128i>(float16_lanes(second)), 1);
}
#else
typedef __m128i Register;
inline void stream(void* to, Register value) { _mm_stream_si128(static_cast<Register*>(to), value); }
inline Register upper_halves(u32v first, u32v second) {
  // With signs, since there is no packing without signs.
  return _mm_packs_epi32(_mm_srai_epi32(bit_cast<Register>(first), 16), _mm_srai_epi32(bit_cast<Register>(second), 16));
}
inline Register float16_register(f32v first, f32v second) {
  return upper_halves(float16_bits<u32v>(first) << 16, float16_bits<u32v>(second) << 16);
}
#endif
inline void end_streaming() { _mm_sfence(); }

template <bool kStreaming>
inline void put(void* to, Register value) {
  if (kStreaming) {
    stream(to, value);
  } else {
    store(to, value);
  }
}

template <bool kStreaming>
inline void write_two(Float32* to, f32v first, f32v second) {
  put<kStreaming>(to, bit_cast<Register>(first));
  put<kStreaming>(to + kLanes, bit_cast<Register>(second));
}
template <bool kStreaming>
inline void write_two(BFloat16* to, f32v first, f32v second) {
  const u32v low = bfloat16_in_upper_half<u32v>(first), high = bfloat16_in_upper_half<u32v>(second);
  put<kStreaming>(to, upper_halves(low, high));
}
template <bool kStreaming>
inline void write_two(Float16* to, f32v first, f32v second) {
  put<kStreaming>(to, float16_register(first, second));
}

#else

template <bool kStreaming, class D>
inline void write_two(D* to, f32v first, f32v second) {
  write_lanes(to, first);
  write_lanes(to + kLanes, second);
}

#endif

// Conversions between single and double precision, with the lanes in two halves, and between double precision and
// codes, whole numbers from 0 to 255, to which doubles are rounded, ties to even.
#if DDP_COMPILE_AVX == 512
inline f64v lower_half(f32v value) {
  return bit_cast<f64v>(_mm512_cvtps_pd(_mm512_castps512_ps256(bit_cast<__m512>(value))));
}
inline f64v upper_half(f32v value) {
  return bit_cast<f64v>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(bit_cast<__m512>(value), 1)));
}
inline f32v in_single(f64v lower, f64v upper) {
  const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(bit_cast<__m512d>(lower)));
  return bit_cast<f32v>(_mm512_insertf32x8(low, _mm512_cvtpd_ps(bit_cast<__m512d>(upper)), 1));
}
inline f64v read_codes(const uint8_t* codes) {
  const __m128i loaded = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return bit_cast<f64v>(_mm512_cvtepi32_pd(_mm256_cvtepu8_epi32(loaded)));
}
constexpr int kCodesAtOnce = kLanes;
inline void write_codes(uint8_t* codes, const f64v* steps) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtpd_epi32(bit_cast<__m512d>(steps[0])));
  const __m512i both = _mm512_inserti64x4(low, _mm512_cvtpd_epi32(bit_cast<__m512d>(steps[1])), 1);
  store(codes, _mm512_cvtepi32_epi8(both));
}
#elif DDP_COMPILE_AVX == 2
inline f64v lower_half(f32v value) {
  return bit_cast<f64v>(_mm256_cvtps_pd(_mm256_castps256_ps128(bit_cast<__m256>(value))));
}
inline f64v upper_half(f32v value) {
  return bit_cast<f64v>(_mm256_cvtps_pd(_mm256_extractf128_ps(bit_cast<__m256>(value), 1)));
}
inline f32v in_single(f64v lower, f64v upper) {
  const __m256 low = _mm256_castps128_ps256(_mm256_cvtpd_ps(bit_cast<__m256d>(lower)));
  return bit_cast<f32v>(_mm256_insertf128_ps(low, _mm256_cvtpd_ps(bit_cast<__m256d>(upper)), 1));
}
inline f64v read_codes(const uint8_t* codes) {
  return bit_cast<f64v>(_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(load<int>(codes)))));
}
constexpr int kCodesAtOnce = 32;
inline void write_codes(uint8_t* codes, const f64v* steps) {
  // Of eight codes, 0 1 4 5 are in the lower half of a register, 2 3 6 7 in the upper half, and packing keeps that.
  __m256i eight[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 lower = bit_cast<__m256>(steps[2 * i] + kRounding);
    const __m256 upper = bit_cast<__m256>(steps[2 * i + 1] + kRounding);
    eight[i] = bit_cast<__m256i>(_mm256_shuffle_ps(lower, upper, 0x88));
  }
  const __m256i first = _mm256_packus_epi32(eight[0], eight[1]), second = _mm256_packus_epi32(eight[2], eight[3]);
  const __m256i packed = _mm256_packus_epi16(first, second);
  const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
  store(codes, _mm_unpacklo_epi16(low, high));
  store(codes + 16, _mm_unpackhi_epi16(low, high));
}
#else
inline f64v lower_half(f32v value) { return f64v{value[0], value[1]}; }
inline f64v upper_half(f32v value) { return f64v{value[2], value[3]}; }
inline f32v in_single(f64v lower, f64v upper) {
  return f32v{float(lower[0]), float(lower[1]), float(upper[0]), float(upper[1])};
}
inline f64v read_codes(const uint8_t* codes) { return f64v{double(codes[0]), double(codes[1])}; }
constexpr int kCodesAtOnce = kLanes;
inline void write_codes(uint8_t* codes, const f64v* steps) {
  for (int i = 0; i < kLanes; ++i) codes[i] = uint8_t(bit_cast<u64v>(steps[i / kHalf] + kRounding)[i % kHalf]);
}
#endif

#endif

#if !defined(DDP_COMPILE_X86)
inline void end_streaming() {}
#endif
