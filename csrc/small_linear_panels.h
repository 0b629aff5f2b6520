// The body of small_linear.cpp for one instruction set: a few rows against panels of output features.
#include "vec.h"
#include "multiply.h"

// Chains of additions as short as where torch multiplies one row, dot product by dot product.
constexpr int64_t kShortChain = 64;
// Words to a piece of a panel, at most: it stays in the first-level cache while all rows meet it.
constexpr int64_t kPiece = 256;

// One piece of a panel.
template <class E> struct PanelPiece {
  const typename E::Word* x;       // [rows][x_row]
  int64_t x_row;
  const typename E::Lane* weight;  // [words][kPanelLanes]
  int64_t words;
  typename E::Stat* sums;          // [rows][kPanelLanes]
  bool add;
};

template <class E, int MR>
static __attribute__((noinline)) void add_tile(const PanelPiece<E>& piece, int64_t first, Ahead* ahead) {
  using V = typename Vectors<E>::Acc;
  for (int64_t lane = 0; lane < kPanelLanes; lane += 2 * kLanes<E>) {
    V c[MR][2];
    product<E, MR, 2, kShortChain>(piece.x + first * piece.x_row, piece.x_row, 1, piece.weight + lane, piece.words, c,
                                   ahead, kPanelLanes);
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        typename E::Stat* p = piece.sums + (first + r) * kPanelLanes + lane + j * kLanes<E>;
        V sum = c[r][j];
        if (piece.add) {
          V before;
          __builtin_memcpy(&before, p, sizeof(before));
          sum = before + sum;
        }
        __builtin_memcpy(p, &sum, sizeof(sum));
      }
    }
  }
}

// Rows to a tile, at most. Taller ones would save loads that aren't missed: 8 divides the usual numbers of rows.
constexpr int kHeight = kRows < 8 ? kRows : 8;

// add_tile for a height that is known at run time alone.
template <class E, int MR = kHeight>
PPO_FAST_FN void add_tile_of(int64_t height, const PanelPiece<E>& piece, int64_t first, Ahead* ahead) {
  if constexpr (MR > 1) {
    if (height < MR) return add_tile_of<E, MR - 1>(height, piece, first, ahead);
  }
  add_tile<E, MR>(piece, first, ahead);
}

// So few rows are all memory, and the processor's own prefetching does better.
constexpr int64_t kFewRows = 4;

// `n` numbers rounded to their place in the output.
PPO_FAST_FN void put_rounded(float* out, const float* x, int64_t n) {
  __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(*x));
}
PPO_FAST_FN void put_rounded(double* out, const double* x, int64_t n) {
  __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(*x));
}
template <class T> PPO_FAST_FN void put_rounded(T* out, const float* x, int64_t n) {
  uint16_t rounded[kPanelLanes];
  for (int64_t i = 0; i < kPanelLanes; i += W) {
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

// Panels [begin, end) for all rows.
template <class E, class Out> static void small_linear(const SmallLinear<E, Out>& a, int64_t begin, int64_t end) {
  using S = typename E::Stat;
  constexpr int64_t tile_vectors = kPanelLanes / kLanes<E>;
  alignas(64) S sums[kRowBlock * kPanelLanes];
  const int64_t pieces = (a.words + kPiece - 1) / kPiece, depth = (a.words + pieces - 1) / pieces;
  const typename E::Lane* stop = a.panels + end * a.words * kPanelLanes;
  for (int64_t p = begin; p < end; ++p) {
    const typename E::Lane* panel = a.panels + p * a.words * kPanelLanes;
    const int64_t width = a.features - p * kPanelLanes < kPanelLanes ? a.features - p * kPanelLanes : kPanelLanes;
    for (int64_t row = 0; row < a.rows; row += kRowBlock) {
      const int64_t rows = a.rows - row < kRowBlock ? a.rows - row : kRowBlock;
      const int64_t tiles = (rows + kHeight - 1) / kHeight;
      for (int64_t k = 0; k < a.words; k += depth) {
        const int64_t words = a.words - k < depth ? a.words - k : depth;
        const typename E::Lane* weight = panel + k * kPanelLanes;
        const PanelPiece<E> piece{a.x + row * a.x_row + k, a.x_row, weight, words, sums, k > 0};
        // The piece after this one, or the first of the next panel: the packed weight is one stream.
        const typename E::Lane* next = weight + words * kPanelLanes;
        const int64_t left = stop - next, size = left < depth * kPanelLanes ? left : depth * kPanelLanes;
        const int64_t steps = tiles * (tile_vectors / 2) * ((words + 15) / 16);
        const int64_t lines = (size * static_cast<int64_t>(sizeof(*next)) + 63) / 64;
        Ahead ahead{reinterpret_cast<const char*>(next), reinterpret_cast<const char*>(next + size),
                    (lines + steps - 1) / steps};
        for (int64_t first = 0, left_tiles = tiles; left_tiles > 0; --left_tiles) {
          const int64_t height = (rows - first + left_tiles - 1) / left_tiles;
          add_tile_of<E>(height, piece, first, rows > kFewRows ? &ahead : nullptr);
          first += height;
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        S* sum = sums + r * kPanelLanes;
        if (a.bias) {
          for (int64_t i = 0; i < width; ++i) sum[i] += a.bias[p * kPanelLanes + i];
        }
        put_rounded(a.out + (row + r) * a.features + p * kPanelLanes, sum, width);
      }
    }
  }
}
