// The body of decode_attention.cpp for one instruction set: one row's query heads of one key head at a time.
#include "vec.h"
#include "exp.h"

PPO_FAST_FN float sum_of_lanes(vf x) {
#if PPO_FAST_ISA == 2
  return _mm512_reduce_add_ps(x);
#else
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
#endif
}
PPO_FAST_FN double sum_of_lanes(double x) { return x; }

// Columns whose weighted values are added up in one go: rounding errors don't grow with the length of a reply.
constexpr int64_t kColumns = 256;

// Scores of the group's heads against columns [first, length); `query` is as load2 left it.
template <class T, class S>
PPO_FAST_FN void scores_of(const DecodeAttention<T, S>& a, const T* key, int64_t first, int64_t length, const S* query,
                           S* scores) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t c = first; c < length; ++c) {
    const T* k = key + c * a.key.column;
    for (int64_t g = 0; g < a.group; ++g) {
      V even = {}, odd = {};
      for (int64_t d = 0; d < a.size; d += step) {
        V x, y;
        load_rest(k + d, a.size - d, x, y);
        even = fma(x, load<V>(query + g * a.padded_size + d), even);
        odd = fma(y, load<V>(query + g * a.padded_size + d + lanes<V>), odd);
      }
      S score = sum_of_lanes(even + odd) * a.scale;
      if (a.softcap > 0) {
        score = a.softcap * static_cast<S>(::tanh(static_cast<double>(score / a.softcap)));
      }
      scores[g * a.padded_columns + c - first] = score;
    }
  }
}

// Scores to weights, in place, up to a whole vector; returns the sum of the weights.
template <class V> PPO_FAST_FN double softmax_weights(typename Scalar<V>::type* scores, int64_t count) {
  using S = typename Scalar<V>::type;
  for (int64_t c = count; c % lanes<V> != 0; ++c) scores[c] = -__builtin_inff();
  V top = splat<V>(-__builtin_inff());
  for (int64_t c = 0; c < count; c += lanes<V>) top = vmax(load<V>(scores + c), top);
  const S reference = max_lanes(top);
  const RowExp<V> k = row_exp_constants<V>(1.0);
  WideSum<V> sum = {};
  for (int64_t c = 0; c < count; c += lanes<V>) {
    V d = load<V>(scores + c) - reference;
    const V weight = row_exp(d, k);
    store(scores + c, weight);
    add(sum, weight);
  }
  return total(sum);
}

// out = sum of weights[c] * value[c] / total, in the layout of load2 until it is stored.
template <class T, class S>
PPO_FAST_FN void mix_values(const DecodeAttention<T, S>& a, const T* value, int64_t count, const S* weights, double total,
                            T* out) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t d = 0; d < a.value_size; d += step) {
    V x = {}, y = {};
    for (int64_t begin = 0; begin < count; begin += kColumns) {
      const int64_t end = count - begin < kColumns ? count : begin + kColumns;
      V part_x = {}, part_y = {};
      for (int64_t c = begin; c < end; ++c) {
        V v, w;
        load_rest(value + c * a.value.column + d, a.value_size - d, v, w);
        const V weight = splat<V>(weights[c]);
        part_x = fma(weight, v, part_x);
        part_y = fma(weight, w, part_y);
      }
      x += part_x;
      y += part_y;
    }
    const S inverse = static_cast<S>(1 / total);
    store_rest(out + d, a.value_size - d, x * inverse, y * inverse);
  }
}

// Rows times key heads [begin, end).
template <class T, class S> static void decode_attention(const DecodeAttention<T, S>& a, int64_t begin, int64_t end) {
  using V = typename Lanes<T>::type;
  constexpr int64_t step = 2 * lanes<V>;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / a.key_heads, head = task % a.key_heads;
    const int64_t length = a.lengths[row];
    const int64_t first = a.window > 0 && length > a.window ? length - a.window : 0;
    S* query = a.work + task * a.work_size;
    S* scores = query + a.group * a.padded_size;
    for (int64_t g = 0; g < a.group; ++g) {
      const T* q = a.query.data + row * a.query.row + (head * a.group + g) * a.query.head;
      for (int64_t d = 0; d < a.size; d += step) {
        V x, y;
        load_rest(q + d, a.size - d, x, y);
        store(query + g * a.padded_size + d, x);
        store(query + g * a.padded_size + d + lanes<V>, y);
      }
    }
    scores_of<T, S>(a, a.key.data + row * a.key.row + head * a.key.head, first, length, query, scores);
    const T* value = a.value.data + row * a.value.row + head * a.value.head + first * a.value.column;
    for (int64_t g = 0; g < a.group; ++g) {
      S* weights = scores + g * a.padded_columns;
      const double sum = softmax_weights<V>(weights, length - first);
      mix_values<T, S>(a, value, length - first, weights, sum,
                       a.out + ((row * a.key_heads + head) * a.group + g) * a.value_size);
    }
  }
}
