// The body of ppo_loss.cpp for one instruction set: a run of tokens in one pass.
#include "vec.h"
#include "exp.h"
#include "ppo_token.h"
#include "token_run.h"

// Vectors that are added up in the dtype of the statistics before a sum goes on in double: widening all nine sums of
// every vector took as long as the rest of the pass.
constexpr int kChain = 8;

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
  while (run.more()) {
    V chain[kPpoSums - 1] = {};
    for (int length = 0; length < kChain && run.more(); ++length, run.next()) {
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
      if (a.d_entropy) store_n<V>(a.d_entropy + i, s.entropy_in_loss ? -s.entropy_coef * weight : splat<V>(0), n);

      count = count + (live ? splat<V>(1) : splat<V>(0));
      flat = flat + t.flat;
      outside = outside + t.outside;
      chain[1] = chain[1] + t.surrogate;
      chain[4] = chain[4] + t.ratio_minus_1;
      chain[5] = chain[5] + t.ratio_minus_1 * t.ratio_minus_1;
      chain[6] = chain[6] + t.k1;
      chain[7] = chain[7] + t.k2;
      chain[8] = chain[8] + t.k3;
      if (a.ref_logprobs) chain[9] = chain[9] + t.ref_kl;
      chain[10] = chain[10] + entropy;
      add(sum[11], weight * t.loss);
    }
    add(sum[1], chain[1]);
    for (int k = 4; k <= 10; ++k) add(sum[k], chain[k]);
  }
  add(sum[0], count);
  add(sum[2], flat);
  add(sum[3], outside);
  for (int k = 0; k < kPpoSums; ++k) sums[k] = total(sum[k]);
}
