// ppo_loss: the clipped policy loss, its gradient and every statistic of [B, T] tokens in one pass.
//
// Pipeline: blocks of 4096 flat tokens -> vectors of tokens, masked inputs replaced by zero -> the mathematics of a
// token (ppo_token.h, the one place it stands in) -> gradient to memory; the terms of each lane added up in chains of eight, the chains and the weighted loss in double -> blocks added in order. Nothing is read twice.
//
// Numerics: a token is computed in the stat dtype; the ratio is within 1.5 ulp, and ratio - 1 and the k3 estimator
// keep full relative precision near ratio 1, where subtracting 1 from a float32 ratio would leave few digits. Chains
// are in the stat dtype, a sum of chains is double, in an order fixed by the shape: the same bits for any number of
// threads. A token's own result does not depend on its place in a vector.
#include <limits>

#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {

constexpr int kPpoSums = 12;  // the eleven of PPO_SUMS (ppo_fast/ops/ppo_loss.py) in order, then the weighted loss

template <class S> struct PpoLossArguments {
  const S* logprobs;      // [B, T]
  const S* old_logprobs;  // [B, T]
  const S* advantages;    // [B, T]
  const bool* mask;       // [B, T]
  const S* row_weights;   // [B]
  const S* entropy;       // [B, T] or null
  const S* ref_logprobs;  // [B, T] or null
  int64_t T;
  double low, high;       // 1 - clip_low, 1 + clip_high in double, rounded to S by the kernel
  double dual_clip;       // infinity without
  bool cispo;
  double entropy_coef, kl_coef;
  int kl_estimator;
  S* d_logprobs;          // [B, T]
  S* d_entropy;           // [B, T] or null
};

}  // namespace ppo_fast

#define PPO_FAST_BODY "ppo_loss_tokens.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

template <class S>
std::tuple<Tensor, Tensor, Tensor, Tensor> ppo_loss_of(
    const Tensor& logprobs, const Tensor& old_logprobs, const Tensor& advantages, const Tensor& mask,
    const Tensor& row_weights, const std::optional<Tensor>& entropy, const std::optional<Tensor>& ref_logprobs,
    double clip_low, double clip_high, std::optional<double> dual_clip, int64_t objective, double entropy_coef,
    double kl_coef, int64_t kl_estimator) {
  const int64_t B = logprobs.size(0), T = logprobs.size(1);
  const ScalarType dtype = scalar_type_of<S>;
  Tensor loss = empty({}, dtype), d_logprobs = empty({B, T}, dtype), sums = empty({kPpoSums - 1}, ScalarType::Double);
  Tensor d_entropy = entropy.has_value() ? empty({B, T}, dtype) : empty({0}, dtype);
  check(objective == 0 || objective == 1, "objective", "0 (PPO) or 1 (CISPO)");
  check(kl_estimator >= 1 && kl_estimator <= 3, "kl_estimator", "1, 2 or 3");
  PpoLossArguments<S> a{};
  a.logprobs = data<S>(logprobs, "logprobs", dtype, {B, T});
  a.old_logprobs = data<S>(old_logprobs, "old_logprobs", dtype, {B, T});
  a.advantages = data<S>(advantages, "advantages", dtype, {B, T});
  a.mask = data<bool>(mask, "mask", ScalarType::Bool, {B, T});
  a.row_weights = data<S>(row_weights, "row_weights", dtype, {B});
  a.entropy = optional_data<S>(entropy, "entropy", dtype, {B, T});
  a.ref_logprobs = optional_data<S>(ref_logprobs, "ref_logprobs", dtype, {B, T});
  a.T = T;
  a.low = 1.0 - clip_low;
  a.high = 1.0 + clip_high;
  a.dual_clip = dual_clip.value_or(std::numeric_limits<double>::infinity());
  a.cispo = objective == 1;
  a.entropy_coef = entropy_coef;
  a.kl_coef = kl_coef;
  a.kl_estimator = static_cast<int>(kl_estimator);
  a.d_logprobs = writable<S>(d_logprobs);
  a.d_entropy = entropy.has_value() ? writable<S>(d_entropy) : nullptr;

  auto* tokens = &portable::ppo_loss_tokens<S>;
  if constexpr (std::is_same_v<S, float>) tokens = PPO_FAST_PICK(ppo_loss_tokens<float>);
  const std::vector<double> totals = sum_over_tokens<kPpoSums>(
      B * T, [&](int64_t begin, int64_t end, double* partial) { tokens(a, begin, end, partial); });
  for (int k = 0; k < kPpoSums - 1; ++k) writable<double>(sums)[k] = totals[static_cast<size_t>(k)];
  *writable<S>(loss) = static_cast<S>(totals[kPpoSums - 1]);
  return {loss, d_logprobs, d_entropy, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ppo_loss(
    Tensor logprobs,                      // [B, T]
    Tensor old_logprobs,                  // [B, T]
    Tensor advantages,                    // [B, T]
    Tensor mask,                          // [B, T] bool
    Tensor row_weights,                   // [B]
    std::optional<Tensor> entropy,        // [B, T]
    std::optional<Tensor> ref_logprobs,   // [B, T]
    double clip_low, double clip_high, std::optional<double> dual_clip, int64_t objective, double entropy_coef,
    double kl_coef, int64_t kl_estimator) {
  check(logprobs.dim() == 2, "logprobs", "[B, T]");
  const auto op = logprobs.scalar_type() == ScalarType::Double ? &ppo_loss_of<double> : &ppo_loss_of<float>;
  return op(logprobs, old_logprobs, advantages, mask, row_weights, entropy, ref_logprobs, clip_low, clip_high,
            dual_clip, objective, entropy_coef, kl_coef, kl_estimator);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("ppo_loss", TORCH_BOX(&ppo_loss)); }

}  // namespace ppo_fast
