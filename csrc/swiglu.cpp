// swiglu and swiglu_backward: silu(gate) * up, element by element in one pass, in float32 (float64 for float64), rounded
// once (ppo_fast/ops/swiglu.py).
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "swiglu_elements.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

constexpr int64_t kCost = 4;  // of an element, an exponential and a division, in elements touched

template <class T> const T* elements(const Tensor& x, const char* name, const Tensor& like) {
  check(x.is_cpu() && x.scalar_type() == like.scalar_type() && x.numel() == like.numel() && x.is_contiguous(), name,
        "contiguous, on the CPU, and of gate's dtype and size");
  return static_cast<const T*>(x.const_data_ptr());
}

Tensor swiglu(Tensor gate, Tensor up) {
  Tensor out = torch::stable::empty_like(gate);
  by_dtype(gate, "gate", [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T *from = elements<T>(gate, "gate", gate), *times = elements<T>(up, "up", gate);
    T* const to = writable<T>(out);
    const auto run = PPO_FAST_PICK(swiglu_elements<T>);
    parallel(gate.numel(), kCost, [&](int64_t begin, int64_t end) {
      run(from + begin, times + begin, end - begin, to + begin);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> swiglu_backward(Tensor grad_, Tensor gate_, Tensor up_) {
  Tensor d_gate_ = torch::stable::empty_like(gate_), d_up_ = torch::stable::empty_like(gate_);
  by_dtype(gate_, "gate", [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T* const grad = elements<T>(grad_, "grad", gate_);
    const T *gate = elements<T>(gate_, "gate", gate_), *up = elements<T>(up_, "up", gate_);
    T *const d_gate = writable<T>(d_gate_), *const d_up = writable<T>(d_up_);
    const auto run = PPO_FAST_PICK(swiglu_gradients<T>);
    parallel(gate_.numel(), kCost, [&](int64_t begin, int64_t end) {
      run(grad + begin, gate + begin, up + begin, end - begin, d_gate + begin, d_up + begin);
    });
  });
  return {d_gate_, d_up_};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}

}  // namespace ppo_fast
