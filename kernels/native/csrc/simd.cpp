#include "simd.h"

#include <atomic>

// The tests also build the code for other processors, without intrinsics, and the code for compilers other than GCC and
// clang, without vectors.
#if defined(__GNUC__) && !defined(DDP_COMPILE_PLAIN_LOOPS)
#define DDP_COMPILE_VECTORS 1
#if defined(__x86_64__) && !defined(DDP_COMPILE_NO_INTRINSICS)
#define DDP_COMPILE_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif
#endif

// Vectors never leave this file, so their calling convention does not matter. GCC 12 warns of registers that its own
// intrinsics leave undefined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ddp_compile {

#define DDP_COMPILE_AVX 0
#if defined(DDP_COMPILE_VECTORS)
namespace baseline {
#else
namespace plain {
#endif
#include "lanes.h"
#include "loops.h"
}

#if defined(DDP_COMPILE_X86)
#undef DDP_COMPILE_AVX
#define DDP_COMPILE_AVX 2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#include "lanes.h"
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#undef DDP_COMPILE_AVX
#define DDP_COMPILE_AVX 512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif
namespace avx512 {
#include "lanes.h"
#include "loops.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

struct InstructionSet {
  const char* name;
  const Loops* loops;
  bool (*is_here)();
};

#if defined(DDP_COMPILE_X86)
// A name that __builtin_cpu_supports of older compilers does not know.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
}
#endif
bool has_baseline() { return true; }

// Fastest first.
const InstructionSet kInstructionSets[] = {
#if defined(DDP_COMPILE_X86)
    {"avx512", &avx512::kLoops, has_avx512},
    {"avx2", &avx2::kLoops, has_avx2},
#endif
#if defined(DDP_COMPILE_VECTORS)
    {"baseline", &baseline::kLoops, has_baseline},
#else
    {"plain", &plain::kLoops, has_baseline},
#endif
};

const InstructionSet* at(int64_t index) {
  for (const InstructionSet& set : kInstructionSets) {
    if (set.is_here() && index-- == 0) return &set;
  }
  return nullptr;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> chosen(at(0));
  return chosen;
}

}  // namespace

const Loops& loops() { return *chosen().load(std::memory_order_relaxed)->loops; }
const char* instruction_set() { return chosen().load()->name; }

const char* instruction_set_at(int64_t index) {
  const InstructionSet* set = at(index);
  return set == nullptr ? nullptr : set->name;
}

bool use_instruction_set(const char* name) {
  for (int64_t i = 0; const InstructionSet* set = at(i); ++i) {
    if (strcmp(set->name, name) == 0) return chosen().store(set), true;
  }
  return false;
}

}  // namespace ddp_compile
