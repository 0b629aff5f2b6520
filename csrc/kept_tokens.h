// The body of kept.cpp for one instruction set: dot products and weighted sums of rows, the softmax between them.
#include "vec.h"
#include "exp.h"

// The cache lines at p[0 .. 2 * lanes), into the second level, which measured faster than into the first. Hints: p may
// be any address.
template <class T> PPO_FAST_FN void prefetch(const T* p) {
  constexpr int64_t bytes = 2 * lanes<typename Lanes<T>::type> * int64_t{sizeof(T)};
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + line, 0, 2);
}

// out[r] = rows[r] . h for kTogether rows. A row's own result doesn't depend on the others.
template <class T> PPO_FAST_FN void dot_rows(const T* h, const T* const* rows, const T* const* ahead, int64_t H,
                                             double* out) {
  using V = typename Lanes<T>::type;
  constexpr int64_t L = lanes<V>;
  V even[kTogether] = {}, odd[kTogether] = {};
  int64_t i = 0;
  for (; i + 2 * L <= H; i += 2 * L) {
    const V a = load1(h + i), b = load1(h + i + L);
#pragma GCC unroll 4
    for (int64_t r = 0; r < kTogether; ++r) {
      even[r] = fma(a, load1(rows[r] + i), even[r]);
      odd[r] = fma(b, load1(rows[r] + i + L), odd[r]);
      prefetch(ahead[r] + i);
    }
  }
  if (i + L <= H) {
    const V a = load1(h + i);
    for (int64_t r = 0; r < kTogether; ++r) even[r] = fma(a, load1(rows[r] + i), even[r]);
    i += L;
  }
  if (i < H) {
    const V b = load1_n(h + i, H - i);
    for (int64_t r = 0; r < kTogether; ++r) odd[r] = fma(b, load1_n(rows[r] + i, H - i), odd[r]);
  }
  for (int64_t r = 0; r < kTogether; ++r) out[r] = sum_lanes(even[r] + odd[r]);
}

// out += sum of coefficients[r] * rows[r] over kTogether rows.
template <class T> PPO_FAST_FN void add_rows(StatOf<T>* out, const T* const* rows, const StatOf<T>* coefficients,
                                             const T* const* ahead, int64_t H) {
  using V = typename Lanes<T>::type;
  constexpr int64_t L = lanes<V>;
  V k[kTogether];
  for (int64_t r = 0; r < kTogether; ++r) k[r] = splat<V>(coefficients[r]);
  int64_t i = 0;
  for (; i + 2 * L <= H; i += 2 * L) {
    V a = k[0] * load1(rows[0] + i), b = k[0] * load1(rows[0] + i + L);
    prefetch(ahead[0] + i);
#pragma GCC unroll 4
    for (int64_t r = 1; r < kTogether; ++r) {
      a = fma(k[r], load1(rows[r] + i), a);
      b = fma(k[r], load1(rows[r] + i + L), b);
      prefetch(ahead[r] + i);
    }
    store_n<V>(out + i, load_n<V>(out + i, L) + a, L);
    store_n<V>(out + i + L, load_n<V>(out + i + L, L) + b, L);
  }
  for (; i < H; i += L) {
    const int64_t n = H - i < L ? H - i : L;
    V a = {};
    for (int64_t r = 0; r < kTogether; ++r) a = fma(k[r], n < L ? load1_n(rows[r] + i, n) : load1(rows[r] + i), a);
    store_n<V>(out + i, load_n<V>(out + i, n) + a, n);
  }
}

// A whole group of a list as contiguous rows: the rows themselves, or copies of them.
template <class T> PPO_FAST_FN const T* const* contiguous_rows(const KeptTokens<T>& a, const T* const* group,
                                                               T* copies, const T** slots) {
  if (a.column_stride == 1) return group;
  for (int64_t r = 0; r < kTogether; ++r) {
    for (int64_t i = 0; i < a.H; ++i) {
      __builtin_memcpy(static_cast<void*>(copies + r * a.H + i), group[r] + i * a.column_stride, sizeof(T));
    }
    slots[r] = copies + r * a.H;
  }
  return slots;
}

// f(first index, rows) for every group of this list, where f is also told the rows to prefetch meanwhile.
template <class T, class F> PPO_FAST_FN void over_groups(const KeptTokens<T>& a, const KeptList<T>& list,
                                                         const KeptList<T>& next, T* copies, const F& f) {
  const T* slots[kTogether];
  for (int64_t i = 0; i < list.count; i += kTogether) {
    const T* const* group = list.rows + i;
    const T* const* ahead = i + kTogether < list.count ? group + kTogether : next.count > 0 ? next.rows : group;
    const T* const* rows = contiguous_rows(a, group, copies, slots);
    f(i, rows, a.column_stride == 1 ? ahead : rows);
  }
}

template <class T> PPO_FAST_FN void pad(KeptList<T>& list) {
  for (int64_t i = list.count; i > 0 && i % kTogether; ++i) {
    list.rows[i] = list.rows[list.count - 1];
    list.coefficients[i] = 0;
  }
}

struct Softmax {
  double peak;      // of the logits; 0 where they are all -inf
  double total;     // sum of exp(logit - peak); 0 where all are -inf
  double weighted;  // sum of the same times (logit - peak)
};

// Over the padded logits in `scratch`, whose exponentials it leaves there.
template <class T> PPO_FAST_FN Softmax softmax(const KeptScratch<T>& scratch, int64_t K) {
  using V = typename Lanes<T>::type;
  constexpr int64_t L = lanes<V>;
  V top = splat<V>(-__builtin_inf());
  for (int64_t i = 0; i < K; i += L) top = vmax(load_n<V>(scratch.z + i, L), top);  // NaN is left to the sums
  double peak = max_lanes(top);
  if (peak == -__builtin_inf()) peak = 0;
  const RowExp<V> k = row_exp_constants<V>(1);
  WideSum<V> sum = {}, weighted = {};
  for (int64_t i = 0; i < K; i += L) {
    V d = load_n<V>(scratch.z + i, L) - splat<V>(peak);
    const V e = row_exp(d, k);
    store_n<V>(scratch.exps + i, e, L);
    add(sum, e);
    add(weighted, e * d);
  }
  return {peak, total(sum), total(weighted)};
}

// ------------------------------------------------------------------------------------------------------------ forward

// Lists the rows of a token, unless its ids are not as they should be.
template <class T> static uint8_t list_rows(const KeptTokens<T>& a, int64_t token, uint64_t* seen, KeptList<T>& list) {
  const int64_t* ids = a.kept_ids + token * a.K;
  const int64_t own = a.token_ids[token];
  list.count = 0;
  bool has_own = false, in_range = true, twice = false;
  for (int64_t k = 0; k < a.K; ++k) {
    const int64_t id = ids[k];
    if (id == -1) continue;
    if (id < 0 || id >= a.V) {
      in_range = false;
      break;
    }
    const uint64_t bit = uint64_t{1} << (id & 63);
    twice |= (seen[id >> 6] & bit) != 0;
    seen[id >> 6] |= bit;
    has_own |= id == own;
    list.rows[list.count] = a.weight + id * a.row_stride;
    list.columns[list.count++] = k;
  }
  for (int64_t i = 0; i < list.count; ++i) seen[ids[list.columns[i]] >> 6] = 0;
  const uint8_t status = !in_range ? kOutOfRange : twice ? kTwice : !has_own ? kLacksToken : kFine;
  if (status != kFine) list.count = 0;
  pad(list);
  return status;
}

// The logit from the bare product of a row.
template <class T> PPO_FAST_FN double shaped(const KeptTokens<T>& a, int64_t id, double product, double temperature) {
  double z = product;
  if (a.bias) z += a.bias[id];
  z *= a.logit_scale;
  if (a.softcap != 0) z = a.softcap * ::tanh(z / a.softcap);
  return z / temperature;
}

// Tokens [begin, end). The outputs of a token whose status isn't kFine are not written.
template <class T> static void forward_tokens(const KeptTokens<T>& a, int64_t begin, int64_t end,
                                              KeptScratch<T>& scratch, StatOf<T>* logits, StatOf<T>* logprobs,
                                              StatOf<T>* entropy, uint8_t* status) {
  using S = StatOf<T>;
  KeptList<T>*list = &scratch.lists[0], *next = &scratch.lists[1];
  if (begin < end) status[begin] = list_rows(a, begin, scratch.seen, *next);
  for (int64_t token = begin; token < end; ++token) {
    KeptList<T>* const spare = list;
    list = next;
    next = spare;
    next->count = 0;
    if (token + 1 < end) status[token + 1] = list_rows(a, token + 1, scratch.seen, *next);
    if (status[token] != kFine) continue;

    const int64_t* ids = a.kept_ids + token * a.K;
    const double temperature = a.temperature ? a.temperature[token] : 1;
    for (int64_t k = 0; k < padded(a.K); ++k) scratch.z[k] = static_cast<S>(-__builtin_inf());
    S own = 0;
    over_groups(a, *list, *next, scratch.copies, [&](int64_t first, const T* const* rows, const T* const* ahead) {
      double products[kTogether];
      dot_rows(a.hidden + token * a.H, rows, ahead, a.H, products);
      for (int64_t i = first; i < first + kTogether && i < list->count; ++i) {
        const int64_t column = list->columns[i];
        scratch.z[column] = static_cast<S>(shaped(a, ids[column], products[i - first], temperature));
        if (ids[column] == a.token_ids[token]) own = scratch.z[column];
      }
    });
    __builtin_memcpy(logits + token * a.K, scratch.z, static_cast<size_t>(a.K) * sizeof(S));

    const Softmax s = softmax<T>(scratch, padded(a.K));
    const bool nothing = s.total == 0;
    const double log_total = ::log(s.total);
    logprobs[token] = static_cast<S>(nothing ? -__builtin_inf() : (own - s.peak) - log_total);
    if (entropy) entropy[token] = static_cast<S>(nothing ? 0 : log_total - s.weighted / s.total);
  }
}

// ----------------------------------------------------------------------------------------------------------- backward

// The gradient of a token's bare products by column into `gradient` [K], if given, and the rows where it isn't zero
// into `list`.
template <class T> static void list_gradient(const KeptTokens<T>& a, int64_t token, const KeptScratch<T>& scratch,
                                             double c, double e, const StatOf<T>* logits, StatOf<T>* gradient,
                                             KeptList<T>& list) {
  using S = StatOf<T>;
  const int64_t* ids = a.kept_ids + token * a.K;
  const double temperature = a.temperature ? a.temperature[token] : 1;
  for (int64_t k = 0; k < padded(a.K); ++k) scratch.z[k] = k < a.K ? logits[k] : static_cast<S>(-__builtin_inf());
  const Softmax s = softmax<T>(scratch, padded(a.K));
  list.count = 0;
  if (s.total == 0) return;  // nothing but -inf: the gradient is zero, as it stands
  const double log_total = ::log(s.total), entropy = log_total - s.weighted / s.total;
  const double slope = a.logit_scale / temperature;
  for (int64_t k = 0; k < a.K; ++k) {
    if (ids[k] < 0) continue;
    const double power = scratch.exps[k], p = power / s.total;
    // p log p is 0 at p = 0, where the logarithm may be -inf.
    double g = p == 0 ? 0 : -e * p * ((scratch.z[k] - s.peak) - log_total + entropy);
    g += ids[k] == a.token_ids[token] ? c * ((s.total - power) / s.total) : -c * p;
    g *= slope;
    if (a.softcap != 0) {
      const double squashed = scratch.z[k] * temperature / a.softcap;  // the tanh
      g *= 1 - squashed * squashed;
    }
    const S rounded = static_cast<S>(g);
    if (gradient) gradient[k] = rounded;
    if (rounded == 0) continue;
    list.rows[list.count] = a.weight + ids[k] * a.row_stride;
    list.coefficients[list.count++] = rounded;
  }
  pad(list);
}

// The tokens tokens[begin .. end), all of which have a gradient. d_hidden [n, H] and gradient [n, K] may be null.
template <class T> static void backward_tokens(const KeptTokens<T>& a, const int64_t* tokens, int64_t begin,
                                               int64_t end, KeptScratch<T>& scratch, const StatOf<T>* c,
                                               const StatOf<T>* e, const StatOf<T>* logits, StatOf<T>* d_hidden,
                                               StatOf<T>* gradient) {
  KeptList<T>*list = &scratch.lists[0], *next = &scratch.lists[1];
  const auto look_at = [&](int64_t i) {
    const int64_t token = tokens[i], row = token * a.K;
    list_gradient(a, token, scratch, c[token], e ? e[token] : 0, logits + row, gradient ? gradient + row : nullptr,
                  *next);
  };
  if (begin < end) look_at(begin);
  for (int64_t i = begin; i < end; ++i) {
    KeptList<T>* const spare = list;
    list = next;
    next = spare;
    next->count = 0;
    if (i + 1 < end) look_at(i + 1);
    if (!d_hidden) continue;
    StatOf<T>* const out = d_hidden + tokens[i] * a.H;
    for (int64_t j = 0; j < a.H; ++j) out[j] = 0;
    over_groups(a, *list, *next, scratch.copies, [&](int64_t first, const T* const* rows, const T* const* ahead) {
      StatOf<T>* const sum = first < kBlock ? out : scratch.sum;
      if (sum != out && first % kBlock == 0) {
        for (int64_t j = 0; j < a.H; ++j) sum[j] = 0;
      }
      add_rows(sum, rows, list->coefficients + first, ahead, a.H);
      const int64_t done = first + kTogether;
      if (sum != out && (done % kBlock == 0 || done >= list->count)) {
        for (int64_t j = 0; j < a.H; ++j) out[j] += sum[j];
      }
    });
  }
}

// Adds `count` sorted entries to d_weight [V, H] and d_bias [V], either of which may be null.
template <class T> static void scatter_entries(const KeptTokens<T>& a, const KeptEntry* entries, int64_t count,
                                               const StatOf<T>* gradient, StatOf<T>* d_weight, StatOf<T>* d_bias) {
  using S = StatOf<T>;
  for (int64_t i = 0; i < count;) {
    const int64_t id = entries[i].id;
    const T* rows[kTogether];
    S coefficients[kTogether];
    int64_t taken = 0;
    for (int64_t r = 0; r < kTogether; ++r) {
      const bool more = i + r < count && entries[i + r].id == id;
      if (more) taken = r + 1;
      const KeptEntry& entry = entries[i + taken - 1];
      rows[r] = a.hidden + entry.position / a.K * a.H;
      coefficients[r] = more ? gradient[entry.position] : S(0);
      if (more && d_bias) d_bias[id] += coefficients[r];
    }
    if (d_weight) {
      if (i + taken < count) {
        const char* target = reinterpret_cast<const char*>(d_weight + entries[i + taken].id * a.H);
        for (int64_t byte = 0; byte < a.H * int64_t{sizeof(S)}; byte += 64) __builtin_prefetch(target + byte, 1);
      }
      add_rows(d_weight + id * a.H, rows, coefficients, rows, a.H);
    }
    i += taken;
  }
}
