// The register tile under every matrix product of ours: c[i][j] += sum over k of a(i, k) * b(k, j), where a(i, k) is one
// scalar, broadcast, and b(k, j) a vector. Included after vec.h, inside a namespace of for_each_isa.h: no include guard.
//
// c stays in registers: kRows x 2 accumulators leave room for two vectors of b and one broadcast, and their number
// hides the latency of the multiply-add. With one vector to a row there are twice as many rows.

#include "fetch_ahead.h"

// Scalars to an operand's memory word, and the vectors made of them; the tags stand in elements.h.
template <class E> struct Vectors;
template <> struct Vectors<Single> {
  using Acc = vf;
  using B = vf;
};
template <> struct Vectors<Double> {
  using Acc = vd;
  using B = vd;
};
#if PPO_FAST_BF16_DOT
template <> struct Vectors<Bf16Pair> {
  using Acc = vf;
  using B = vu;
};
#endif

template <class E> constexpr int kLanes = sizeof(typename Vectors<E>::Acc) / sizeof(typename E::Stat);

#if PPO_FAST_ISA == 2 || defined(__aarch64__)
constexpr int kRows = 12;  // 32 vector registers
#else
constexpr int kRows = 6;  // 16
#endif
template <int NV> constexpr int kTileRows = NV == 1 ? 2 * kRows : kRows;

PPO_FAST_FN vf madd(Single, vf c, float a, vf b) {
#if PPO_FAST_ISA == 2
  return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c);
#elif PPO_FAST_ISA == 1
  return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
#else
  return fma(a - vf{}, b, c);
#endif
}
PPO_FAST_FN vd madd(Double, vd c, double a, vd b) { return c + a * b; }
#if PPO_FAST_BF16_DOT
// Two products a lane; they are exact in float32, and so is the accumulator.
PPO_FAST_FN vf madd(Bf16Pair, vf c, uint32_t a, vu b) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#endif

// a(i, k) = a[i * row + k * step]; b is `count` times NV vectors one after the other.
template <class E, int MR, int NV>
PPO_FAST_FN void multiply(const typename E::Word* a, int64_t row, int64_t step, const typename E::Lane* b,
                          int64_t count, typename Vectors<E>::Acc (&c)[MR][NV], Ahead* ahead) {
  for (int64_t k = 0; k < count;) {
    const int64_t stop = count - k < 16 ? count : k + 16;
    if (ahead) fetch_ahead(*ahead);
    for (; k < stop; ++k) {
      using B = typename Vectors<E>::B;
      B vectors[NV];
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) vectors[j] = load<B>(b + (k * NV + j) * kLanes<E>);
      const typename E::Word* scalars = a + k * step;
#pragma GCC unroll 24
      for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < NV; ++j) c[i][j] = madd(E{}, c[i][j], scalars[i * row], vectors[j]);
      }
    }
  }
}

// Chains of additions are cut here, so that their rounding errors don't grow with the length of a dot product.
constexpr int64_t kChain = 256;

// The same from zero, for any count.
template <class E, int MR, int NV>
PPO_FAST_FN void product(const typename E::Word* a, int64_t row, int64_t step, const typename E::Lane* b, int64_t count,
                         typename Vectors<E>::Acc (&c)[MR][NV], Ahead* ahead) {
#pragma GCC unroll 24
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < NV; ++j) c[i][j] = typename Vectors<E>::Acc{};
  }
  multiply<E, MR, NV>(a, row, step, b, count < kChain ? count : kChain, c, ahead);
  for (int64_t k = kChain; k < count; k += kChain) {
    typename Vectors<E>::Acc before[MR][NV];
    __builtin_memcpy(before, c, sizeof(before));
#pragma GCC unroll 24
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) c[i][j] = typename Vectors<E>::Acc{};
    }
    const int64_t rest = count - k < kChain ? count - k : kChain;
    multiply<E, MR, NV>(a + k * step, row, step, b + k * NV * kLanes<E>, rest, c, ahead);
#pragma GCC unroll 24
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) c[i][j] += before[i][j];
    }
  }
}

// job.tile<MR>(first row) over all rows: kTileRows at a time, kRows, then 4, then 1.
template <int NV, class Job> PPO_FAST_FN void over_rows(int64_t rows, const Job& job) {
  int64_t i = 0;
  for (; i + kTileRows<NV> <= rows; i += kTileRows<NV>) job.template tile<kTileRows<NV>>(i);
  if (i + kRows <= rows) {
    job.template tile<kRows>(i);
    i += kRows;
  }
  for (; i + 4 <= rows; i += 4) job.template tile<4>(i);
  for (; i < rows; ++i) job.template tile<1>(i);
}

// 16-bit elements to float32.
template <class T> static void widen(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) store_n(out + i, n - i < W ? load1_n(x + i, n - i) : load1(x + i), n - i);
}
