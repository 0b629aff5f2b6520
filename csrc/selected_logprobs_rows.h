// The body of selected_logprobs.cpp for one instruction set: sums over a segment of a row, and its gradient.
#include "vec.h"
#include "exp.h"

// Raw elements, so that no conversion function of a library type is called in here.
template <class T> struct Raw {  // bfloat16, float16
  using type = uint16_t;
  static constexpr type minus_infinity = __is_same(T, torch::headeronly::Half) ? 0xfc00 : 0xff80;
};
template <> struct Raw<float> {
  using type = uint32_t;
  static constexpr type minus_infinity = 0xff800000u;
};
template <> struct Raw<double> {
  using type = uint64_t;
  static constexpr type minus_infinity = 0xfff0000000000000u;
};

// The last n < 2 * lanes elements, padded to a full step by -inf, whose exponential is 0.
template <class T, class V> PPO_FAST_FN void load2_tail(const T* p, int64_t n, V& a, V& b) {
  typename Raw<T>::type padded[2 * lanes<V>];
  for (int i = 0; i < 2 * lanes<V>; ++i) padded[i] = Raw<T>::minus_infinity;
  __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  load2(reinterpret_cast<const T*>(padded), a, b);
}

// The largest element, NaN apart; `nan` is set where there is one.
template <class T> static typename Scalar<typename Lanes<T>::type>::type largest(const T* x, int64_t n, bool& nan) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  V top = splat<V>(-__builtin_inf()), unordered = {};
  for (int64_t i = 0; i < n; i += step) {
    V a, b;
    if (i + step <= n) {
      load2(x + i, a, b);
    } else {
      load2_tail(x + i, n - i, a, b);
    }
    top = vmax(a, vmax(b, top));
    unordered = a == a ? unordered : splat<V>(1);
    unordered = b == b ? unordered : splat<V>(1);
  }
  nan = sum_lanes(unordered) > 0;
  return max_lanes(top);
}

// Whether a lane lies above the limit; NaN doesn't.
PPO_FAST_FN bool any_above(vf x, float limit) {
#if PPO_FAST_ISA >= 2
  return _mm512_cmp_ps_mask(x, splat<vf>(limit), _CMP_GT_OQ) != 0;
#elif PPO_FAST_ISA == 1
  return _mm256_movemask_ps(_mm256_cmp_ps(x, splat<vf>(limit), _CMP_GT_OQ)) != 0;
#else
  return max_lanes(x) > limit;
#endif
}
PPO_FAST_FN bool any_above(double x, double limit) { return x > limit; }

PPO_FAST_FN bool any_nan(vf x) {
#if PPO_FAST_ISA >= 2
  return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0;
#elif PPO_FAST_ISA == 1
  return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0;
#else
  const float total = (x[0] + x[1]) + (x[2] + x[3]);  // no two infinities of unlike sign among exponentials
  return total != total;
#endif
}
PPO_FAST_FN bool any_nan(double x) { return x != x; }

// Sums against a reference, made sums against one that is `drop` lower, which multiplies each term by `scale`.
PPO_FAST_FN void move_reference(WideSum<vf>& total, WideSum<vf>& weighted, double drop, double scale) {
  weighted.low = (weighted.low + total.low * drop) * scale;
  weighted.high = (weighted.high + total.high * drop) * scale;
  total.low *= scale;
  total.high *= scale;
}
PPO_FAST_FN void move_reference(WideSum<double>& total, WideSum<double>& weighted, double drop, double scale) {
  weighted.low = (weighted.low + total.low * drop) * scale;
  total.low *= scale;
}

// What a block is summed against.
template <class V> struct Against {
  V reference, ceiling;
  RowExp<V> k;
};

template <bool kEntropy, class V> PPO_FAST_FN void fold(V x, const Against<V>& against, V& total, V& weighted) {
  V d = x - against.reference;
  if constexpr (PPO_FAST_ISA < 2) d = vmin(against.ceiling, d);  // row_exp isn't made for more; NaN passes
  const V e = row_exp(d, against.k);
  total = total + e;
  if constexpr (kEntropy) weighted = fma(e, d, weighted);
}

// See RowSums. One pass with a lagging reference: a block is summed against a maximum of what came before it, and only
// if it holds something more than kSlack above is the reference raised and the block done again. No maximum is kept:
// such an element shows in the sum of its lane, and only where one is large does a second look at the block, by then in
// the nearest cache, tell a high element from many. One infinitely far above shows as NaN, which vmax may lose. Blocks
// start small, as early maxima rise often.
template <class T, bool kEntropy> static RowSums row_sums(const T* x, int64_t n, double temperature) {
  using V = typename Lanes<T>::type;
  using S = typename Scalar<V>::type;
  constexpr int64_t step = 2 * lanes<V>;
  constexpr S limit = 7;  // below exp(kSlack)
  Against<V> against = {{}, splat<V>(88 * temperature), row_exp_constants<V>(temperature)};
  const S slack = static_cast<S>(kSlack * temperature);

  S reference = static_cast<S>(-__builtin_inf());
  WideSum<V> all = {}, all_weighted = {};
  int64_t size = kFirstBlock;
  for (int64_t first = 0; first < n; first += size, size = 2 * size < kBlock ? 2 * size : kBlock) {
    const T* block = x + first;
    if (n - first < size) size = n - first;
    if (reference == static_cast<S>(-__builtin_inf())) {
      bool nan = false;
      reference = largest(block, size, nan);
      if (nan) return {0, __builtin_nan(""), __builtin_nan("")};
      if (reference == static_cast<S>(-__builtin_inf())) continue;  // nothing finite so far
    }
    for (;;) {
      against.reference = splat<V>(reference);
      V total0 = {}, total1 = {}, total2 = {}, total3 = {};  // four chains hide the latency of their additions
      V weighted0 = {}, weighted1 = {}, weighted2 = {}, weighted3 = {}, a, b;
      int64_t i = 0;
      for (; i + 2 * step <= size; i += 2 * step) {
        load2(block + i, a, b);
        fold<kEntropy>(a, against, total0, weighted0);
        fold<kEntropy>(b, against, total1, weighted1);
        load2(block + i + step, a, b);
        fold<kEntropy>(a, against, total2, weighted2);
        fold<kEntropy>(b, against, total3, weighted3);
      }
      for (; i < size; i += step) {
        if (i + step <= size) {
          load2(block + i, a, b);
        } else {
          load2_tail(block + i, size - i, a, b);
        }
        fold<kEntropy>(a, against, total0, weighted0);
        fold<kEntropy>(b, against, total1, weighted1);
      }
      const V sum = (total0 + total1) + (total2 + total3);
      if (any_above(vmax(vmax(total0, total1), vmax(total2, total3)), limit) || any_nan(sum)) {
        bool nan;  // which the sums hold already
        const S top = largest(block, size, nan);
        if (top > reference + slack) {
          const double drop = static_cast<double>(reference) - static_cast<double>(top);
          move_reference(all, all_weighted, drop, ::exp(drop / temperature));
          reference = top;
          continue;
        }
      }
      add(all, sum);
      if constexpr (kEntropy) add(all_weighted, (weighted0 + weighted1) + (weighted2 + weighted3));
      break;
    }
  }
  return {static_cast<double>(reference), total(all), total(all_weighted)};
}

template <class V> struct GradientConstants {
  V reference, constant, slope;
  RowExp<V> k;
};

template <class V> PPO_FAST_FN V gradient_of(V x, const GradientConstants<V>& g) {
  V d = x - g.reference;
  const V e = row_exp(d, g.k);
  return e * fma(g.slope, d, g.constant);
}

// `count` elements, fewer than a step.
template <class T, class V> PPO_FAST_FN void gradient_partial(const T* x, T* out, int64_t count,
                                                              const GradientConstants<V>& g) {
  typename Raw<T>::type padded[2 * lanes<V>];
  V a, b;
  load2_tail(x, count, a, b);
  store2<false>(reinterpret_cast<T*>(padded), gradient_of(a, g), gradient_of(b, g));
  __builtin_memcpy(static_cast<void*>(out), padded, static_cast<size_t>(count) * sizeof(T));
}

// See RowGradient. `out` may be x. kStream writes past the caches.
template <class T, bool kStream> static void row_gradient(const T* x, T* out, int64_t n, const RowGradient& row) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  const GradientConstants<V> g = {splat<V>(row.reference), splat<V>(row.constant), splat<V>(row.slope),
                                  row_exp_constants<V>(row.temperature)};
  int64_t i = 0;
  if constexpr (kStream) {
    constexpr uintptr_t alignment = 4 * W;
    const uintptr_t past = reinterpret_cast<uintptr_t>(out) % alignment;
    const int64_t head = past == 0 ? 0 : static_cast<int64_t>((alignment - past) / sizeof(T));
    i = head < n ? head : n;
    if (i > 0) gradient_partial(x, out, i, g);
  }
  for (; i + step <= n; i += step) {
    V a, b;
    load2(x + i, a, b);
    store2<kStream>(out + i, gradient_of(a, g), gradient_of(b, g));
  }
  if (i < n) gradient_partial(x + i, out + i, n - i, g);
  if constexpr (kStream) stream_fence();
}
