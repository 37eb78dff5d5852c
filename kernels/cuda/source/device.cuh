// Device-specific code: number formats, vector loads and stores, declarations of kernels. It includes no header, so
// that NVRTC, which has none, and nvcc compile the same text. tests/kernels/emulated_device.cuh replaces it on a CPU.
#pragma once

namespace ddp_compile {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Threads of every block; kernels/cuda/arguments.py has the same number.
constexpr int kThreads = 256;

// The only parameter of a kernel, passed by value. It is part of the launch, so a captured graph keeps a copy of it,
// and nothing has to be uploaded before or kept alive afterward.
#define DDP_COMPILE_KERNEL(name, Arguments, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ Arguments arguments) { \
    __VA_ARGS__;                                                                                              \
  }

#define DDP_COMPILE_INLINE __device__ __forceinline__

DDP_COMPILE_INLINE float as_float(u32 bits) { return __uint_as_float(bits); }
DDP_COMPILE_INLINE u32 as_bits(float value) { return __float_as_uint(value); }

// One format of an element: its bits, and its conversions, which round to nearest even and keep infinities and NaNs.
// kNan is the NaN that the codec writes.
struct Float32 {
  using Bits = u32;
  static constexpr Bits kNan = 0x7fc00000u;
  static DDP_COMPILE_INLINE float decode(Bits bits) { return as_float(bits); }
  static DDP_COMPILE_INLINE Bits encode(float value) { return as_bits(value); }
};

struct BFloat16 {
  using Bits = u16;
  static constexpr Bits kNan = 0x7fc0u;
  static DDP_COMPILE_INLINE float decode(Bits bits) { return as_float(u32(bits) << 16); }
  static DDP_COMPILE_INLINE Bits encode(float value) {
    Bits bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  // Two elements, the first one in the low half.
  static DDP_COMPILE_INLINE u32 encode(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

struct Float16 {
  using Bits = u16;
  static constexpr Bits kNan = 0x7e00u;
  static DDP_COMPILE_INLINE float decode(Bits bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static DDP_COMPILE_INLINE Bits encode(float value) {
    Bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static DDP_COMPILE_INLINE u32 encode(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
};

// The smaller and the larger value, or NaN if one of them is NaN.
DDP_COMPILE_INLINE float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
DDP_COMPILE_INLINE float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 16 bytes at once from or to an address that is a multiple of 16. Data that is read is not expected to be read again
// soon. Written data is, by the collective or the optimizer, so it may stay in the L2 cache.
DDP_COMPILE_INLINE void load_quad(const u8* from, u32* words) {
  const uint4 quad = __ldcs(reinterpret_cast<const uint4*>(from));
  words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
}
DDP_COMPILE_INLINE void store_quad(u8* to, const u32* words) {
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight bytes at a multiple of eight.
DDP_COMPILE_INLINE void load_pair(const u8* from, u32* words) {
  const uint2 pair = *reinterpret_cast<const uint2*>(from);
  words[0] = pair.x, words[1] = pair.y;
}
DDP_COMPILE_INLINE void store_pair(u8* to, const u32* words) {
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}

// Four bytes at a multiple of four.
DDP_COMPILE_INLINE void load_word(const u8* from, u32* words) { words[0] = *reinterpret_cast<const u32*>(from); }
DDP_COMPILE_INLINE void store_word(u8* to, const u32* words) { *reinterpret_cast<u32*>(to) = words[0]; }

// The low 32 bits of a double's bits.
DDP_COMPILE_INLINE u32 low_bits(double value) { return u32(__double2loint(value)); }

}  // namespace ddp_compile
