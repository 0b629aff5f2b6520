// _kept_forward, _kept_backward: log-prob, entropy and gradients of tokens whose softmax runs over a few ids each.
//
// Forward: the K weight rows of a token are multiplied with its hidden state where they lie, four at a time, while the
// next four are prefetched -> logits [n, K], all that is stored -> log-prob and entropy. Backward: the softmax again
// from the logits, the gradient of each logit, and with it d_hidden = sum of g_k W[k], from a second walk over the
// rows. Rows of a few KB at random places are all latency: the prefetch runs on across tokens, so that it never starts
// cold.
//
// d_weight and d_bias are sums over the tokens that hold an id, and several may hold the same one. The (id, token,
// column) triples are sorted, and every id is summed by one task in the order of its tokens: no two tasks write to the
// same row, and the result has the same bits for any number of threads.
//
// Numerics. Products accumulate in float32, in two sums to a lane (float64 for float64 heads), joined in double;
// d_hidden in blocks of 64 rows, or a set of a thousand would lose a digit to the length of its sum. Gradients of
// logits are never rounded to 16 bits. The total is summed in double, and 1 - p of the token itself is the share of
// the others in it: a nearly certain token keeps a gradient that is right.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {

constexpr int64_t kTogether = 4;  // rows multiplied at one time
constexpr int64_t kBlock = 64;    // rows of d_hidden summed before their sum is added to the others'

// What a token's kept set can be.
enum KeptStatus : uint8_t { kFine, kOutOfRange, kTwice, kLacksToken };

// The arguments of the two ops that describe tokens and output layer.
template <class T> struct KeptTokens {
  using S = StatOf<T>;
  const T* hidden;  // [n, H]
  const T* weight;  // [V, H]
  int64_t row_stride, column_stride;
  const S* bias;            // [V] or null
  const int64_t* token_ids; // [n]
  const S* temperature;     // [n] or null for 1
  const int64_t* kept_ids;  // [n, K]
  double softcap;           // 0 for none
  double logit_scale;
  int64_t n, K, V, H;
};

// The rows of one token that take part, padded to a multiple of kTogether by repeating the last.
template <class T> struct KeptList {
  const T** rows;
  StatOf<T>* coefficients;  // backward alone; 0 in the padding
  int64_t* columns;         // forward alone
  int64_t count;            // without the padding
};

// Scratch of one task.
template <class T> struct KeptScratch {
  KeptList<T> lists[2];     // this token and the next
  uint64_t* seen;           // [V] bits, all clear between tokens
  StatOf<T>*z, *exps;       // [K], padded to a multiple of 16 by -inf and its exponential
  StatOf<T>* sum;           // [H]
  T* copies;                // [kTogether, H] where the weight's columns are apart, else null
};

struct KeptEntry {
  int64_t id, position;  // position = token * K + column
};

constexpr int64_t padded(int64_t K) { return (K + 15) / 16 * 16; }

}  // namespace ppo_fast

#define PPO_FAST_BODY "kept_tokens.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

// The kernel of the level in force; float64 has but one.
#define PPO_FAST_PICK_KEPT(T, name) [] {             \
    if constexpr (std::is_same_v<T, double>) {       \
      return &portable::name<T>;                     \
    } else {                                         \
      return PPO_FAST_PICK(name<T>);                 \
    }                                                \
  }()

// The memory of a KeptScratch.
template <class T> struct Memory {
  std::vector<const T*> rows;
  std::vector<StatOf<T>> numbers;
  std::vector<int64_t> columns;
  std::vector<uint64_t> seen;
  std::unique_ptr<T[]> copies;
  KeptScratch<T> scratch;

  explicit Memory(const KeptTokens<T>& a) {
    const size_t K = static_cast<size_t>(padded(a.K));
    rows.resize(2 * K);
    numbers.resize(4 * K + static_cast<size_t>(a.H));
    columns.resize(2 * K);
    seen.resize(static_cast<size_t>(ceil_div(a.V, 64)));
    if (a.column_stride != 1) copies.reset(new T[static_cast<size_t>(kTogether * a.H)]);
    for (size_t i = 0; i < 2; ++i) scratch.lists[i] = {&rows[i * K], &numbers[i * K], &columns[i * K], 0};
    scratch.seen = seen.data();
    scratch.z = &numbers[2 * K];
    scratch.exps = &numbers[3 * K];
    scratch.sum = &numbers[4 * K];
    scratch.copies = copies.get();
  }
};

template <class T>
KeptTokens<T> tokens_of(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                        const Tensor& token_ids, const std::optional<Tensor>& temperature, const Tensor& kept_ids,
                        std::optional<double> softcap, double logit_scale) {
  using S = StatOf<T>;
  constexpr ScalarType stat = scalar_type_of<S>;
  check(weight.is_cpu() && weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "weight",
        "a CPU tensor [V, H]");
  check(kept_ids.dim() == 2 && kept_ids.size(1) > 0, "kept_ids", "of shape [n, K]");
  const int64_t n = kept_ids.size(0), K = kept_ids.size(1), V = weight.size(0), H = weight.size(1);
  return {data<T>(hidden, "hidden", weight.scalar_type(), {n, H}),
          static_cast<const T*>(weight.const_data_ptr()),
          weight.stride(0),
          H == 1 ? 1 : weight.stride(1),
          optional_data<S>(bias, "bias", stat, {V}),
          data<int64_t>(token_ids, "token_ids", ScalarType::Long, {n}),
          optional_data<S>(temperature, "temperature", stat, {n}),
          data<int64_t>(kept_ids, "kept_ids", ScalarType::Long, {n, K}),
          softcap.value_or(0),
          logit_scale,
          n,
          K,
          V,
          H};
}

// Outside of any parallel region, where it may throw.
void raise(const std::vector<uint8_t>& status, const int64_t* token_ids, int64_t V) {
  const auto has = [&](KeptStatus s) { return std::find(status.begin(), status.end(), s); };
  if (has(kOutOfRange) != status.end()) {
    throw std::out_of_range("kept_ids must lie in [0, " + std::to_string(V) +
                            "), or be -1 for none, at live positions");
  }
  if (has(kTwice) != status.end()) {
    throw std::invalid_argument("kept_ids must not name a token twice at one position");
  }
  const auto lacking = has(kLacksToken);
  if (lacking != status.end()) {
    throw std::out_of_range("token_ids must lie in their kept set at live positions: kept_ids lacks token " +
                            std::to_string(token_ids[lacking - status.begin()]));
  }
}

std::tuple<Tensor, Tensor, Tensor> kept_forward(Tensor hidden,                      // [n, H]
                                                Tensor weight,                      // [V, H], any strides
                                                std::optional<Tensor> bias,         // [V] stat dtype
                                                Tensor token_ids,                   // [n] int64
                                                std::optional<Tensor> temperature,  // [n] stat dtype
                                                Tensor kept_ids,                    // [n, K] int64
                                                std::optional<double> softcap, double logit_scale, bool want_entropy) {
  return by_dtype(weight, "weight", [&](auto* type) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = std::remove_pointer_t<decltype(type)>;
    using S = StatOf<T>;
    const KeptTokens<T> a =
        tokens_of<T>(hidden, weight, bias, token_ids, temperature, kept_ids, softcap, logit_scale);
    constexpr ScalarType stat = scalar_type_of<S>;
    Tensor logits = empty({a.n, a.K}, stat), logprobs = empty({a.n}, stat);
    Tensor entropy = empty({want_entropy ? a.n : 0}, stat);
    S *z = writable<S>(logits), *logp = writable<S>(logprobs), *h = want_entropy ? writable<S>(entropy) : nullptr;
    std::vector<uint8_t> status(static_cast<size_t>(a.n), kFine);
    const auto kernel = PPO_FAST_PICK_KEPT(T, forward_tokens);
    parallel(a.n, a.K * a.H, [&](int64_t begin, int64_t end) {
      Memory<T> memory(a);
      kernel(a, begin, end, memory.scratch, z, logp, h, status.data());
    });
    raise(status, a.token_ids, a.V);
    return {logits, logprobs, entropy};
  });
}

// d_hidden [n, H] stat dtype, [0] if not needed.
Tensor kept_backward(Tensor c,                           // [n] dL/dlogp
                     std::optional<Tensor> e,            // [n] dL/dentropy
                     Tensor logits,                      // [n, K] as kept_forward gave them
                     Tensor hidden,                      // [n, H]
                     Tensor weight,                      // [V, H], any strides
                     Tensor token_ids,                   // [n] int64
                     std::optional<Tensor> temperature,  // [n] stat dtype
                     Tensor kept_ids,                    // [n, K] int64
                     std::optional<double> softcap, double logit_scale, bool need_hidden,
                     std::optional<Tensor> d_weight,  // [V, H] stat dtype, added to
                     std::optional<Tensor> d_bias) {  // [V] stat dtype, added to
  return by_dtype(weight, "weight", [&](auto* type) -> Tensor {
    using T = std::remove_pointer_t<decltype(type)>;
    using S = StatOf<T>;
    const KeptTokens<T> a =
        tokens_of<T>(hidden, weight, std::nullopt, token_ids, temperature, kept_ids, softcap, logit_scale);
    constexpr ScalarType stat = scalar_type_of<S>;
    const S* grad_logprobs = data<S>(c, "c", stat, {a.n});
    const S* grad_entropy = optional_data<S>(e, "e", stat, {a.n});
    const S* z = data<S>(logits, "logits", stat, {a.n, a.K});
    S *to_weight = nullptr, *to_bias = nullptr;
    if (d_weight.has_value()) to_weight = const_cast<S*>(data<S>(*d_weight, "d_weight", stat, {a.V, a.H}));
    if (d_bias.has_value()) to_bias = const_cast<S*>(data<S>(*d_bias, "d_bias", stat, {a.V}));
    for (int64_t i = 0; i < a.n * a.K; ++i) {
      if (a.kept_ids[i] < -1 || a.kept_ids[i] >= a.V) raise({kOutOfRange}, nullptr, a.V);
    }

    Tensor d_hidden = need_hidden ? empty({a.n, a.H}, stat) : empty({0}, stat);
    S* to_hidden = need_hidden ? writable<S>(d_hidden) : nullptr;
    std::vector<int64_t> alive;
    for (int64_t token = 0; token < a.n; ++token) {
      if (grad_logprobs[token] != 0 || (grad_entropy && grad_entropy[token] != 0)) {
        alive.push_back(token);
      } else if (to_hidden) {
        std::fill_n(to_hidden + token * a.H, a.H, S(0));
      }
    }
    const bool scatters = to_weight || to_bias;
    std::vector<S> gradient(scatters ? static_cast<size_t>(a.n * a.K) : 0);  // of the logits; 0 where token is dead
    const auto kernel = PPO_FAST_PICK_KEPT(T, backward_tokens);
    parallel(static_cast<int64_t>(alive.size()), a.K * a.H, [&](int64_t begin, int64_t end) {
      Memory<T> memory(a);
      kernel(a, alive.data(), begin, end, memory.scratch, grad_logprobs, grad_entropy, z, to_hidden,
             scatters ? gradient.data() : nullptr);
    });
    if (!scatters) return d_hidden;

    std::vector<KeptEntry> entries;
    for (int64_t i = 0; i < a.n * a.K; ++i) {
      if (a.kept_ids[i] >= 0 && gradient[static_cast<size_t>(i)] != 0) entries.push_back({a.kept_ids[i], i});
    }
    std::sort(entries.begin(), entries.end(), [](const KeptEntry& x, const KeptEntry& y) {
      return x.id != y.id ? x.id < y.id : x.position < y.position;
    });
    const auto scatter = PPO_FAST_PICK_KEPT(T, scatter_entries);
    const int64_t count = static_cast<int64_t>(entries.size());
    parallel(count, a.H, [&](int64_t begin, int64_t end) {
      // An id belongs to the task in whose range its first entry lies.
      const auto starts_inside_id = [&](int64_t i) {
        return 0 < i && i < count && entries[static_cast<size_t>(i)].id == entries[static_cast<size_t>(i - 1)].id;
      };
      while (begin < end && starts_inside_id(begin)) ++begin;
      if (begin == end) return;
      while (starts_inside_id(end)) ++end;
      scatter(a, entries.data() + begin, end - begin, gradient.data(), to_weight, to_bias);
    });
    return d_hidden;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("_kept_forward", TORCH_BOX(&kept_forward));
  m.impl("_kept_backward", TORCH_BOX(&kept_backward));
}

}  // namespace ppo_fast
