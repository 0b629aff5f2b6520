// whiten: (x - mean) / max(std, 1e-8) of the live tokens of [B, T], from moments that are known; in double, rounded once.
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "whiten_tokens.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

constexpr double kMinStd = 1e-8;

template <class S> Tensor whiten_of(const Tensor& x_, const Tensor& mask_, const Tensor& moments_, bool shift_mean) {
  const int64_t B = x_.size(0), T = x_.size(1);
  const ScalarType dtype = scalar_type_of<S>;
  const S* x = data<S>(x_, "x", dtype, {B, T});
  const bool* mask = data<bool>(mask_, "mask", ScalarType::Bool, {B, T});
  const double* moments = data<double>(moments_, "moments", ScalarType::Double, {3});
  Tensor whitened = empty({B, T}, dtype);
  S* out = writable<S>(whitened);
  const double mean = moments[1] / moments[0], deviation = std::sqrt(moments[2] / moments[0]);
  // NaN passes, as it should: std::max returns its first argument then.
  const double scale = 1 / std::max(deviation, kMinStd), origin = shift_mean ? 0 : mean;
  const auto whiten_tokens = PPO_FAST_PICK(whiten_tokens<S>);
  parallel(B * T, 1, [&](int64_t begin, int64_t end) { whiten_tokens(x, mask, begin, end, mean, scale, origin, out); });
  return whitened;
}

Tensor whiten(Tensor x,        // [B, T]
              Tensor mask,     // [B, T] bool
              Tensor moments,  // [3] float64: count, sum, sum of squared deviations from the mean
              bool shift_mean) {
  check(x.dim() == 2, "x", "[B, T]");
  const auto op = x.scalar_type() == ScalarType::Double ? &whiten_of<double> : &whiten_of<float>;
  return op(x, mask, moments, shift_mean);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("whiten", TORCH_BOX(&whiten)); }

}  // namespace ppo_fast
