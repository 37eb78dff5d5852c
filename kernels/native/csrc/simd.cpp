#include "simd.h"

#if defined(__GNUC__) && defined(__x86_64__)
#define DDP_COMPILE_X86 1
#include <immintrin.h>
#endif

// Vectors never leave this file, so their calling convention does not matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace ddp_compile {

namespace baseline {
#include "loops.h"
}

#if defined(DDP_COMPILE_X86)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace avx512 {
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

struct Choice {
  const Loops* loops;
  const char* name;
};

Choice choose() {
#if defined(DDP_COMPILE_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return {&avx512::kLoops, "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) return {&avx2::kLoops, "avx2"};
#endif
  return {&baseline::kLoops, "baseline"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const Loops& loops() { return *choice().loops; }
const char* instruction_set() { return choice().name; }

}  // namespace ddp_compile
