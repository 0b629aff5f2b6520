// The body of value_loss.cpp for one instruction set: a run of tokens in one pass.
#include "vec.h"
#include "token_run.h"

template <class S>
static void value_loss_tokens(const ValueLossArguments<S>& a, int64_t begin, int64_t end, double* sums) {
  using V = typename Lanes<S>::type;
  const V zero = splat<V>(0), one = splat<V>(1), range = splat<V>(a.clip_range);

  LaneSums<V, kValueSums> total;
  TokenRun<V> run(a.row_weights, a.T, begin, end);
  for (; run.more(); run.next()) {
    const int64_t i = run.i, n = run.n;
    const auto live = load_mask_n<V>(a.mask + i, n);
    const V value = load_live_n<V>(live, a.values + i, n);
    const V old = load_live_n<V>(live, a.old_values + i, n);
    const V target = load_live_n<V>(live, a.returns + i, n);

    // V itself is clamped, not the difference: inside the range both squares are then equal to the bit.
    const V error = value - target;
    const V bounded_error = vmin(old + range, vmax(old - range, value)) - target;
    const V square = error * error, bounded_square = bounded_error * bounded_error;
    const auto clipped = bounded_square > square;
    const V loss = splat<V>(0.5) * (clipped ? bounded_square : square);
    const V weight = live ? run.weights() : zero;
    store_n<V>(a.d_values + i, weight * (clipped ? zero : error), n);

    total.add(0, live ? one : zero);
    total.add(1, loss);
    total.add(2, clipped ? one : zero);
    total.add(3, square);
    total.add(4, weight * loss);
  }
  total.store(sums);
}
