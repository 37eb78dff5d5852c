// kernels/cuda/source/device.cuh for the CPU, so that tests run the very kernels without a device: the threads of a
// block are contexts that take turns from barrier to barrier. What a device would refuse or get wrong is an error here:
// misaligned vectors, and barriers that not all threads of a block reach. Threads take turns in changing order, so that
// a missing barrier shows. No header of containers or functions: each program would take half as long again to compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __forceinline__
#define __shared__ static
#define DDP_COMPILE_INLINE inline

namespace ddp_compile {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = unsigned long long;
static_assert(sizeof(u64) == 8, "as on the device");

constexpr int kThreads = 256;

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, gridDim;
static const char* failure;

// The contexts of one block, which is made once and works for all blocks of all launches.
class Block {
 public:
  template <class Body>
  void run(const Body& body) {
    body_ = &body;
    call_ = [](const void* body) { (*static_cast<const Body*>(body))(); };
    int alive = kThreads;
    for (int i = 0; i < kThreads; ++i) start(i);
    for (int round = 0; alive > 0; ++round) {
      int waiting = 0;
      for (int i = 0; i < kThreads; ++i) {
        current_ = (round + blockIdx.x) % 2 ? kThreads - 1 - i : i;
        if (done_[current_]) continue;
        threadIdx.x = unsigned(current_);
        swapcontext(&scheduler_, &contexts_[current_]);
        if (done_[current_]) {
          --alive;
        } else {
          ++waiting;
        }
      }
      if (waiting != 0 && alive != kThreads) {
        failure = "a barrier that not all threads of the block reach";
        return;
      }
    }
  }
  void wait() { swapcontext(&contexts_[current_], &scheduler_); }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;

  static void enter();
  void start(int i) {
    done_[i] = false;
    getcontext(&contexts_[i]);
    contexts_[i].uc_stack.ss_sp = stacks_ + i * kStackBytes;
    contexts_[i].uc_stack.ss_size = kStackBytes;
    contexts_[i].uc_link = &scheduler_;
    makecontext(&contexts_[i], enter, 0);
  }

  const void* body_ = nullptr;
  void (*call_)(const void*) = nullptr;
  ucontext_t scheduler_;
  ucontext_t contexts_[kThreads];
  bool done_[kThreads];
  int current_ = 0;
  alignas(16) char stacks_[kThreads * kStackBytes];
};

static Block block;
inline void Block::enter() {
  block.call_(block.body_);
  block.done_[block.current_] = true;
}
static void __syncthreads() { block.wait(); }

// Returns what went wrong, or null.
template <class Body>
const char* run_blocks(unsigned num_blocks, const Body& body) {
  failure = nullptr;
  gridDim.x = num_blocks;
  for (blockIdx.x = 0; blockIdx.x < num_blocks && failure == nullptr; ++blockIdx.x) block.run(body);
  return failure;
}

#define DDP_COMPILE_KERNEL(name, Arguments, ...)                                    \
  extern "C" unsigned name##_bytes() { return sizeof(Arguments); }                  \
  extern "C" const char* name(const void* const* parameters, unsigned num_blocks) { \
    Arguments arguments;                                                            \
    memcpy(&arguments, parameters[0], sizeof arguments);                            \
    return run_blocks(num_blocks, [&] { __VA_ARGS__; });                            \
  }

template <class To, class From>
inline To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float as_float(u32 bits) { return cast<float>(bits); }
inline u32 as_bits(float value) { return cast<u32>(value); }

using std::fabs;
inline float fabsf(float a) { return std::fabs(a); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

inline float min_or_nan(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline u32 low_bits(double value) { return u32(cast<uint64_t>(value)); }

struct Float32 {
  using Bits = u32;
  static constexpr Bits kNan = 0x7fc00000u;
  static float decode(Bits bits) { return as_float(bits); }
  static Bits encode(float value) { return as_bits(value); }
};

struct BFloat16 {
  using Bits = u16;
  static constexpr Bits kNan = 0x7fc0u;
  static float decode(Bits bits) { return as_float(u32(bits) << 16); }
  static Bits encode(float value) {
    const u32 bits = as_bits(value);
    return value != value ? 0x7fff : Bits((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);  // the device's NaN
  }
  static u32 encode(float first, float second) { return encode(first) | u32(encode(second)) << 16; }
};

struct Float16 {
  using Bits = u16;
  static constexpr Bits kNan = 0x7e00u;
  static float decode(Bits bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                                           : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  static Bits encode(float value) {
    const Bits sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7fff;  // the device's NaN
    if (std::fabs(value) >= 65520.0f) return sign | 0x7c00;
    int exponent = 0;
    std::frexp(value, &exponent);  // |value| is in 2^(exponent - 1) .. 2^exponent
    const int step = exponent - 11 > -24 ? exponent - 11 : -24;
    const int fraction = int(std::nearbyint(std::ldexp(std::fabs(value), -step)));  // up to 2048, to nearest even
    return sign | Bits(fraction + (value == 0 ? 0 : (step + 24) * 1024));
  }
  static u32 encode(float first, float second) { return encode(first) | u32(encode(second)) << 16; }
};

inline void copy_aligned(void* to, const void* from, size_t bytes, const void* checked) {
  if (reinterpret_cast<uintptr_t>(checked) % bytes != 0) {
    failure = "a vector that is not aligned";
    return;
  }
  memcpy(to, from, bytes);
}
inline void load_quad(const u8* from, u32* words) { copy_aligned(words, from, 16, from); }
inline void store_quad(u8* to, const u32* words) { copy_aligned(to, words, 16, to); }
inline void load_pair(const u8* from, u32* words) { copy_aligned(words, from, 8, from); }
inline void store_pair(u8* to, const u32* words) { copy_aligned(to, words, 8, to); }
inline void load_word(const u8* from, u32* words) { copy_aligned(words, from, 4, from); }
inline void store_word(u8* to, const u32* words) { copy_aligned(to, words, 4, to); }

}  // namespace ddp_compile
