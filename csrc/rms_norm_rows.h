// The body of rms_norm.cpp for one instruction set: a run of rows.
#include "vec.h"

template <class T, class S>
static void rms_norm_rows(const T* x, const T* weight, int64_t rows, int64_t width, double eps, T* out, S* rstd) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t row = 0; row < rows; ++row, x += width, out += width) {
    V squares[2] = {};
    for (int64_t i = 0; i < width; i += step) {
      V a[2];
      load_rest(x + i, width - i, a[0], a[1]);
      for (int k = 0; k < 2; ++k) squares[k] = fma(a[k], a[k], squares[k]);
    }
    const S scale = static_cast<S>(
        1 / __builtin_sqrt((sum_lanes(squares[0]) + sum_lanes(squares[1])) / static_cast<double>(width) + eps));
    rstd[row] = scale;
    for (int64_t i = 0; i < width; i += step) {
      V a[2], w[2];
      load_rest(x + i, width - i, a[0], a[1]);
      load_rest(weight + i, width - i, w[0], w[1]);
      store_rest(out + i, width - i, a[0] * scale * w[0], a[1] * scale * w[1]);
    }
  }
}

template <class T, class S>
static void rms_norm_gradients(const T* grad, const T* x, const T* weight, const S* rstd, int64_t rows, int64_t width,
                               T* d_x) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t row = 0; row < rows; ++row, grad += width, x += width, d_x += width) {
    V products[2] = {};
    for (int64_t i = 0; i < width; i += step) {
      V g[2], a[2], w[2];
      load_rest(grad + i, width - i, g[0], g[1]);
      load_rest(x + i, width - i, a[0], a[1]);
      load_rest(weight + i, width - i, w[0], w[1]);
      for (int k = 0; k < 2; ++k) products[k] = fma(g[k] * w[k], a[k], products[k]);
    }
    const double scale = rstd[row], sum = sum_lanes(products[0]) + sum_lanes(products[1]);
    const S along = static_cast<S>(sum * scale * scale / static_cast<double>(width));
    for (int64_t i = 0; i < width; i += step) {
      V g[2], a[2], w[2], d[2];
      load_rest(grad + i, width - i, g[0], g[1]);
      load_rest(x + i, width - i, a[0], a[1]);
      load_rest(weight + i, width - i, w[0], w[1]);
      for (int k = 0; k < 2; ++k) d[k] = (g[k] * w[k] - a[k] * along) * rstd[row];
      store_rest(d_x + i, width - i, d[0], d[1]);
    }
  }
}
