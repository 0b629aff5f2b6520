// Walking flat tokens of [B, T] a vector at a time. Included after vec.h, inside a namespace of for_each_isa.h: no
// include guard. A vector may span rows, so that short rows waste no lanes.

// Yields begin, begin + lanes, ...; `i` is the first token of the vector and `n` how many it holds.
template <class V> struct TokenRun {
  using S = typename Scalar<V>::type;
  const S* row_weights;  // [B]
  int64_t T, end, i, n;
  int64_t row, left;     // the row of token i and its tokens from i on; unused where T is 1

  PPO_FAST_METHOD TokenRun(const S* row_weights_, int64_t T_, int64_t begin, int64_t end_)
      : row_weights(row_weights_), T(T_), end(end_), i(begin), row(begin / T_), left(T_ - begin % T_) {
    n = end - i < lanes<V> ? end - i : lanes<V>;
  }
  PPO_FAST_METHOD bool more() const { return i < end; }
  PPO_FAST_METHOD void next() {
    i += n;
    for (left -= n; T > 1 && left <= 0; left += T) ++row;
    n = end - i < lanes<V> ? end - i : lanes<V>;
  }
  // The weight of each token of the vector; lanes past n hold anything.
  PPO_FAST_METHOD V weights() const {
    if (T == 1) return load_n<V>(row_weights + i, n);  // the fused head's layout: every token a row of its own
    if (left >= n) return splat<V>(row_weights[row]);
    S w[lanes<V>] = {};
    int64_t r = row, in_row = left;
    for (int64_t k = 0; k < n; ++k) {
      if (in_row == 0) {
        ++r;
        in_row = T;
      }
      w[k] = row_weights[r];
      --in_row;
    }
    return load_n<V>(w, lanes<V>);
  }
};
