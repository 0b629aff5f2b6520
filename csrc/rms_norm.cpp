// rms_norm and the gradient of its input: one row after the other, which stays in the first-level cache from its sum of
// squares to its result (ppo_fast/ops/rms_norm.py). Lanes add up in float32 (float64 for float64) a few numbers each,
// their sum and the root are double.
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "rms_norm_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

std::tuple<Tensor, Tensor> rms_norm(Tensor x_,      // [N, H]
                                    Tensor weight_,  // [H]
                                    double eps) {
  check(x_.dim() == 2, "x", "[N, H]");
  const int64_t N = x_.size(0), H = x_.size(1);
  const ScalarType dtype = x_.scalar_type();
  return by_dtype(x_, "x", [&](auto* null) -> std::tuple<Tensor, Tensor> {
    using T = std::remove_pointer_t<decltype(null)>;
    using S = StatOf<T>;
    const T *x = data<T>(x_, "x", dtype, {N, H}), *weight = data<T>(weight_, "weight", dtype, {H});
    Tensor y = empty({N, H}, dtype), rstd_ = empty({N}, scalar_type_of<S>);
    T* const out = writable<T>(y);
    S* const rstd = writable<S>(rstd_);
    const auto run = PPO_FAST_PICK(rms_norm_rows<T, S>);
    parallel(N, 2 * H, [&](int64_t begin, int64_t end) {
      run(x + begin * H, weight, end - begin, H, eps, out + begin * H, rstd + begin);
    });
    return {y, rstd_};
  });
}

Tensor rms_norm_backward(Tensor grad_,    // [N, H]
                         Tensor x_,       // [N, H]
                         Tensor weight_,  // [H]
                         Tensor rstd_) {  // [N]
  check(x_.dim() == 2, "x", "[N, H]");
  const int64_t N = x_.size(0), H = x_.size(1);
  const ScalarType dtype = x_.scalar_type();
  Tensor d_x = empty({N, H}, dtype);
  by_dtype(x_, "x", [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    using S = StatOf<T>;
    const T *grad = data<T>(grad_, "grad", dtype, {N, H}), *x = data<T>(x_, "x", dtype, {N, H});
    const T* const weight = data<T>(weight_, "weight", dtype, {H});
    const S* const rstd = data<S>(rstd_, "rstd", scalar_type_of<S>, {N});
    T* const out = writable<T>(d_x);
    const auto run = PPO_FAST_PICK(rms_norm_gradients<T, S>);
    parallel(N, 4 * H, [&](int64_t begin, int64_t end) {
      run(grad + begin * H, x + begin * H, weight, rstd + begin, end - begin, H, out + begin * H);
    });
  });
  return d_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace ppo_fast
