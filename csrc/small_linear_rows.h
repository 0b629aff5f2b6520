// The body of small_linear.cpp for one instruction set: a few rows against rows of the weight.
#include "vec.h"
#include "fetch_ahead.h"

#if PPO_FAST_ISA == 2 || defined(__aarch64__)
constexpr int kTileRows = 6, kTileFeatures = 4;  // 24 accumulators of 32 registers
constexpr int kTileRowsWidened = 4;              // where a step is two vectors of each operand
#else
constexpr int kTileRows = 3, kTileFeatures = 3;  // 9 of 16
constexpr int kTileRowsWidened = 2;
#endif
static_assert(kFeatures % kTileFeatures == 0);
// Chains of additions are cut here, in steps: as short as where torch multiplies one row.
constexpr int64_t kChain = 64;

// A vector that several multiply-adds share. Left alone, GCC reads it from memory for each of them.
template <class V> PPO_FAST_FN V in_register(V x) {
#if PPO_FAST_ISA == 2
  asm("" : "+v"(x));
#elif PPO_FAST_ISA == 1
  asm("" : "+x"(x));
#endif
  return x;
}

// How a dot product advances: by `size` elements, of a weight in memory as T, of x in memory as X. Here by one vector
// of each.
template <class T, class R> struct Whole {
  using X = T;
  using Row = R;
  static constexpr int64_t size = sizeof(R) / sizeof(T);
  static constexpr int rows = kTileRows;
  R w;
  PPO_FAST_METHOD void read(const T* p) { w = load<R>(p); }
  static PPO_FAST_METHOD R row(const X* p) { return in_register(load<R>(p)); }
};
template <class T> struct Plain : Whole<T, std::conditional_t<sizeof(T) == 8, vd, vf>> {
  using V = typename Plain::Row;
  PPO_FAST_METHOD V madd(V c, V x) const {
    if constexpr (sizeof(T) == 8) {
      return c + x * this->w;
    } else {
      return fma(x, this->w, c);
    }
  }
};
// 16-bit weights are widened as they are read, x beforehand (widen_rows).
template <class T> struct Widened {
  using X = float;
  using V = vf;
  struct Row {
    vf a, b;
  };
  static constexpr int64_t size = 2 * W;
  static constexpr int rows = kTileRowsWidened;
  vf a, b;
  PPO_FAST_METHOD void read(const T* p) { load2(p, a, b); }
  static PPO_FAST_METHOD Row row(const X* p) { return {in_register(load<vf>(p)), in_register(load<vf>(p + W))}; }
  PPO_FAST_METHOD V madd(V c, Row x) const { return fma(x.b, b, fma(x.a, a, c)); }
};
#if PPO_FAST_BF16_DOT
// Two products a lane; they are exact in float32, and so is the accumulator.
template <class T> struct Paired : Whole<T, vu> {
  using V = vf;
  PPO_FAST_METHOD vf madd(vf c, vu x) const { return _mm512_dpbf16_ps(c, (__m512bh)x, (__m512bh)this->w); }
};
#endif

// n elements of a row to float32, in the order of Widened, zeros up to a whole vector pair.
template <class T> static void widen_row(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 2 * W, out += 2 * W) {
    vf a, b;
    load_rest(x + i, n - i, a, b);
    store(out, a);
    store(out + W, b);
  }
}

// Sums of lanes: halves of a vector together until there are 16 bytes.
typedef float v4 __attribute__((vector_size(16)));
typedef double v2 __attribute__((vector_size(16)));
template <class V> PPO_FAST_FN auto fold(V x) {
  if constexpr (sizeof(V) == 16) {
    return x;
  } else {
    typedef std::decay_t<decltype(x[0])> Half __attribute__((vector_size(sizeof(V) / 2)));
    Half halves[2];
    __builtin_memcpy(halves, &x, sizeof(x));
    return fold<Half>(halves[0] + halves[1]);
  }
}
PPO_FAST_FN v4 four_sums(v4 a, v4 b, v4 c, v4 d) {
  const v4 ab = v4{a[0], b[0], a[1], b[1]} + v4{a[2], b[2], a[3], b[3]};
  const v4 cd = v4{c[0], d[0], c[1], d[1]} + v4{c[2], d[2], c[3], d[3]};
  return v4{ab[0], ab[1], cd[0], cd[1]} + v4{ab[2], ab[3], cd[2], cd[3]};
}

// The accumulators of MR rows and NF features, lane by lane.
template <class V, int MR, int NF> struct Tile {
  V c[MR][NF];

  PPO_FAST_METHOD void clear() {
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < NF; ++j) c[i][j] = V{};
    }
  }

  template <class Step, class T>
  PPO_FAST_METHOD void add_steps(const typename Step::X* x, int64_t x_row, const T* w, int64_t w_row, int64_t count,
                                 Ahead* ahead) {
    for (int64_t k = 0; k < count;) {
      const int64_t stop = count - k < 16 ? count : k + 16;
      if (ahead) fetch_ahead(*ahead);
      for (; k < stop; ++k) {
        Step at[NF];
#pragma GCC unroll 4
        for (int j = 0; j < NF; ++j) at[j].read(w + j * w_row + k * Step::size);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
          const auto row = Step::row(x + i * x_row + k * Step::size);
#pragma GCC unroll 4
          for (int j = 0; j < NF; ++j) c[i][j] = at[j].madd(c[i][j], row);
        }
      }
    }
  }

  // Adds the products of rows from `row` and features from `feature` on.
  template <class Step, class T>
  PPO_FAST_METHOD void add(const Factors<typename Step::X, T>& factors, int64_t row, int64_t feature, Ahead* ahead) {
    const int64_t x_row = factors.x_row, w_row = factors.weight_row;
    const auto* x = factors.x + row * x_row;
    const T* w = factors.weight + feature * w_row;
    const int64_t steps = factors.depth / Step::size, rest = factors.depth % Step::size;
    for (int64_t k = 0; k < steps; k += kChain) {
      const int64_t count = steps - k < kChain ? steps - k : kChain;
      if (k == 0) {
        add_steps<Step, T>(x, x_row, w, w_row, count, ahead);
        continue;
      }
      V before[MR][NF];
      __builtin_memcpy(before, c, sizeof(c));
      clear();
      add_steps<Step, T>(x + k * Step::size, x_row, w + k * Step::size, w_row, count, ahead);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < NF; ++j) c[i][j] += before[i][j];
      }
    }
    if (rest) {
      T last[NF][Step::size] = {};
      for (int j = 0; j < NF; ++j) {
        __builtin_memcpy(last[j], w + j * w_row + steps * Step::size, static_cast<size_t>(rest) * sizeof(T));
      }
      add_steps<Step, T>(x + steps * Step::size, x_row, last[0], Step::size, 1, nullptr);
    }
  }

  template <class S> PPO_FAST_METHOD void put_sums(S* sums) const {
    if constexpr (sizeof(S) == 8) {
      for (int i = 0; i < MR * NF; ++i) {
        const v2 two = fold(c[i / NF][i % NF]);
        sums[i / NF * kSumsRow + i % NF] = two[0] + two[1];
      }
    } else {
      v4 folded[(MR * NF + 3) / 4 * 4] = {};
#pragma GCC unroll 32
      for (int i = 0; i < MR * NF; ++i) folded[i] = fold(c[i / NF][i % NF]);
      float flat[(MR * NF + 3) / 4 * 4];
#pragma GCC unroll 8
      for (int i = 0; i < MR * NF; i += 4) {
        const v4 four = four_sums(folded[i], folded[i + 1], folded[i + 2], folded[i + 3]);
        __builtin_memcpy(flat + i, &four, sizeof(four));
      }
      for (int i = 0; i < MR * NF; ++i) sums[i / NF * kSumsRow + i % NF] = flat[i];
    }
  }
};

template <class Step, int MR, int NF, class T, class S>
static __attribute__((noinline)) void one_tile(const Factors<typename Step::X, T>& main, const Factors<S, S>& extra,
                                               int64_t row, int64_t feature, S* sums, Ahead* ahead) {
  Tile<typename Step::V, MR, NF> tile;
  tile.clear();
  tile.template add<Step>(main, row, feature, ahead);
  if (extra.depth) tile.template add<Plain<S>>(extra, row, feature, nullptr);
  tile.put_sums(sums);
}

// one_tile for a height that is known at run time alone.
template <class Step, int NF, int MR, class T, class S>
PPO_FAST_FN void tile_of(int64_t height, const Factors<typename Step::X, T>& main, const Factors<S, S>& extra,
                         int64_t row, int64_t feature, S* sums, Ahead* ahead) {
  if constexpr (MR > 1) {
    if (height < MR) return tile_of<Step, NF, MR - 1>(height, main, extra, row, feature, sums, ahead);
  }
  one_tile<Step, MR, NF>(main, extra, row, feature, sums, ahead);
}

// Rows [first, first + rows) and NF features, in as few tiles as there can be, of equal height, while the features
// after them are fetched, up to `stop`.
template <class Step, int NF, class T, class S>
PPO_FAST_FN void some_features(const Factors<typename Step::X, T>& main, const Factors<S, S>& extra, int64_t first,
                               int64_t rows, int64_t feature, int64_t stop, S* sums) {
  const int64_t tiles = (rows + Step::rows - 1) / Step::rows;
  const int64_t next = feature + NF, until = stop - next < kTileFeatures ? stop : next + kTileFeatures;
  const int64_t bytes = (until - next) * main.weight_row * static_cast<int64_t>(sizeof(T));
  const int64_t steps = tiles * ((main.depth / Step::size + 15) / 16) + 1;
  const char* from = reinterpret_cast<const char*>(main.weight + next * main.weight_row);
  Ahead ahead{from, from + bytes, (bytes / 64 + steps) / steps};
  const bool dense = main.weight_row < 2 * main.depth;  // else most of what is fetched would be of no use
  for (int64_t r = 0, left = tiles; left > 0; --left) {
    const int64_t height = (rows - r + left - 1) / left;
    tile_of<Step, NF, Step::rows>(height, main, extra, first + r, feature, sums + r * kSumsRow, dense ? &ahead : nullptr);
    r += height;
  }
}

// `n` numbers rounded to their place in the output; whole vectors of x are read.
PPO_FAST_FN void put_rounded(float* out, const float* x, int64_t n) {
  __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(*x));
}
PPO_FAST_FN void put_rounded(double* out, const double* x, int64_t n) {
  __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(*x));
}
template <class T> PPO_FAST_FN void put_rounded(T* out, const float* x, int64_t n) {
  uint16_t rounded[kSumsRow];
  for (int64_t i = 0; i < kSumsRow; i += W) {
    const vf v = load_n<vf>(x + i, W);
    if constexpr (__is_same(T, torch::headeronly::BFloat16)) {
      const vu high = float_to_bfloat(v) >> 16;
      for (int l = 0; l < W; ++l) rounded[i + l] = static_cast<uint16_t>(high[l]);
    } else {
#if PPO_FAST_ISA == 2
      const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
      __builtin_memcpy(rounded + i, &half, sizeof(half));
#elif PPO_FAST_ISA == 1
      const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
      __builtin_memcpy(rounded + i, &half, sizeof(half));
#else
      const vu half = float_to_half(v);
      for (int l = 0; l < W; ++l) rounded[i + l] = static_cast<uint16_t>(half[l]);
#endif
    }
  }
  __builtin_memcpy(out, rounded, static_cast<size_t>(n) * sizeof(*rounded));
}

// Pieces [begin, end) of kFeatures for all rows.
template <class Step, class T, class S, class Out>
PPO_FAST_FN void in_steps(const SmallLinear<typename Step::X, T, S, Out>& a, int64_t begin, int64_t end) {
  alignas(64) S sums[kRowBlock * kSumsRow] = {};
  const int64_t stop = a.features < end * kFeatures ? a.features : end * kFeatures;
  for (int64_t feature = begin * kFeatures; feature < stop; feature += kFeatures) {
    const int64_t count = stop - feature < kFeatures ? stop - feature : kFeatures;
    for (int64_t row = 0; row < a.rows; row += kRowBlock) {
      const int64_t rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
      int64_t j = 0;
      for (; j + kTileFeatures <= count; j += kTileFeatures) {
        some_features<Step, kTileFeatures>(a.main, a.extra, row, rows, feature + j, stop, sums + j);
      }
      for (; j < count; ++j) some_features<Step, 1>(a.main, a.extra, row, rows, feature + j, stop, sums + j);
      for (int64_t r = 0; r < rows; ++r) {
        S* sum = sums + r * kSumsRow;
        if (a.bias) {
          for (int64_t i = 0; i < count; ++i) sum[i] += a.bias[feature + i];
        }
        put_rounded(a.out + (row + r) * a.features + feature, sum, count);
      }
    }
  }
}

template <class T, class Out> static void plain(const SmallLinear<T, T, T, Out>& a, int64_t begin, int64_t end) {
  in_steps<Plain<T>>(a, begin, end);
}
template <class T, class Out>
static void widened(const SmallLinear<float, T, float, Out>& a, int64_t begin, int64_t end) {
  in_steps<Widened<T>>(a, begin, end);
}
#if PPO_FAST_BF16_DOT
template <class T, class Out> static void paired(const SmallLinear<T, T, float, Out>& a, int64_t begin, int64_t end) {
  in_steps<Paired<T>>(a, begin, end);
}
#endif
