// _head_forward and _head_backward: an output layer applied to a chunk of tokens, the softmax of its logits, and the
// gradient of both; the two primitives under every linear_* op (ppo_fast/ops/_chunks.py).
//
// Forward: hidden [n, H] is packed into panels of up to 32 tokens, [word][token] -> the vocabulary is cut into about 64
// segments, which threads take one by one; a segment goes block by block (192 rows, less for large H, so that a block
// stays in the second-level cache), each block against every panel, 12 rows x 32 tokens of accumulators at a time.
// Tokens sit in vector lanes, so the running maximum, the exponentials and their sums are taken from the accumulators
// with no horizontal step, and the token's own logit is picked out in passing. Logits go to memory only if a backward
// pass will want them, past the caches, in the same layout [panel][vocabulary row][token]. The weight is read in place,
// once a chunk; while one block is multiplied the next is fetched.
// Backward: a segment turns a block of logits into its gradient (dropping tokens that have none), d_hidden += weight.T
// @ gradient in a buffer of the thread's own, d_weight += gradient @ hidden in place. All three products are the one
// register tile of multiply.h.
//
// Numerics. bfloat16 pairs multiply exactly into float32 accumulators where the CPU has AVX512-BF16; elsewhere 16-bit
// weights are widened block by block. Logits are float32 and never rounded. The reference of the exponentials is the
// true maximum so far: its own term is exactly 1, so no log-prob comes out above 0, no entropy below. Sums run in
// float32 over one block and in double from there. The gradient is formed in float32, at the token itself from expm1 in
// double; it is rounded to bfloat16 only as an operand of bfloat16 dot products.
//   Segments depend on the shape alone and are combined in order, the sums by one thread, d_hidden by whichever thread
// has finished the next segment: the bits don't depend on the number of threads. A token's don't depend on how many
// others there are: a panel of one vector takes its sums over as many rows at a time as one of two.
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "isa.h"
#include "linear_head.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_WANTS_BF16
#define PPO_FAST_BODY "linear_head_rows.h"
#include "for_each_isa.h"
#include "head_layout.h"

namespace ppo_fast {
namespace {

// ------------------------------------------------------------------------------------------------------- kernel choice

template <class E> HeadKernels<E> kernels() { return PPO_FAST_PICK(head_kernels<E>)(); }
#if PPO_FAST_X86
template <> HeadKernels<Bf16Pair> kernels<Bf16Pair>() { return avx512_bf16::head_kernels<Bf16Pair>(); }
#endif

// ------------------------------------------------------------------------------------------------------------ arguments

// The rows of a chunk and their own tokens.
template <class T> struct Chunk : HeadRows<T> {
  const int64_t* ids;

  Chunk(const Tensor& hidden, const Tensor& weight, const Tensor& token_ids, const std::optional<Tensor>& temperature,
        std::optional<double> softcap, double logit_scale)
      : HeadRows<T>(hidden, weight, temperature, softcap, logit_scale) {
    ids = data<int64_t>(token_ids, "token_ids", ScalarType::Long, {this->n});
    check_token_ids(ids, nullptr, this->n, this->V);
  }
};

// Stored logits [panel][V][stride of the panel].
template <class S> struct Stored {
  S* memory;
  Panels panels;
  int64_t V;

  S* at(int64_t p, int64_t v) const { return memory + p * V * panels.width + v * panels.stride(p); }
};

template <class S> S* logits_memory(const Tensor& logits, const Panels& panels, int64_t V) {
  check(logits.is_cpu() && logits.scalar_type() == scalar_type_of<S> && logits.is_contiguous() &&
            logits.numel() >= panels.padded() * V,
        "logits", "a contiguous CPU tensor of the statistics' dtype, [n rounded up to 32, V]");
  return writable<S>(logits);
}

// -------------------------------------------------------------------------------------------------------------- forward

template <class T, class E>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Chunk<T>& x, const Tensor& weight_,
                                                   const std::optional<Tensor>& bias_,
                                                   const std::optional<Tensor>& logits_, bool want_entropy) {
  using S = typename E::Stat;
  using Word = typename E::Word;
  const HeadKernels<E> k = kernels<E>();
  const Panels panels{x.n, 2 * k.lanes, k.lanes};
  const S* bias = optional_data<S>(bias_, "bias", Chunk<T>::dtype, {x.V});
  Tensor logprobs = empty({x.n}, Chunk<T>::dtype), peak = empty({x.n}, Chunk<T>::dtype),
         total = empty({x.n}, Chunk<T>::dtype), entropy = empty({want_entropy ? x.n : 0}, Chunk<T>::dtype);
  if (x.n == 0) return {logprobs, entropy, peak, total};
  const Stored<S> logits{logits_.has_value() ? logits_memory<S>(*logits_, panels, x.V) : nullptr, panels, x.V};

  const int64_t words = ceil_div(x.H, E::per_word), count = panels.count();
  Buffer<Word> hidden(words * panels.padded());
  pack_panels<E>(x, 0, panels, hidden.get());

  std::vector<std::vector<Target>> targets(static_cast<size_t>(count));
  for (int64_t p = 0; p < count; ++p) {
    auto& of_panel = targets[static_cast<size_t>(p)];
    for (int64_t lane = 0; lane < panels.size(p); ++lane) of_panel.push_back({x.ids[p * panels.width + lane], lane});
    of_panel.push_back({std::numeric_limits<int64_t>::max(), 0});
    std::sort(of_panel.begin(), of_panel.end(), [](const Target& a, const Target& b) { return a.id < b.id; });
  }

  const Cuts cuts(x.V, words * int64_t{sizeof(Word)});
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), cuts.segments());
  Weight<T, E> weight(weight_, cuts.block, threads);
  Buffer<LaneSums<S>> sums(threads * count);
  Buffer<Part<S>> parts(cuts.segments() * x.n);
  const int64_t fetches = panels.fetches(cuts.block, words);

  over_segments(cuts, threads, [&](int64_t thread, const Segment& segment) {
    LaneSums<S>* const own = sums.get() + thread * count;
    for (int64_t p = 0; p < count; ++p) {
      begin_sums(own[p], panels.size(p), [&](int64_t lane) { return x.scale_of(p * panels.width + lane); });
      own[p].next = targets[static_cast<size_t>(p)].data();
      while (own[p].next->id < segment.first) ++own[p].next;
    }
    for (int64_t v = segment.first; v < segment.last; v += cuts.block) {
      Ahead ahead = weight.after(segment, v, fetches);
      ScoreBlock<E> block{logits_block(x, weight, bias, thread, segment, v), nullptr, nullptr};
      for (int64_t p = 0; p < count; ++p) {
        block.hidden = hidden.get() + p * words * panels.width;
        block.logits = logits.memory ? logits.at(p, v) : nullptr;
        block.sums = own + p;
        k.score[panels.vectors(p) - 1](block, ahead);
        k.join(own[p], panels.stride(p));
      }
    }
    for (int64_t t = 0; t < x.n; ++t) {
      const LaneSums<S>& s = own[t / panels.width];
      const int64_t lane = t % panels.width;
      const bool met = segment.first <= x.ids[t] && x.ids[t] < segment.last;
      parts[segment.index * x.n + t] = {s.joined_peak[lane], met ? s.target[lane] : S(0), s.joined_total[lane],
                                        s.joined_weighted[lane]};
    }
  });

  S *logprobs_ = writable<S>(logprobs), *entropy_ = writable<S>(entropy), *peak_ = writable<S>(peak),
    *total_ = writable<S>(total);
  for (int64_t t = 0; t < x.n; ++t) {
    const double scale = x.scale_of(t);
    const auto [top, sum, weighted] = joined(parts.get() + t, cuts.segments(), x.n, scale);
    const double target = parts[x.ids[t] / cuts.segment * x.n + t].target, log_sum = std::log(sum);
    peak_[t] = static_cast<S>(top);
    total_[t] = static_cast<S>(sum);
    logprobs_[t] = static_cast<S>(scale * (target - top) - log_sum);
    if (want_entropy) entropy_[t] = static_cast<S>(log_sum - scale * weighted / sum);
    if (sum == 0) {  // every logit is -inf
      logprobs_[t] = -std::numeric_limits<S>::infinity();
      if (want_entropy) entropy_[t] = 0;
    }
  }
  return {logprobs, entropy, peak, total};
}

// ------------------------------------------------------------------------------------------------------------- backward

// A token that has a gradient.
template <class S> struct Alive {
  int64_t t;
  S own;  // the gradient at the token's own logit
};

template <class S> struct RowResults {
  const S *logprobs, *entropy, *peak, *total, *c, *e;  // e null without a gradient of the entropy; entropy then unused
};

template <class T, class E>
Tensor backward(const Chunk<T>& x, const Tensor& weight_, const Tensor& logits_,
                const RowResults<typename E::Stat>& r, bool need_hidden, typename E::Stat* d_weight,
                typename E::Stat* d_bias) {
  using S = typename E::Stat;
  using Word = typename E::Word;
  const HeadKernels<E> k = kernels<E>();
  const Panels all{x.n, 2 * k.lanes, k.lanes};
  Tensor d_hidden = empty({need_hidden ? x.n : 0, x.H}, Chunk<T>::dtype);
  S* d_hidden_ = writable<S>(d_hidden);
  std::fill_n(d_hidden_, d_hidden.numel(), S(0));
  if (x.n == 0) return d_hidden;
  const Stored<S> stored{logits_memory<S>(logits_, all, x.V), all, x.V};

  std::vector<int64_t> alive;
  for (int64_t t = 0; t < x.n; ++t) {
    if ((r.c[t] != 0 || (r.e && r.e[t] != 0)) && r.total[t] != 0) alive.push_back(t);
  }
  if (alive.empty()) return d_hidden;
  const Panels panels{static_cast<int64_t>(alive.size()), all.width, all.lanes};
  const int64_t count = panels.count();
  const bool dense = panels.tokens == x.n;

  // The factors of each lane, and the gradients at the tokens themselves in the order of the vocabulary.
  Buffer<GradientLanes<S>> lanes(count);
  std::vector<Target> own_at;
  std::vector<S> own(alive.size());
  for (int64_t i = 0; i < count * panels.width; ++i) {
    GradientLanes<S>& g = lanes[i / panels.width];
    const int64_t lane = i % panels.width;
    g.dense = dense;
    if (i >= panels.tokens) {  // padding: a gradient of zero made from some logit
      g.scale[lane] = 1;
      g.peak[lane] = std::numeric_limits<S>::infinity();  // its exponential is 0: one that overflows, times 0, is NaN
      g.constant[lane] = g.slope[lane] = 0;
      g.logits[lane] = stored.at(0, 0);
      g.stride[lane] = all.stride(0);
      continue;
    }
    const int64_t t = alive[static_cast<size_t>(i)], p = t / all.width;
    const double scale = x.scale_of(t), chain = x.logit_scale / x.temperature_of(t);
    const double total = r.total[t], log_total = std::log(total), logp = r.logprobs[t];
    const double c = r.c[t], e = r.e ? r.e[t] : 0, entropy = r.e ? r.entropy[t] : 0;
    g.scale[lane] = static_cast<S>(scale);
    g.peak[lane] = r.peak[t];
    g.constant[lane] = static_cast<S>(chain * (-c - e * (entropy - log_total)) / total);
    g.slope[lane] = static_cast<S>(-chain * e * scale / total);
    g.logits[lane] = stored.at(p, 0) + t % all.width;
    g.stride[lane] = all.stride(p);
    const double logit = g.logits[lane][x.ids[t] * g.stride[lane]];
    const double squash = x.cap == 0 ? 1 : 1 - (logit / x.cap) * (logit / x.cap), prob = std::exp(logp);
    const double from_entropy = prob == 0 ? 0 : e * prob * (logp + entropy);
    own[static_cast<size_t>(i)] = static_cast<S>(chain * squash * (-c * std::expm1(logp) - from_entropy));
    own_at.push_back({x.ids[t], i});
  }
  std::sort(own_at.begin(), own_at.end(), [](const Target& a, const Target& b) { return a.id < b.id; });

  // For d_weight: hidden states by blocks of columns, [block][words of all tokens][panel].
  const auto panel_words = [&](int64_t p) { return panels.stride(p) / E::per_word; };
  const int64_t words = panels.padded() / E::per_word, column_blocks = ceil_div(x.H, panels.width);
  Buffer<Word> by_columns(d_weight ? column_blocks * words * panels.width : 0);
  if (d_weight) {
    parallel(column_blocks, words * panels.width, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        Word* out = by_columns.get() + b * words * panels.width;
        for (int64_t i = 0; i < panels.padded(); i += E::per_word) {
          const auto element = [&](int64_t token, int64_t h) {
            return token < panels.tokens && h < x.H ? x.at(alive[static_cast<size_t>(token)], h) : T(0.0f);
          };
          for (int64_t j = 0; j < panels.width; ++j) {
            const int64_t h = b * panels.width + j;
            *out++ = word<T, E>(element(i, h), E::per_word == 2 ? element(i + 1, h) : T(0.0f));
          }
        }
      }
    });
  }

  const Cuts cuts(x.V, ceil_div(x.H, E::per_word) * int64_t{sizeof(Word)});
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), cuts.segments());
  Weight<T, E> weight(weight_, cuts.block, threads);
  const int64_t lanes_of_block = cuts.block * panels.padded();  // elements of a gradient block
  Buffer<S> gradients(threads * lanes_of_block);
  Buffer<Word> pairs(E::per_word == 2 ? threads * 2 * lanes_of_block : 0);
  const int64_t hidden_size = panels.padded() * x.H;  // [panel][H][lane]
  Buffer<S> partial(need_hidden ? threads * hidden_size : 0), sum(need_hidden ? hidden_size : 0);
  std::atomic<int64_t> turn{0};
  const int64_t fetches = panels.fetches(x.H, ceil_div(cuts.block, E::per_word));

  over_segments(cuts, threads, [&](int64_t thread, const Segment& segment) {
    S* const g = gradients.get() + thread * lanes_of_block;
    Word* const by_row = pairs.get() + thread * 2 * lanes_of_block;
    Word* const by_token = by_row + lanes_of_block;
    S* const mine = partial.get() + thread * hidden_size;
    auto hit = std::lower_bound(own_at.begin(), own_at.end(), segment.first,
                                [](const Target& a, int64_t v) { return a.id < v; });
    for (int64_t v = segment.first; v < segment.last; v += cuts.block) {
      const int64_t rows = weight.rows(segment, v);
      for (int64_t p = 0; p < count; ++p) {
        GradientLanes<S> of_panel = lanes[p];
        for (int64_t lane = 0; lane < panels.stride(p); ++lane) of_panel.logits[lane] += v * of_panel.stride[lane];
        k.gradient[panels.vectors(p) - 1](of_panel, rows, static_cast<S>(x.cap), g + p * cuts.block * panels.width);
      }
      for (; hit != own_at.end() && hit->id < v + rows; ++hit) {
        const int64_t p = hit->lane / panels.width, lane = hit->lane % panels.width;
        g[p * cuts.block * panels.width + (hit->id - v) * panels.stride(p) + lane] =
            own[static_cast<size_t>(hit->lane)];
      }
      if (d_bias) {
        for (int64_t i = 0; i < rows; ++i) {
          double total = 0;
          for (int64_t p = 0; p < count; ++p) {
            const S* row = g + p * cuts.block * panels.width + i * panels.stride(p);
            for (int64_t lane = 0; lane < panels.size(p); ++lane) total += row[lane];
          }
          d_bias[v + i] += static_cast<S>(total);
        }
      }
      if (need_hidden) {
        Ahead ahead = weight.after(segment, v, fetches);
        HiddenProduct<E> product;
        product.weight = weight.elements(thread, v, rows, product.weight_row);
        product.rows = rows;
        product.columns = x.H;
        product.out = mine;
        product.panels = count;
        product.last_vectors = panels.vectors(count - 1);
        product.add = v != segment.first;
        product.gradient_panel = cuts.block * panels.width;
        if constexpr (E::per_word == 2) {
#if PPO_FAST_X86
          for (int64_t p = 0; p < count; ++p) {
            avx512_bf16::pair_gradient_rows(g + p * cuts.block * panels.width, rows, panels.stride(p),
                                            by_row + p * cuts.block * panels.width);
          }
#endif
          product.gradient = by_row;
        } else {
          product.gradient = g;
        }
        k.add_hidden(product, ahead);
      }
      if (d_weight) {
        WeightProduct<E> product;
        if constexpr (E::per_word == 2) {
#if PPO_FAST_X86
          for (int64_t p = 0; p < count; ++p) {
            avx512_bf16::pair_gradient_tokens(g + p * cuts.block * panels.width, rows * panels.stride(p),
                                              by_token + p * cuts.block * panels.width / 2);
          }
#endif
          product.gradient = by_token;
        } else {
          product.gradient = g;
        }
        product.panels = count;
        product.panel_rows = cuts.block;
        product.wide_words = panels.width / E::per_word;
        product.last_words = panel_words(count - 1);
        product.hidden = by_columns.get();
        product.rows = rows;
        product.columns = x.H;
        product.out = d_weight + v * x.H;
        product.out_row = x.H;
        Ahead nothing{nullptr, nullptr, 0};
        k.add_weight(product, nothing);
      }
    }
    if (!need_hidden) return;
    // Segments are taken in order, so whoever holds an earlier one is at work on it and this wait ends.
    while (turn.load(std::memory_order_acquire) != segment.index) std::this_thread::yield();
    if (segment.index == 0) {
      std::memcpy(sum.get(), mine, static_cast<size_t>(hidden_size) * sizeof(S));
    } else {
      for (int64_t i = 0; i < hidden_size; ++i) sum[i] += mine[i];
    }
    turn.store(segment.index + 1, std::memory_order_release);
  });

  if (need_hidden) {
    for (int64_t i = 0; i < panels.tokens; ++i) {
      const int64_t p = i / panels.width;
      const S* column = sum.get() + p * panels.width * x.H + i % panels.width;
      S* out = d_hidden_ + alive[static_cast<size_t>(i)] * x.H;
      for (int64_t h = 0; h < x.H; ++h) out[h] = column[h * panels.stride(p)];
    }
  }
  return d_hidden;
}

// ------------------------------------------------------------------------------------------------------------------ ops

std::tuple<Tensor, Tensor, Tensor, Tensor> head_forward(Tensor hidden,                      // [n, H]
                                                        Tensor weight,                      // [V, H]
                                                        std::optional<Tensor> bias,         // [V] stat dtype
                                                        Tensor token_ids,                   // [n] int64
                                                        std::optional<Tensor> temperature,  // [n] stat dtype
                                                        std::optional<double> softcap, double logit_scale,
                                                        std::optional<Tensor> logits,  // written
                                                        bool want_entropy) {
  std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor>> result;
  by_dtype(weight, [&](auto* type, auto element) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Chunk<T> chunk(hidden, weight, token_ids, temperature, softcap, logit_scale);
    result = forward<T, decltype(element)>(chunk, weight, bias, logits, want_entropy);
  });
  return *result;
}

Tensor head_backward(Tensor hidden, Tensor weight, Tensor token_ids, std::optional<Tensor> temperature,
                     std::optional<double> softcap, double logit_scale, Tensor logits, Tensor logprobs, Tensor entropy,
                     Tensor peak, Tensor total, Tensor c, std::optional<Tensor> e, bool need_hidden,
                     std::optional<Tensor> d_weight,  // [V, H] stat dtype, added to
                     std::optional<Tensor> d_bias) {  // [V] stat dtype, added to
  Tensor result = empty({0}, ScalarType::Float);
  by_dtype(weight, [&](auto* type, auto element) {
    using T = std::remove_pointer_t<decltype(type)>;
    using S = typename Chunk<T>::S;
    constexpr ScalarType dtype = Chunk<T>::dtype;
    const Chunk<T> x(hidden, weight, token_ids, temperature, softcap, logit_scale);
    RowResults<S> r;
    r.logprobs = data<S>(logprobs, "logprobs", dtype, {x.n});
    r.entropy = e.has_value() ? data<S>(entropy, "entropy", dtype, {x.n}) : nullptr;
    r.peak = data<S>(peak, "peak", dtype, {x.n});
    r.total = data<S>(total, "total", dtype, {x.n});
    r.c = data<S>(c, "c", dtype, {x.n});
    r.e = optional_data<S>(e, "e", dtype, {x.n});
    if (d_weight.has_value()) check_tensor(*d_weight, "d_weight", dtype, {x.V, x.H});
    if (d_bias.has_value()) check_tensor(*d_bias, "d_bias", dtype, {x.V});
    result = backward<T, decltype(element)>(x, weight, logits, r, need_hidden,
                                            d_weight.has_value() ? writable<S>(*d_weight) : nullptr,
                                            d_bias.has_value() ? writable<S>(*d_bias) : nullptr);
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("_head_forward", TORCH_BOX(&head_forward));
  m.impl("_head_backward", TORCH_BOX(&head_backward));
}

}  // namespace ppo_fast
