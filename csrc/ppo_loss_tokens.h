// The body of ppo_loss.cpp for one instruction set: a run of tokens in one pass.
#include "vec.h"
#include "exp.h"
#include "ppo_token.h"
#include "token_run.h"

template <class S>
static void ppo_loss_tokens(const PpoLossArguments<S>& a, int64_t begin, int64_t end, double* sums) {
  using V = typename Lanes<S>::type;
  PpoSettings<V> s;
  s.low = splat<V>(a.low);
  s.high = splat<V>(a.high);
  s.dual_clip = splat<V>(a.dual_clip);
  s.cispo = a.cispo;
  s.entropy_in_loss = a.entropy != nullptr && a.entropy_coef != 0;
  s.kl_in_loss = a.ref_logprobs != nullptr && a.kl_coef != 0;
  s.entropy_coef = splat<V>(a.entropy_coef);
  s.kl_coef = splat<V>(a.kl_coef);
  s.kl_estimator = a.ref_logprobs ? a.kl_estimator : 1;  // all give 0 without a reference, and k3 takes an exponential

  V count = {}, flat = {}, outside = {};  // exact without widening: a run is shorter than 2^24
  WideSum<V> sum[kPpoSums] = {};
  TokenRun<V> run(a.row_weights, a.T, begin, end);
  for (; run.more(); run.next()) {
    const int64_t i = run.i, n = run.n;
    const auto live = load_mask_n<V>(a.mask + i, n);
    // Zeros in place of masked inputs make every sum below vanish there; the weight does it for the gradient.
    const V logprob = load_live_n<V>(live, a.logprobs + i, n);
    const V old = load_live_n<V>(live, a.old_logprobs + i, n);
    const V advantage = load_live_n<V>(live, a.advantages + i, n);
    const V entropy = a.entropy ? load_live_n<V>(live, a.entropy + i, n) : splat<V>(0);
    const V ref = a.ref_logprobs ? load_live_n<V>(live, a.ref_logprobs + i, n) : logprob;
    const PpoToken<V> t = ppo_token<V>(logprob, old, advantage, entropy, ref, s);
    const V weight = live ? run.weights() : splat<V>(0);
    store_n<V>(a.d_logprobs + i, weight * t.d_logprob, n);
    store_n<V>(a.log_ratios + i, -t.k1, n);
    if (a.d_entropy) store_n<V>(a.d_entropy + i, s.entropy_in_loss ? -s.entropy_coef * weight : splat<V>(0), n);

    count = count + (live ? splat<V>(1) : splat<V>(0));
    flat = flat + t.flat;
    outside = outside + t.outside;
    add(sum[1], t.surrogate);
    add(sum[4], t.ratio_minus_1);
    add(sum[5], t.ratio_minus_1 * t.ratio_minus_1);
    add(sum[6], t.k1);
    add(sum[7], t.k2);
    add(sum[8], t.k3);
    if (a.ref_logprobs) add(sum[9], t.ref_kl);
    if (a.entropy) add(sum[10], entropy);
    add(sum[11], weight * t.loss);
  }
  add(sum[0], count);
  add(sum[2], flat);
  add(sum[3], outside);
  for (int k = 0; k < kPpoSums; ++k) sums[k] = total(sum[k]);
}
