// The body of lora_linear.cpp for one instruction set: rows against panels of features, one feature a lane.
#include "vec.h"
#include "multiply.h"

static int64_t lanes_of_vector() { return W; }

// ---------------------------------------------------------------------------------------------------------------- packing

// The lanes of two vectors by turns: a[0] b[0] a[1] b[1] and so on, first those of their lower halves.
#if defined(__clang__)
#define PPO_FAST_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PPO_FAST_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif
PPO_FAST_FN void by_turns(vf a, vf b, vf& low, vf& high) {
#if PPO_FAST_ISA == 2
  low = PPO_FAST_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = PPO_FAST_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif PPO_FAST_ISA == 1
  low = PPO_FAST_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  high = PPO_FAST_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  low = PPO_FAST_SHUFFLE(a, b, 0, 4, 1, 5);
  high = PPO_FAST_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}
#undef PPO_FAST_SHUFFLE

// W x W numbers, rows become columns.
PPO_FAST_FN void transpose(vf (&x)[W]) {
  for (int step = 1; step < W; step *= 2) {
    vf y[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) by_turns(x[i], x[i + W / 2], y[2 * i], y[2 * i + 1]);
    __builtin_memcpy(x, y, sizeof(y));
  }
}

// Features [0, features) of a weight, at most `lanes`, a multiple of W, as [depth][lane]; zeros in the lanes past the last.
static void pack_panel(const float* weight, int64_t feature_stride, int64_t depth_stride, int64_t features,
                       int64_t depth, int64_t lanes, float* out) {
  int64_t k = 0;
  if (features == lanes && feature_stride == 1) {
    for (; k < depth; ++k) {
      for (int64_t f = 0; f < lanes; f += W) __builtin_memcpy(out + k * lanes + f, weight + k * depth_stride + f, 4 * W);
    }
  } else if (features == lanes && depth_stride == 1) {
    for (; k + W <= depth; k += W) {
      for (int64_t f = 0; f < lanes; f += W) {
        vf x[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = load_n<vf>(weight + (f + i) * feature_stride + k, W);
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_n(out + (k + i) * lanes + f, x[i], W);
      }
    }
  }
  for (; k < depth; ++k) {
    for (int64_t f = 0; f < lanes; ++f) {
      out[k * lanes + f] = f < features ? weight[f * feature_stride + k * depth_stride] : 0.0f;
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- products

// MR rows and one panel of NV vectors.
template <int MR, int NV> PPO_FAST_FN void lora_tile(const LoraRows& a, int64_t row, int64_t feature, Ahead& ahead) {
  const float* panel = a.panels + feature * (a.depth + a.rank);
  vf c[MR][NV];
  product<Single, MR, NV>(a.x + row * a.x_row, a.x_row, 1, panel, a.depth, c, &ahead);
  if (a.rank) {
    const float* up = panel + a.depth * NV * W;
    multiply<Single, MR, NV>(a.down + row * a.down_row, a.down_row, 1, up, a.rank, c, nullptr);
  }
  const int64_t features = a.features - feature;
  float* out = a.out + row * a.out_row + feature;
#pragma GCC unroll 2
  for (int j = 0; j < NV; ++j) {
    const int64_t count = features - j * W;
    if (count <= 0) break;
    const vf bias = a.bias ? load_n<vf>(a.bias + feature + j * W, count) : vf{};
#pragma GCC unroll 24
    for (int i = 0; i < MR; ++i) store_n(out + i * a.out_row + j * W, c[i][j] + bias, count);
  }
}

// Rows meet all panels one after the other; with the first the rows after them are fetched, with the others what is
// `ahead`.
template <int NV> struct LoraTiles {
  const LoraRows& a;
  Ahead& ahead;
  template <int MR> PPO_FAST_METHOD void tile(int64_t row) const {
    const int64_t left = a.rows - row - MR, next = left < MR ? left : MR;
    const char* from = reinterpret_cast<const char*>(a.x + (row + MR) * a.x_row);
    const int64_t bytes = next * a.x_row * static_cast<int64_t>(sizeof(float)), steps = (a.depth + 15) / 16;
    const bool dense = a.x_row < 2 * a.depth;  // else most of what is fetched would be of no use
    Ahead rows{from, dense ? from + bytes : from, (bytes / 64 + steps) / steps};
    for (int64_t f = 0; f < a.features; f += NV * W) lora_tile<MR, NV>(a, row, f, f == 0 ? rows : ahead);
  }
};

template <int NV> static void lora_rows(const LoraRows& a, Ahead& ahead) {
  over_rows<NV>(a.rows, LoraTiles<NV>{a, ahead});
}
