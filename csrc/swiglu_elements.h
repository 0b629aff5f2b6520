// The body of swiglu.cpp for one instruction set: a run of elements.
#include "vec.h"
#include "exp.h"

// sigmoid(x) and 1 - sigmoid(x), neither of which cancels: exp(-|x|) doesn't overflow.
template <class V> PPO_FAST_FN void sigmoids(V x, V& sigmoid, V& rest) {
  const V e = exp_terms(x < splat<V>(0) ? x : -x).exp;
  const V large = splat<V>(1) / (splat<V>(1) + e), small = e * large;
  const auto negative = x < splat<V>(0);
  sigmoid = negative ? small : large;
  rest = negative ? large : small;
}

template <class V> PPO_FAST_FN V swiglu_of(V gate, V up) {
  V sigmoid, rest;
  sigmoids(gate, sigmoid, rest);
  return gate * sigmoid * up;
}

template <class T> static void swiglu_elements(const T* gate, const T* up, int64_t n, T* out) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t i = 0; i < n; i += step) {
    V gates[2], ups[2];
    load_rest(gate + i, n - i, gates[0], gates[1]);
    load_rest(up + i, n - i, ups[0], ups[1]);
    store_rest(out + i, n - i, swiglu_of(gates[0], ups[0]), swiglu_of(gates[1], ups[1]));
  }
}

template <class V> PPO_FAST_FN void swiglu_gradient(V grad, V gate, V up, V& d_gate, V& d_up) {
  V sigmoid, rest;
  sigmoids(gate, sigmoid, rest);
  d_gate = grad * up * sigmoid * (splat<V>(1) + gate * rest);
  d_up = grad * (gate * sigmoid);
}

template <class T>
static void swiglu_gradients(const T* grad, const T* gate, const T* up, int64_t n, T* d_gate, T* d_up) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t i = 0; i < n; i += step) {
    V grads[2], gates[2], ups[2], d_gates[2], d_ups[2];
    load_rest(grad + i, n - i, grads[0], grads[1]);
    load_rest(gate + i, n - i, gates[0], gates[1]);
    load_rest(up + i, n - i, ups[0], ups[1]);
    for (int k = 0; k < 2; ++k) swiglu_gradient(grads[k], gates[k], ups[k], d_gates[k], d_ups[k]);
    store_rest(d_gate + i, n - i, d_gates[0], d_gates[1]);
    store_rest(d_up + i, n - i, d_ups[0], d_ups[1]);
  }
}
