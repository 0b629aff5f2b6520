// Compiles the header named by PPO_FAST_BODY once per instruction set, with PPO_FAST_ISA set to the level, inside the
// namespaces ppo_fast::portable, ::avx2 and ::avx512. No include guard: each op includes it with its own body.
// A body that has a use for bfloat16 dot products defines PPO_FAST_WANTS_BF16 first and is compiled once more, inside
// ::avx512_bf16 with PPO_FAST_BF16_DOT set to 1; the others run as ::avx512 at that level.
//
// A body may call nothing but its own namespace, compiler builtins, intrinsics and C library functions. A function from
// a standard header instantiated in here could be emitted with AVX-512 instructions and then be merged by the linker
// with the copy that baseline code calls.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

#if PPO_FAST_X86
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined pass-through operand inside its own intrinsics for a mistake of ours.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define PPO_FAST_BF16_DOT 0
#define PPO_FAST_ISA 0
namespace ppo_fast::portable {
#include PPO_FAST_BODY
}
#undef PPO_FAST_ISA

#if PPO_FAST_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define PPO_FAST_ISA 1
namespace ppo_fast::avx2 {
#include PPO_FAST_BODY
}
#undef PPO_FAST_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define PPO_FAST_ISA 2
namespace ppo_fast::avx512 {
#include PPO_FAST_BODY
}
#undef PPO_FAST_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#ifdef PPO_FAST_WANTS_BF16
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#endif
#undef PPO_FAST_BF16_DOT
#define PPO_FAST_BF16_DOT 1
#define PPO_FAST_ISA 2
namespace ppo_fast::avx512_bf16 {
#include PPO_FAST_BODY
}
#undef PPO_FAST_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // PPO_FAST_WANTS_BF16

#endif  // PPO_FAST_X86

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#undef PPO_FAST_BF16_DOT
#undef PPO_FAST_WANTS_BF16
#undef PPO_FAST_BODY
