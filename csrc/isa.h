// Which instruction set the kernels use, chosen at run time.
//
// Every kernel is compiled once per level from one source (for_each_isa.h), each copy in a namespace of its own, so
// that no inline function can be merged across levels. Code outside those namespaces is compiled for the baseline
// CPU.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#define PPO_FAST_X86 1
#else
#define PPO_FAST_X86 0
#endif

namespace ppo_fast {

// Ordered: a CPU that has a level has every level below it.
enum Isa : int {
  kPortable = 0,    // the compiler's baseline: SSE2 on x86-64, NEON on AArch64
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, DQ, VL, and all of kAvx2
  kAvx512Bf16 = 3,  // AVX-512 BF16: dot products of bfloat16 pairs; kernels without a use for them run as kAvx512
};

// The level in force.
Isa current_isa();

}  // namespace ppo_fast

// The copy of a function for the level in force, as a pointer; variadic because template arguments hold commas.
#if PPO_FAST_X86
#define PPO_FAST_PICK(...)                                                              \
  (::ppo_fast::current_isa() >= ::ppo_fast::kAvx512 ? &::ppo_fast::avx512::__VA_ARGS__ \
   : ::ppo_fast::current_isa() == ::ppo_fast::kAvx2 ? &::ppo_fast::avx2::__VA_ARGS__   \
                                                    : &::ppo_fast::portable::__VA_ARGS__)
#else
#define PPO_FAST_PICK(...) (&::ppo_fast::portable::__VA_ARGS__)
#endif
