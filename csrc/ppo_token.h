// The PPO mathematics of one token: the only copy in C++. Included after exp.h, inside a namespace of for_each_isa.h:
// no include guard. V is a vector of float32 lanes or a double; every lane is a token. Conventions, ties among them,
// are those of ppo_token_terms in ppo_fast/ops/_eager.py.

// Settings of a loss, the same for every token.
template <class V> struct PpoSettings {
  V low, high;    // the clip interval of the ratio
  V dual_clip;    // +infinity without dual clip
  bool cispo;     // else PPO
  bool entropy_in_loss, kl_in_loss;
  V entropy_coef, kl_coef;
  int kl_estimator;  // 1, 2, 3
};

template <class V> struct PpoToken {
  V loss;         // surrogate - entropy_coef * entropy + kl_coef * ref_kl
  V d_logprob;    // its derivative; the one by the entropy is -entropy_coef
  V surrogate;
  V flat;         // 1 where the surrogate's derivative is zero by the clipping rule, else 0
  V outside;      // 1 where the ratio lies outside the interval (CISPO: above it), else 0
  V ratio_minus_1;
  V k1, k2, k3;   // of KL(old, new), from old - new
  V ref_kl;       // the chosen estimator of KL(new, reference)
};

// Without reference, pass ref = logprob; without entropy, 0.
template <class V> PPO_FAST_FN PpoToken<V> ppo_token(V logprob, V old, V advantage, V entropy, V ref,
                                                     const PpoSettings<V>& s) {
  const V zero = splat<V>(0), one = splat<V>(1);
  PpoToken<V> out;

  const V d = logprob - old;
  const ExpTerms<V> e = exp_terms(d);
  const V ratio = e.exp;
  const auto above = ratio > s.high, below = ratio < s.low;
  // A == 0 must give 0 where the ratio is infinite too: 0 * inf would be NaN. A NaN in d still passes.
  const auto silent = (advantage == zero) & (d == d);
  const V bounded = vmin(s.high, ratio);

  V derivative;
  if (s.cispo) {
    // -stop_gradient(min(ratio, high)) * A * logprob, never flat.
    const V weight = silent ? zero : bounded * advantage;
    out.surrogate = -weight * (silent ? zero : logprob);
    derivative = -weight;
    out.flat = zero;
    out.outside = above ? one : zero;
  } else {
    const auto too_far = (ratio > s.dual_clip) & (advantage < zero);
    const auto flat = (above & (advantage > zero)) | (below & (advantage < zero)) | too_far;
    const V clipped = too_far ? s.dual_clip : vmax(s.low, bounded);
    const V moving = -ratio * advantage;
    out.surrogate = (flat | silent) ? -clipped * advantage : moving;
    derivative = (flat | silent) ? zero : moving;
    out.flat = flat ? one : zero;
    out.outside = (above | below) ? one : zero;
  }
  out.loss = out.surrogate;
  if (s.entropy_in_loss) out.loss = out.loss - s.entropy_coef * entropy;

  const V d_ref = logprob - ref;
  V kl_slope = one;
  out.ref_kl = d_ref;
  if (s.kl_estimator == 2) {
    out.ref_kl = splat<V>(0.5) * d_ref * d_ref;
    kl_slope = d_ref;
  } else if (s.kl_estimator == 3) {
    const ExpTerms<V> k = exp_terms(-d_ref);
    out.ref_kl = k.minus_1_x;  // exp(-d) - 1 + d
    kl_slope = -k.minus_1;
  }
  if (s.kl_in_loss) {
    out.loss = out.loss + s.kl_coef * out.ref_kl;
    derivative = derivative + s.kl_coef * kl_slope;
  }
  out.d_logprob = derivative;

  out.ratio_minus_1 = e.minus_1;
  out.k1 = -d;
  out.k2 = splat<V>(0.5) * d * d;
  out.k3 = e.minus_1_x;
  return out;
}
