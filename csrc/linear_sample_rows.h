// The body of linear_sample.cpp for one instruction set: blocks of logits, their softmax, and the few that matter.
#include "vec.h"
#include "exp.h"
#include "multiply.h"
#include "head_lanes.h"

// --------------------------------------------------------------------------------------------------------------- logits

template <class E, int NV> struct PutLogits {
  using S = typename E::Stat;
  static constexpr int panel = NV * kLanes<E>;
  const LogitsBlock<E>& x;
  S* out;
  Ahead& ahead;

  template <int MR> __attribute__((noinline)) void tile(int64_t i) const {
    typename Vectors<E>::Acc c[MR][NV];
    logits_tile(x, i, c, ahead);
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) store(out + (i + r) * panel + j * kLanes<E>, c[r][j]);
    }
  }
};

template <class E, int NV> static void put_logits(const LogitsBlock<E>& x, typename E::Stat* out, Ahead& ahead) {
  over_rows<NV>(x.rows, PutLogits<E, NV>{x, out, ahead});
}

// ---------------------------------------------------------------------------------------------------------------- masks

// The lanes where a < b, as bits.
PPO_FAST_FN uint32_t less(vf a, vf b) {
#if PPO_FAST_ISA == 2
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
#elif PPO_FAST_ISA == 1
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < W; ++i) mask |= static_cast<uint32_t>(a[i] < b[i]) << i;
  return mask;
#endif
}
PPO_FAST_FN uint32_t less(vd a, vd b) {
  uint32_t mask = 0;
  for (int i = 0; i < W / 2; ++i) mask |= static_cast<uint32_t>(a[i] < b[i]) << i;
  return mask;
}

// The lanes where a <= b doesn't hold: those where either is NaN too.
PPO_FAST_FN uint32_t not_at_most(vf a, vf b) {
#if PPO_FAST_ISA == 2
  return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ);
#elif PPO_FAST_ISA == 1
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)));
#else
  uint32_t mask = 0;
  for (int i = 0; i < W; ++i) mask |= static_cast<uint32_t>(!(a[i] <= b[i])) << i;
  return mask;
#endif
}
PPO_FAST_FN uint32_t not_at_most(vd a, vd b) {
  uint32_t mask = 0;
  for (int i = 0; i < W / 2; ++i) mask |= static_cast<uint32_t>(!(a[i] <= b[i])) << i;
  return mask;
}

PPO_FAST_FN Hit* put_hits(uint32_t mask, int64_t row, int64_t lane, Hit* hits) {
  for (; mask; mask &= mask - 1) {
    *hits++ = {static_cast<uint8_t>(row), static_cast<uint8_t>(lane + __builtin_ctz(mask))};
  }
  return hits;
}

// ---------------------------------------------------------------------------------------------------------------- noise

// Philox4x32-10 (Salmon et al., 2011) in every lane; driver and plain PyTorch have it once more.
PPO_FAST_FN void wide_product(vu a, uint32_t factor, vu& high, vu& low) {
#if PPO_FAST_ISA == 2
  const __m512i x = (__m512i)a, m = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512 even = _mm512_castsi512_ps(_mm512_mul_epu32(x, m));
  const __m512 odd = _mm512_castsi512_ps(_mm512_mul_epu32(_mm512_srli_epi64(x, 32), m));
  low = bits<vu>(_mm512_mask_moveldup_ps(even, 0xaaaa, odd));
  high = bits<vu>(_mm512_mask_movehdup_ps(odd, 0x5555, even));
#elif PPO_FAST_ISA == 1
  const __m256i x = (__m256i)a, m = _mm256_set1_epi32(static_cast<int>(factor));
  const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  for (int i = 0; i < W; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * factor;
    low[i] = static_cast<uint32_t>(product);
    high[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

struct Philox {
  vu seed[2], position[2];

  // The high words of tokens [4 * group, 4 * group + 4).
  PPO_FAST_METHOD void words(uint32_t group, vu (&out)[4]) const {
    vu a = vu{} + group, b = vu{}, c = position[0], d = position[1], k = seed[0], l = seed[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      vu high_a, low_a, high_c, low_c;
      wide_product(a, 0xd2511f53u, high_a, low_a);
      wide_product(c, 0xcd9e8d57u, high_c, low_c);
      a = high_c ^ b ^ k;
      b = low_c;
      c = high_a ^ d ^ l;
      d = low_a;
      k += 0x9e3779b9u;
      l += 0xbb67ae85u;
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
};

// The upper 24 bits of the first lanes.
template <class V> PPO_FAST_FN V upper_bits(vu word) {
  word >>= 8;
  if constexpr (__is_same(V, vf)) {
    return __builtin_convertvector(bits<vi>(word), vf);
  } else {
    V x;
    for (int i = 0; i < W / 2; ++i) x[i] = word[i];
    return x;
  }
}

// ----------------------------------------------------------------------------------------------------------------- race

template <class E, bool kNoisy>
PPO_FAST_FN Hit* race_lanes(const LogitsTile<typename E::Stat>& x, const RaceLanes<typename E::Stat>& race,
                            LaneSums<typename E::Stat>& sums, int64_t lane, Hit* hits) {
  using V = typename Vectors<E>::Acc;
  constexpr int64_t group = 4;
  const auto* logits = x.logits + lane;
  const V before = load<V>(sums.peak + lane);
  V peak = before;
  for (int64_t r = 0; r < x.rows; ++r) peak = vmax(load<V>(logits + r * x.panel), peak);  // NaN is left to the sums
  store(sums.peak + lane, peak);
  const V scale = load<V>(sums.scale + lane);
  const RowExp<V> k = lane_exp(scale);
  V total = load<V>(sums.total + lane), weighted = load<V>(sums.weighted + lane);
  V drop = before - peak;
  const V rescale = row_exp(drop, k);
  weighted = fma(total, drop, weighted) * rescale;
  total = total * rescale;

  // exp(scale * (peak - best)), cut off where it is beyond any noise. A thousandth more than all the rounding here.
  V lead = peak - load<V>(race.best + lane);
  const V most = (V{} + 80) / scale;
  lead = lead < most ? lead : most;
  const V limit = row_exp(lead, k) * typename E::Stat(1.001);

  const V factor = load<V>(race.factor + lane), offset = load<V>(race.offset + lane);
  Philox philox;
  if constexpr (kNoisy) {
    for (int i = 0; i < 2; ++i) {
      philox.seed[i] = load<vu>(race.seed[i] + lane);
      philox.position[i] = load<vu>(race.position[i] + lane);
    }
  }
  for (int64_t r = 0; r < x.rows; r += group) {
    vu words[group];
    if constexpr (kNoisy) philox.words(static_cast<uint32_t>((x.first + r) / group), words);
    const int64_t count = x.rows - r < group ? x.rows - r : group;
    for (int64_t i = 0; i < count; ++i) {
      V d = load<V>(logits + (r + i) * x.panel) - peak;
      const V e = row_exp(d, k);
      total = total + e;
      weighted = fma(e, d, weighted);
      V noise = offset;
      if constexpr (kNoisy) noise = noise + upper_bits<V>(words[i]) * factor;
      const uint32_t mask = less(noise, limit * e);
      if (__builtin_expect(mask != 0, 0)) hits = put_hits(mask, r + i, lane, hits);
    }
  }
  store(sums.total + lane, total);
  store(sums.weighted + lane, weighted);
  return hits;
}

template <class E>
static int64_t race_block(const LogitsTile<typename E::Stat>& x, const RaceLanes<typename E::Stat>& race,
                          LaneSums<typename E::Stat>& sums, Hit* hits) {
  Hit* end = hits;
  for (int64_t lane = 0; lane < x.panel; lane += kLanes<E>) {
    end = race.noisy ? race_lanes<E, true>(x, race, sums, lane, end) : race_lanes<E, false>(x, race, sums, lane, end);
  }
  return end - hits;
}

template <class E>
static int64_t above_floor(const LogitsTile<typename E::Stat>& x, const typename E::Stat* floor, Hit* hits) {
  using V = typename Vectors<E>::Acc;
  Hit* end = hits;
  for (int64_t lane = 0; lane < x.panel; lane += kLanes<E>) {
    const V limit = load<V>(floor + lane);
    for (int64_t r = 0; r < x.rows; ++r) {
      const uint32_t mask = not_at_most(load<V>(x.logits + r * x.panel + lane), limit);
      if (__builtin_expect(mask != 0, 0)) end = put_hits(mask, r, lane, end);
    }
  }
  return end - hits;
}

template <class E> static SampleKernels<E> sample_kernels() {
  return {kLanes<E>, {&put_logits<E, 1>, &put_logits<E, 2>}, &race_block<E>, &join_block<E>, &above_floor<E>};
}
