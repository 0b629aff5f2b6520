// The extension as a Python module, and the instruction-set level all kernels share.
//
// Importing ppo_fast._C needs no torch of its own; the kernels register themselves when the library is loaded, whether
// by import or by torch.ops.load_library, before or after Python defines their schemas.
#include <Python.h>

#include <atomic>

#include "isa.h"
#include "tensors.h"

#if PPO_FAST_X86
#include <cpuid.h>
#endif

namespace ppo_fast {
namespace {

Isa best_isa() {
#if PPO_FAST_X86
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return kPortable;
  const bool fma = ecx >> 12 & 1, osxsave = ecx >> 27 & 1, f16c = ecx >> 29 & 1;
  if (!fma || !osxsave || !f16c) return kPortable;
  // The operating system must save the wide registers as well: XCR0 bits 1-2 for AVX, 5-7 for AVX-512.
  unsigned xcr0, xcr0_high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  if ((xcr0 & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return kPortable;
  if (!(ebx >> 5 & 1)) return kPortable;  // AVX2
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((xcr0 & 0xe0) != 0xe0 || (ebx & avx512) != avx512) return kAvx2;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1) ? kAvx512Bf16 : kAvx512;
#else
  return kPortable;
#endif
}

std::atomic<int>& level() {
  static std::atomic<int> value{best_isa()};
  return value;
}

// Level -1 means the best this CPU has. Returns the level now in force.
int64_t set_isa(int64_t wanted) {
  const Isa best = best_isa();
  if (wanted < -1 || wanted > best) {
    throw std::invalid_argument("level must lie in [-1, " + std::to_string(best) +
                                "] on this CPU (0 portable, 1 avx2, 2 avx512, 3 avx512_bf16), got " + std::to_string(wanted));
  }
  level() = wanted == -1 ? best : static_cast<int>(wanted);
  return level();
}

}  // namespace

Isa current_isa() { return static_cast<Isa>(level().load(std::memory_order_relaxed)); }

STABLE_TORCH_LIBRARY_FRAGMENT(ppo_fast, m) { m.def("_set_isa(int level) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CompositeExplicitAutograd, m) { m.impl("_set_isa", TORCH_BOX(&set_isa)); }

}  // namespace ppo_fast

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() { return PyModule_Create(&module_definition); }
