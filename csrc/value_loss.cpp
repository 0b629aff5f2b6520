// value_loss: the clipped value loss, its gradient and its statistics for [B, T] tokens in one pass.
//
// Pipeline: blocks of 4096 flat tokens -> vectors of tokens, masked inputs replaced by zero -> 1/2 max((V - R)^2,
// (clamp(V, V_old - c, V_old + c) - R)^2) -> gradient to memory, five sums to per-lane doubles -> blocks added in
// order.
//
// Numerics: clamping V itself makes the two squares equal to the bit inside the range, so that `clipped`, strictly
// larger, counts no rounding; there the gradient is V - R, and 0 where the clipped square is larger. Sums are double,
// in an order fixed by the shape: the same bits for any number of threads.
#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {

constexpr int kValueSums = 5;  // the four of VALUE_SUMS (ppo_fast/ops/value_loss.py) in order, then the weighted loss

template <class S> struct ValueLossArguments {
  const S* values;       // [B, T]
  const S* old_values;   // [B, T]
  const S* returns;      // [B, T]
  const bool* mask;      // [B, T]
  const S* row_weights;  // [B]
  int64_t T;
  bool clip;
  double clip_range;     // only with clip
  S* d_values;           // [B, T]
};

}  // namespace ppo_fast

#define PPO_FAST_BODY "value_loss_tokens.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

template <class S>
std::tuple<Tensor, Tensor, Tensor> value_loss_of(const Tensor& values, const Tensor& old_values, const Tensor& returns,
                                                 const Tensor& mask, const Tensor& row_weights,
                                                 std::optional<double> clip_range) {
  const int64_t B = values.size(0), T = values.size(1);
  const ScalarType dtype = scalar_type_of<S>;
  Tensor loss = empty({}, dtype), d_values = empty({B, T}, dtype), sums = empty({kValueSums - 1}, ScalarType::Double);
  ValueLossArguments<S> a{};
  a.values = data<S>(values, "values", dtype, {B, T});
  a.old_values = data<S>(old_values, "old_values", dtype, {B, T});
  a.returns = data<S>(returns, "returns", dtype, {B, T});
  a.mask = data<bool>(mask, "mask", ScalarType::Bool, {B, T});
  a.row_weights = data<S>(row_weights, "row_weights", dtype, {B});
  a.T = T;
  a.clip = clip_range.has_value();
  a.clip_range = clip_range.value_or(0);
  a.d_values = writable<S>(d_values);

  auto* tokens = &portable::value_loss_tokens<S>;
  if constexpr (std::is_same_v<S, float>) tokens = PPO_FAST_PICK(value_loss_tokens<float>);
  const std::vector<double> totals = sum_over_tokens<kValueSums>(
      B * T, [&](int64_t begin, int64_t end, double* partial) { tokens(a, begin, end, partial); });
  for (int k = 0; k < kValueSums - 1; ++k) writable<double>(sums)[k] = totals[static_cast<size_t>(k)];
  *writable<S>(loss) = static_cast<S>(totals[kValueSums - 1]);
  return {loss, d_values, sums};
}

std::tuple<Tensor, Tensor, Tensor> value_loss(Tensor values,       // [B, T]
                                              Tensor old_values,   // [B, T]
                                              Tensor returns,      // [B, T]
                                              Tensor mask,         // [B, T] bool
                                              Tensor row_weights,  // [B]
                                              std::optional<double> clip_range) {
  check(values.dim() == 2, "values", "[B, T]");
  const auto op = values.scalar_type() == ScalarType::Double ? &value_loss_of<double> : &value_loss_of<float>;
  return op(values, old_values, returns, mask, row_weights, clip_range);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("value_loss", TORCH_BOX(&value_loss)); }

}  // namespace ppo_fast
