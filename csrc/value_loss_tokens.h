// The body of value_loss.cpp for one instruction set: a run of tokens in one pass.
#include "vec.h"
#include "token_run.h"

template <class S>
static void value_loss_tokens(const ValueLossArguments<S>& a, int64_t begin, int64_t end, double* sums) {
  using V = typename Lanes<S>::type;
  const V zero = splat<V>(0), one = splat<V>(1), range = splat<V>(a.clip_range);

  WideSum<V> sum[kValueSums] = {};
  TokenRun<V> run(a.row_weights, a.T, begin, end);
  for (; run.more(); run.next()) {
    const int64_t i = run.i, n = run.n;
    const auto live = load_mask_n<V>(a.mask + i, n);
    const V value = load_live_n<V>(live, a.values + i, n);
    const V old = load_live_n<V>(live, a.old_values + i, n);
    const V target = load_live_n<V>(live, a.returns + i, n);

    // V itself is clamped, not the difference: inside the range both squares are then equal to the bit.
    const V error = value - target;
    const V bounded_error = a.clip ? vmin(vmax(value, old - range), old + range) - target : error;
    const V square = error * error, bounded_square = bounded_error * bounded_error;
    const auto clipped = bounded_square > square;
    const auto unknown = bounded_error != bounded_error;  // NaN in old: it compares as not clipped
    const V loss = unknown ? bounded_error : splat<V>(0.5) * (clipped ? bounded_square : square);
    const V derivative = unknown ? bounded_error : clipped ? zero : error;
    const V weight = live ? run.weights() : zero;
    store_n<V>(a.d_values + i, weight * derivative, n);

    add(sum[0], live ? one : zero);
    add(sum[1], loss);
    add(sum[2], clipped ? one : zero);
    add(sum[3], square);
    add(sum[4], weight * loss);
  }
  for (int k = 0; k < kValueSums; ++k) sums[k] = total(sum[k]);
}
