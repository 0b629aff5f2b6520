// Logits with a token to each lane of a vector: vocabulary rows times a panel of tokens, and the sums of a softmax.
// Included after multiply.h, inside a namespace of for_each_isa.h: no include guard.

// ------------------------------------------------------------------------------------- float64, a vector of it at a time

PPO_FAST_FN vd vmax(vd a, vd b) { return a > b ? a : b; }
template <> struct RowExp<vd> {
  vd scale, floor;
};
PPO_FAST_FN vd row_exp(vd& d, const RowExp<vd>& k) {
  d = vmax(k.floor, d);
  vd e;
  for (int i = 0; i < W / 2; ++i) e[i] = d[i] <= k.floor[i] ? 0.0 : ::exp(d[i] * k.scale[i]);
  return e;
}
PPO_FAST_FN vd fma(vd a, vd b, vd c) { return a * b + c; }
PPO_FAST_FN vf vtanh(vf x) {
  const vf m = exp_terms(x + x).minus_1;
  return x > splat<vf>(20) ? splat<vf>(1) : m / (m + 2.0f);
}
PPO_FAST_FN vd vtanh(vd x) {
  for (int i = 0; i < W / 2; ++i) x[i] = ::tanh(x[i]);
  return x;
}

// exp(scale * d) for lanes with scales of their own; see row_exp_constants.
PPO_FAST_FN RowExp<vf> lane_exp(vf scale) {
  constexpr float lowest = PPO_FAST_ISA == 2 ? -104.0f : -87.0f;
  return {scale * 1.44269504f, lowest / scale};
}
PPO_FAST_FN RowExp<vd> lane_exp(vd scale) { return {scale, -745.2 / scale}; }

// --------------------------------------------------------------------------------------------------------------- logits

// Rows [i, i + MR) of a block: the bare products, then bias and softcap.
template <class E, int MR, int NV>
PPO_FAST_FN void logits_tile(const LogitsBlock<E>& x, int64_t i, typename Vectors<E>::Acc (&c)[MR][NV], Ahead& ahead) {
  product<E, MR, NV>(x.weight + i * x.weight_row, x.weight_row, 1, x.hidden, x.words, c, &ahead);
  if (x.bias) {
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) c[r][j] += x.bias[i + r];
    }
  }
  if (x.cap != 0) {
    for (int r = 0; r < MR; ++r) {
      for (int j = 0; j < NV; ++j) c[r][j] = x.cap * vtanh(c[r][j] * x.into_cap);
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- sums

// Joins the sums of a block to those of the blocks before, in double.
template <class E> static void join_block(LaneSums<typename E::Stat>& sums, int64_t lanes) {
  using S = typename E::Stat;
  using V = typename Vectors<E>::Acc;
  for (int64_t lane = 0; lane < lanes; lane += kLanes<E>) {
    const V peak = load<V>(sums.peak + lane);
    V drop = load<V>(sums.joined_peak + lane) - peak;
    const V rescale = row_exp(drop, lane_exp(load<V>(sums.scale + lane)));
    store(sums.joined_peak + lane, peak);
    for (int i = 0; i < kLanes<E>; ++i) {
      double& total = sums.joined_total[lane + i];
      double& weighted = sums.joined_weighted[lane + i];
      weighted = (weighted + total * drop[i]) * rescale[i] + sums.weighted[lane + i];
      total = total * rescale[i] + sums.total[lane + i];
      sums.total[lane + i] = sums.weighted[lane + i] = S(0);
    }
  }
}
