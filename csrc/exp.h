// The two exponentials of the kernels. Included after vec.h, inside a namespace of for_each_isa.h: no include guard.
//
// row_exp: exp(d / T) over a row of logits, d = x - reference. In base 2, with log2(e) / T folded into one constant:
//   2^t, t = d * c, t = n + f with |f| <= 1/2, a polynomial of degree 5 in f with constant term exactly 1 (error
//   9.1e-8 relative, found by minimax; 1.1e-7 after rounding its coefficients), times 2^n. exp(0) is exactly 1.
//   Below AVX-512 n runs into the sign from d / T = 88.7 on; there row_exp is only for less.
//   AVX-512 has n in steps of 1/32, 2^n's fraction from a table, and a polynomial of degree 2 (5.4e-8 before rounding).
//   It grows to infinity, and is NaN for an infinite d alone.
// exp_terms: e^x, e^x - 1 and e^x - 1 - x for a log-ratio x. In base e: x = n ln2 + r with ln2 in two parts, whose
//   first product is exact with or without FMA; e^r - 1 = r + r^2 P(r), P of degree 5. Small x keeps full relative
//   precision in all three, so that KL estimator k3 neither cancels nor turns negative.

// Integers from the float32 mantissa: adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
constexpr float kRound = 12582912.0f;

// --------------------------------------------------------------------------------------------------------- row_exp

template <class V> struct RowExp;  // constants for one temperature

template <> struct RowExp<vf> {
  vf scale;  // log2(e) / T
  vf floor;  // where the exponential counts as zero
};
template <> struct RowExp<double> {
  double scale;  // 1 / T
  double floor;
};

#if PPO_FAST_ISA >= 2
// 2^(k / 32), rounded.
constexpr float kPowers[32] = {
    0x1p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f,
    0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f, 0x1.29e9ep+0f,
    0x1.306fep+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f, 0x1.44e086p+0f,
    0x1.4bfdaep+0f, 0x1.5342b6p+0f, 0x1.5ab07ep+0f, 0x1.6247ecp+0f,
    0x1.6a09e6p+0f, 0x1.71f75ep+0f, 0x1.7a1148p+0f, 0x1.82589ap+0f,
    0x1.8ace54p+0f, 0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f,
    0x1.ae89fap+0f, 0x1.b7f77p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f,
    0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f,
};
#endif

template <class V> PPO_FAST_FN RowExp<V> row_exp_constants(double temperature) {
  if constexpr (lanes<V> == 1) {
    return {1.0 / temperature, -745.2 * temperature};
  } else {
    // AVX-512 scales into float32's subnormals and past them to zero; elsewhere n stays a normal exponent.
    constexpr double lowest = PPO_FAST_ISA >= 2 ? -104.0 : -87.0;
    return {splat<V>(1.4426950408889634 / temperature), splat<V>(lowest * temperature)};
  }
}

// Cuts d off at the floor, so that d * exp(d) is 0 and not NaN at -inf; NaN passes.
#if PPO_FAST_ISA >= 2
PPO_FAST_FN vf row_exp(vf& d, const RowExp<vf>& k) {
  d = vmax(k.floor, d);
  const vf shifted = fma(d, k.scale, splat<vf>(393216));  // 1.5 * 2^18 leaves 5 bits for the fraction
  const vf n = shifted - splat<vf>(393216);
  const vf f = fma(d, k.scale, -n);
  const vf power =
      _mm512_permutex2var_ps(_mm512_loadu_ps(kPowers), bits<__m512i>(shifted), _mm512_loadu_ps(kPowers + 16));
  const vf p = fma(fma(f, splat<vf>(0x1.ebfbe0p-3), splat<vf>(0x1.62e584p-1)), f * power, power);
  return _mm512_scalef_ps(p, n);  // which takes the integer below n
}
#else
PPO_FAST_FN vf row_exp(vf& d, const RowExp<vf>& k) {
  d = vmax(k.floor, d);
  const vf shifted = d * k.scale + kRound;
  const vf n = shifted - kRound;
  const vf f = fma(d, k.scale, -n);  // exact product where there is an FMA
  vf p = splat<vf>(0x1.5bba14p-10);
  p = fma(p, f, splat<vf>(0x1.3cea88p-7));
  p = fma(p, f, splat<vf>(0x1.c6b752p-5));
  p = fma(p, f, splat<vf>(0x1.ebf9bcp-3));
  p = fma(p, f, splat<vf>(0x1.62e42ap-1));
  p = fma(p, f, splat<vf>(1));
  const vf e = bits<vf>(bits<vu>(p) + (bits<vu>(shifted) << 23));
  return d <= k.floor ? splat<vf>(0) : e;
}
#endif
PPO_FAST_FN double row_exp(double& d, const RowExp<double>& k) {
  d = vmax(k.floor, d);
  return d <= k.floor ? 0.0 : ::exp(d * k.scale);
}

// -------------------------------------------------------------------------------------------------------- exp_terms

template <class V> struct ExpTerms {
  V exp;        // e^x
  V minus_1;    // e^x - 1
  V minus_1_x;  // e^x - 1 - x, never negative
};

PPO_FAST_FN ExpTerms<vf> exp_terms(vf x) {
  const vf z = vmin(splat<vf>(89), vmax(splat<vf>(-104), x));  // 89 overflows to infinity, -104 underflows to 0
  const vf shifted = z * 1.44269504f + kRound;
  const vf n = shifted - kRound;
  vf r = fma(n, splat<vf>(-0x1.63p-1), z);
  r = fma(n, splat<vf>(0x1.bd0106p-13), r);
  vf p = splat<vf>(0x1.a072c4p-13);
  p = fma(p, r, splat<vf>(0x1.6d42dap-10));
  p = fma(p, r, splat<vf>(0x1.11114cp-7));
  p = fma(p, r, splat<vf>(0x1.5554eap-5));
  p = fma(p, r, splat<vf>(0x1.555556p-3));
  p = fma(p, r, splat<vf>(0.5));
  const vf tail = r * r * p;  // e^r - 1 - r
  const vf q = r + tail;      // e^r - 1
  // 2^n in two factors, since n runs from -150 to 128. The integer sits in shifted's low mantissa bits.
  const vi exponent = bits<vi>(shifted) - 0x4b400000;
  const vi half = exponent >> 1;
  const vf low = bits<vf>((half + 127) << 23), high = bits<vf>((exponent - half + 127) << 23);
  ExpTerms<vf> out;
  out.exp = fma(low, q, low) * high;
  const vf power = low * high;
  out.minus_1 = n > splat<vf>(24) ? out.exp : fma(power, q, power - 1.0f);
  out.minus_1_x = n == splat<vf>(0) ? tail : out.minus_1 - x;
  return out;
}
PPO_FAST_FN ExpTerms<double> exp_terms(double x) {
  const double m = ::expm1(x);
  // A Taylor series where m - x would cancel: its next term is below 1e-17 of the sum.
  const double tail = x * x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720)))));
  return {::exp(x), m, ::fabs(x) < 1e-3 ? tail : m - x};
}
