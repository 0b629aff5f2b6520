// The body of linear_head.cpp for one instruction set: vocabulary rows against panels of tokens.
#include "vec.h"
#include "exp.h"
#include "multiply.h"
#include "head_lanes.h"

// -------------------------------------------------------------------------------------------------------------- forward

template <class E, int NV, bool kStore> struct Score {
  using S = typename E::Stat;
  using V = typename Vectors<E>::Acc;
  static constexpr int panel = NV * kLanes<E>;
  const ScoreBlock<E>& x;
  Ahead& ahead;

  template <int MR> __attribute__((noinline)) void tile(int64_t i) const {
    V c[MR][NV];
    logits_tile(x, i, c, ahead);
    LaneSums<S>& sums = *x.sums;
    // The higher tile of a narrow panel is two of a wide one: a token's sums don't depend on how many others there are.
    constexpr int group = MR < kRows ? MR : kRows;
#pragma GCC unroll 2
    for (int j = 0; j < NV; ++j) {
      const int lane = j * kLanes<E>;
      const RowExp<V> k = lane_exp(load<V>(sums.scale + lane));
      V peak = load<V>(sums.peak + lane), total = load<V>(sums.total + lane), weighted = load<V>(sums.weighted + lane);
#pragma GCC unroll 2
      for (int first = 0; first < MR; first += group) {
        const V before = peak;
#pragma GCC unroll 12
        for (int r = first; r < first + group; ++r) peak = vmax(c[r][j], peak);  // NaN is left to the sums
        V drop = before - peak;
        const V rescale = row_exp(drop, k);
        weighted = fma(total, drop, weighted) * rescale;
        total = total * rescale;
#pragma GCC unroll 12
        for (int r = first; r < first + group; ++r) {
          V d = c[r][j] - peak;
          const V e = row_exp(d, k);
          total = total + e;
          weighted = fma(e, d, weighted);
          if constexpr (kStore) put_past_caches(x.logits + (i + r) * panel + lane, c[r][j]);
        }
      }
      store(sums.peak + lane, peak);
      store(sums.total + lane, total);
      store(sums.weighted + lane, weighted);
    }
    if (sums.next->id < x.first + i + MR) {
      S own[MR * panel];
      __builtin_memcpy(own, c, sizeof(own));
      for (; sums.next->id < x.first + i + MR; ++sums.next) {
        sums.target[sums.next->lane] = own[(sums.next->id - x.first - i) * panel + sums.next->lane];
      }
    }
  }
};

template <class E, int NV> static void score(const ScoreBlock<E>& x, Ahead& ahead) {
  if (x.logits) {
    over_rows<NV>(x.rows, Score<E, NV, true>{x, ahead});
    stream_fence();
  } else {
    over_rows<NV>(x.rows, Score<E, NV, false>{x, ahead});
  }
}

// ------------------------------------------------------------------------------------------------------------- backward

template <class E, int NV>
static void gradient(const GradientLanes<typename E::Stat>& g, int64_t rows, typename E::Stat cap,
                     typename E::Stat* out) {
  using S = typename E::Stat;
  using V = typename Vectors<E>::Acc;
  constexpr int panel = NV * kLanes<E>;
  V peak[NV], constant[NV], slope[NV];
  RowExp<V> k[NV];
  for (int j = 0; j < NV; ++j) {
    const int lane = j * kLanes<E>;
    peak[j] = load<V>(g.peak + lane);
    constant[j] = load<V>(g.constant + lane);
    slope[j] = load<V>(g.slope + lane);
    k[j] = lane_exp(load<V>(g.scale + lane));
  }
  const S uncap = cap == 0 ? S(0) : S(1) / cap;
  for (int64_t row = 0; row < rows; ++row, out += panel) {
    S gathered[panel];
    const S* logits = gathered;
    if (g.dense) {
      logits = g.logits[0] + row * g.stride[0];
    } else {
      for (int i = 0; i < panel; ++i) gathered[i] = g.logits[i][row * g.stride[i]];
    }
#pragma GCC unroll 2
    for (int j = 0; j < NV; ++j) {
      const V z = load<V>(logits + j * kLanes<E>);
      V d = z - peak[j];
      const V e = row_exp(d, k[j]);
      V x = e * fma(slope[j], d, constant[j]);
      if (cap != 0) {
        const V squashed = z * uncap;
        x = x * (S(1) - squashed * squashed);
      }
      store(out + j * kLanes<E>, x);
    }
  }
}

// Columns whose weights are copied side by side before they meet the panels: in place, the rows of a block lie a page
// apart and often in few sets of the first-level cache.
constexpr int kStrip = 16 * kRows;

template <class E, int NV> struct AddHidden {
  using S = typename E::Stat;
  using V = typename Vectors<E>::Acc;
  static constexpr int panel = NV * kLanes<E>;
  const typename E::Word* strip;     // [words][kStrip]
  const typename E::Word* gradient;  // [words][panel]
  int64_t words;
  S* out;                            // [columns of the strip][panel]
  bool add;
  Ahead& ahead;

  template <int MR> __attribute__((noinline)) void tile(int64_t column) const {
    V c[MR][NV];
    S* const sums = out + column * panel;
    for (int r = 0; r < MR * NV; ++r) __builtin_prefetch(sums + r * kLanes<E>, 1);
    product<E, MR, NV>(strip + column, 1, kStrip, gradient, words, c, &ahead);
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < NV; ++j) {
        S* p = sums + r * panel + j * kLanes<E>;
        store(p, add ? load<V>(p) + c[r][j] : c[r][j]);
      }
    }
  }
};

// out[k][column] = the words of rows along the vocabulary: single elements, or those of two neighbouring rows.
template <class Word>
PPO_FAST_FN void copy_strip(const Word* rows, int64_t stride, int64_t count, int64_t width, Word* out) {
  for (int64_t k = 0; k < count; ++k, rows += stride, out += kStrip) {
    if (width == kStrip) {
      __builtin_memcpy(out, rows, kStrip * sizeof(Word));  // a constant size compiles to vector moves
    } else {
      __builtin_memcpy(out, rows, static_cast<size_t>(width) * sizeof(Word));
    }
  }
}
#if PPO_FAST_BF16_DOT
PPO_FAST_FN vu two_rows(__m256i low, __m256i high) {
  return (vu)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
PPO_FAST_FN void copy_strip(const uint16_t* rows, int64_t stride, int64_t count, int64_t width, uint32_t* out) {
  for (int64_t k = 0; k < count; k += 2, rows += 2 * stride, out += kStrip) {
    const uint16_t* high = k + 1 < count ? rows + stride : nullptr;
    int64_t i = 0;
    for (; i + W <= width; i += W) {
      const __m256i none = {};
      store(out + i, two_rows(load<__m256i>(rows + i), high ? load<__m256i>(high + i) : none));
    }
    for (; i < width; ++i) out[i] = rows[i] | (high ? static_cast<uint32_t>(high[i]) << 16 : 0);
  }
}
#endif

template <class E> static void add_hidden(const HiddenProduct<E>& x, Ahead& ahead) {
  using Word = typename E::Word;
  constexpr int64_t wide = 2 * kLanes<E>;
  const int64_t words = (x.rows + E::per_word - 1) / E::per_word;
  alignas(64) Word strip[kMaxBlockRows / E::per_word * kStrip];
  for (int64_t column = 0; column < x.columns; column += kStrip) {
    const int64_t width = x.columns - column < kStrip ? x.columns - column : kStrip;
    copy_strip(x.weight + column, x.weight_row, x.rows, width, strip);
    for (int64_t p = 0; p < x.panels; ++p) {
      const Word* gradient = x.gradient + p * x.gradient_panel;
      typename E::Stat* out = x.out + p * wide * x.columns;
      if (p + 1 < x.panels || x.last_vectors == 2) {
        const AddHidden<E, 2> job{strip, gradient, words, out + column * wide, x.add, ahead};
        over_rows<2>(width, job);
      } else {
        const AddHidden<E, 1> job{strip, gradient, words, out + column * kLanes<E>, x.add, ahead};
        over_rows<1>(width, job);
      }
    }
  }
}

template <class E> struct AddWeight {
  using S = typename E::Stat;
  using V = typename Vectors<E>::Acc;
  static constexpr int panel = 2 * kLanes<E>;
  const WeightProduct<E>& x;
  Ahead& ahead;

  template <int MR> __attribute__((noinline)) void tile(int64_t row) const {
    const int64_t tokens = (x.panels - 1) * x.wide_words + x.last_words;
    for (int64_t column = 0; column < x.columns; column += panel) {
      V c[MR][2];
      S* out = x.out + row * x.out_row + column;
      for (int r = 0; r < MR; ++r) {
        __builtin_prefetch(out + r * x.out_row, 1);
        __builtin_prefetch(out + r * x.out_row + kLanes<E>, 1);
      }
#pragma GCC unroll 24
      for (int r = 0; r < MR; ++r) c[r][0] = c[r][1] = V{};
      const typename E::Word* gradient = x.gradient;
      const typename E::Word* hidden = x.hidden + column * tokens;
      for (int64_t p = 0; p < x.panels; ++p) {
        const int64_t words = p + 1 < x.panels ? x.wide_words : x.last_words;
        multiply<E, MR, 2>(gradient + row * words, words, 1, hidden, words, c, &ahead);
        gradient += x.panel_rows * words;
        hidden += words * panel;
      }
      const int64_t width = x.columns - column < panel ? x.columns - column : panel;
      if (width == panel) {
#pragma GCC unroll 24
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            S* p = out + r * x.out_row + j * kLanes<E>;
            store(p, load<V>(p) + c[r][j]);
          }
        }
      } else {
        S sums[MR * panel];
        __builtin_memcpy(sums, c, sizeof(sums));
        for (int r = 0; r < MR; ++r) {
          for (int64_t i = 0; i < width; ++i) out[r * x.out_row + i] += sums[r * panel + i];
        }
      }
    }
  }
};

template <class E> static void add_weight(const WeightProduct<E>& x, Ahead& ahead) {
  over_rows<2>(x.rows, AddWeight<E>{x, ahead});
}

// --------------------------------------------------------------------------------------------------------------- tables

template <class E> static HeadKernels<E> head_kernels() {
  return {kLanes<E>,
          {&score<E, 1>, &score<E, 2>},
          &join_block<E>,
          {&gradient<E, 1>, &gradient<E, 2>},
          &add_hidden<E>,
          &add_weight<E>};
}

#if PPO_FAST_BF16_DOT
// A gradient [rows][panel] rounded, the elements of two rows in a word: out[k][token]; zero past the last row.
static void pair_gradient_rows(const float* gradient, int64_t rows, int64_t panel, uint32_t* out) {
  for (int64_t row = 0; row < rows; row += 2, out += panel) {
    const float* low = gradient + row * panel;
    for (int64_t i = 0; i < panel; i += W) {
      const __m512 a = _mm512_loadu_ps(low + i);
      const __m512 b = row + 1 < rows ? _mm512_loadu_ps(low + panel + i) : __m512{};
      store(out + i, two_rows((__m256i)_mm512_cvtneps_pbh(a), (__m256i)_mm512_cvtneps_pbh(b)));
    }
  }
}

// `count` floats, a multiple of the lanes, rounded in their order.
static void pair_gradient_tokens(const float* gradient, int64_t count, uint32_t* out) {
  for (int64_t i = 0; i < count; i += W) {
    store(out + i / 2, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(gradient + i)));
  }
}
#endif
