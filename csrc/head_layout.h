// An output layer as its kernels' drivers see it: tokens in panels, the vocabulary in segments and blocks, the weight
// read block by block, and the softmax of a token put together from its segments.
//
// Included after for_each_isa.h: its bodies hold multiply.h, which widens rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "buffer.h"
#include "isa.h"
#include "linear_head.h"
#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {
namespace {

constexpr int64_t kSegments = 64;
constexpr int64_t kBlockBytes = 384 * 1024;  // of weight

// ------------------------------------------------------------------------------------------------------------- geometry

// How the tokens of a chunk lie in panels.
struct Panels {
  int64_t tokens, width, lanes;  // width = 2 * lanes

  int64_t count() const { return ceil_div(tokens, width); }
  int64_t size(int64_t p) const { return std::min(width, tokens - p * width); }
  // Vectors to a panel: the last may be narrow.
  int vectors(int64_t p) const { return size(p) > lanes ? 2 : 1; }
  int64_t stride(int64_t p) const { return vectors(p) * lanes; }
  // Lanes in all panels together.
  int64_t padded() const { return (count() - 1) * width + stride(count() - 1); }
  // How often the product of `rows` and all panels, `depth` words deep, fetches memory ahead.
  int64_t fetches(int64_t rows, int64_t depth) const {
    return count() * ceil_div(rows, vectors(0) == 2 ? 12 : 24) * ceil_div(depth, 16);
  }
};

// How the vocabulary is cut.
struct Cuts {
  int64_t V, block, segment;

  Cuts(int64_t V_, int64_t row_bytes) : V(V_) {
    block = std::clamp<int64_t>(kBlockBytes / row_bytes / 24 * 24, 24, kMaxBlockRows);
    segment = ceil_div(ceil_div(V, block), kSegments) * block;
  }
  int64_t segments() const { return ceil_div(V, segment); }
};

// Vocabulary rows [first, last), and the row where their thread goes on.
struct Segment {
  int64_t index, first, last, following;
};

// f(thread, segment) for all of them, on whichever thread is free.
template <class F> void over_segments(const Cuts& cuts, int64_t threads, const F& f) {
  Queue queue(cuts.segments());
  on_threads(threads, [&](int64_t thread) {
    for (int64_t segment = queue.take(), following; queue.holds(segment); segment = following) {
      following = queue.take();
      const int64_t first = segment * cuts.segment;
      f(thread, Segment{segment, first, std::min(cuts.V, first + cuts.segment), following * cuts.segment});
    }
  });
}

// -------------------------------------------------------------------------------------------------------------- weights

// The rows of the weight, block by block, in the two forms that products read: in place where they can.
template <class T, class E> class Weight {
 public:
  using Word = typename E::Word;
  using Element = typename E::Element;

  Weight(const Tensor& weight, int64_t block, int64_t threads)
      : memory_(static_cast<const T*>(weight.const_data_ptr())),
        V_(weight.size(0)),
        H_(weight.size(1)),
        row_(weight.stride(0)),
        column_(weight.stride(1)),
        block_(block) {
    const bool aligned = reinterpret_cast<uintptr_t>(memory_) % alignof(Word) == 0;
    const bool whole_words = E::per_word == 1 || (H_ % 2 == 0 && row_ % 2 == 0 && aligned);
    in_place_ = (H_ == 1 || column_ == 1) && whole_words;
    even_ = ceil_div(H_, E::per_word) * E::per_word;
    dense_.reset(new Buffer<T>(in_place_ ? 0 : threads * block * even_));
    wide_.reset(new Buffer<Element>(sizeof(T) == sizeof(Element) ? 0 : threads * block * H_));
  }

  // Rows [v, v + rows) as elements; `row` is set to the distance between rows, an even number for pairs.
  const Element* elements(int64_t thread, int64_t v, int64_t rows, int64_t& row) {
    const T* source = dense_rows(thread, v, rows, row);
    if constexpr (sizeof(T) == sizeof(Element)) {
      return reinterpret_cast<const Element*>(source);
    } else {
      const auto widen = PPO_FAST_PICK(widen<T>);
      Element* out = wide_->get() + thread * block_ * H_;
      for (int64_t i = 0; i < rows; ++i) widen(source + i * row, H_, out + i * H_);
      row = H_;
      return out;
    }
  }

  // The same as words along H.
  const Word* words(int64_t thread, int64_t v, int64_t rows, int64_t& row) {
    const Element* source = elements(thread, v, rows, row);
    row /= E::per_word;
    return reinterpret_cast<const Word*>(source);
  }

  // Rows to the block at v.
  int64_t rows(const Segment& segment, int64_t v) const { return std::min(block_, segment.last - v); }

  // The memory of the block that is read after the one at v.
  Ahead after(const Segment& segment, int64_t v, int64_t fetches) const {
    const int64_t next = v + block_ < segment.last ? v + block_ : segment.following;
    if (next >= V_ || column_ != 1) return {nullptr, nullptr, 0};
    const char* begin = reinterpret_cast<const char*>(memory_ + next * row_);
    const char* end = reinterpret_cast<const char*>(memory_ + (std::min(V_, next + block_) - 1) * row_ + H_);
    return {begin, end, ceil_div(ceil_div(end - begin, 64), std::max<int64_t>(fetches, 1))};
  }

 private:
  const T* dense_rows(int64_t thread, int64_t v, int64_t rows, int64_t& stride) {
    const T* source = memory_ + v * row_;
    stride = row_;
    if (in_place_) return source;
    stride = even_;
    T* out = dense_->get() + thread * block_ * even_;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < H_; ++k) out[i * even_ + k] = source[i * row_ + k * column_];
      for (int64_t k = H_; k < even_; ++k) out[i * even_ + k] = T(0.0f);
    }
    return out;
  }

  const T* memory_;
  int64_t V_, H_, row_, column_, block_, even_;
  bool in_place_;
  std::unique_ptr<Buffer<T>> dense_;
  std::unique_ptr<Buffer<Element>> wide_;
};

// One word of an operand from the elements that share it.
template <class T, class E> typename E::Word word(T first, T second) {
  if constexpr (E::per_word == 1) {
    (void)second;
    return static_cast<typename E::Word>(first);
  } else {
    uint16_t low, high;
    std::memcpy(&low, &first, 2);
    std::memcpy(&high, &second, 2);
    return low | static_cast<uint32_t>(high) << 16;
  }
}

// ------------------------------------------------------------------------------------------------------------ arguments

// The tokens and what is done to their logits.
template <class T> struct HeadRows {
  using S = StatOf<T>;
  static constexpr ScalarType dtype = scalar_type_of<S>;

  const T* hidden;
  int64_t row, column;  // strides of hidden
  int64_t n, H, V;
  const S* temperature;  // null for 1
  double cap, logit_scale;

  HeadRows(const Tensor& hidden_, const Tensor& weight, const std::optional<Tensor>& temperature_,
           std::optional<double> softcap, double logit_scale_) {
    check(hidden_.is_cpu() && hidden_.dim() == 2, "hidden", "a CPU tensor [n, H]");
    check(weight.is_cpu() && weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "weight",
          "a CPU tensor [V, H], not empty");
    check(hidden_.scalar_type() == weight.scalar_type(), "hidden", "of the dtype of weight");
    check(hidden_.size(1) == weight.size(1), "hidden", "as wide as weight");
    hidden = static_cast<const T*>(hidden_.const_data_ptr());
    row = hidden_.stride(0);
    column = hidden_.stride(1);
    n = hidden_.size(0);
    H = hidden_.size(1);
    V = weight.size(0);
    temperature = optional_data<S>(temperature_, "temperature", dtype, {n});
    cap = softcap.value_or(0);
    logit_scale = logit_scale_;
  }

  T at(int64_t t, int64_t k) const { return hidden[t * row + k * column]; }
  double temperature_of(int64_t t) const { return temperature ? temperature[t] : 1.0; }
  // From a stored logit to the softmax: a softcap has the logit scale behind it.
  double scale_at(double temperature_) const { return (cap == 0 ? logit_scale : 1.0) / temperature_; }
  double scale_of(int64_t t) const { return scale_at(temperature_of(t)); }
};

// Rows [first, first + panels.tokens) as panels of words [word][token]; zeros in the lanes past the last.
template <class E, class T>
void pack_panels(const HeadRows<T>& x, int64_t first, const Panels& panels, typename E::Word* packed) {
  using Word = typename E::Word;
  const int64_t words = ceil_div(x.H, E::per_word);
  parallel(panels.count(), x.H * panels.width, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      Word* out = packed + p * words * panels.width;
      for (int64_t j = 0; j < words; ++j) {
        for (int64_t lane = 0; lane < panels.stride(p); ++lane) {
          const int64_t i = p * panels.width + lane, t = first + i, h = j * E::per_word;
          *out++ = i < panels.tokens ? word<T, E>(x.at(t, h), h + 1 < x.H ? x.at(t, h + 1) : T(0.0f)) : Word(0);
        }
      }
    }
  });
}

// The block at v before any panel: `hidden` is still to be given.
template <class T, class E>
LogitsBlock<E> logits_block(const HeadRows<T>& x, Weight<T, E>& weight, const typename E::Stat* bias, int64_t thread,
                            const Segment& segment, int64_t v) {
  using S = typename E::Stat;
  LogitsBlock<E> block{};
  block.rows = weight.rows(segment, v);
  block.weight = weight.words(thread, v, block.rows, block.weight_row);
  block.words = ceil_div(x.H, E::per_word);
  block.first = v;
  block.bias = bias ? bias + v : nullptr;
  block.cap = static_cast<S>(x.cap);
  block.into_cap = static_cast<S>(x.cap == 0 ? 0 : x.logit_scale / x.cap);
  return block;
}

// -------------------------------------------------------------------------------------------------------------- softmax

// The sums of `tokens` lanes before their first logit; scale(lane) as HeadRows has it.
template <class S, class F> void begin_sums(LaneSums<S>& s, int64_t tokens, const F& scale) {
  for (int64_t lane = 0; lane < kMaxPanel; ++lane) {
    s.scale[lane] = static_cast<S>(lane < tokens ? scale(lane) : 1.0);
    s.peak[lane] = s.joined_peak[lane] = std::numeric_limits<S>::lowest();
    s.total[lane] = s.weighted[lane] = s.target[lane] = 0;
    s.joined_total[lane] = s.joined_weighted[lane] = 0;
  }
}

// What a segment of the vocabulary amounts to for one token.
template <class S> struct Part {
  S peak, target;
  double total, weighted;
};

// The softmax of a token: `total` sums e = exp(scale * (logit - peak)), `weighted` e * (logit - peak).
struct Softmax {
  double peak, total, weighted;
};

// From the token's segments, `stride` parts apart.
template <class S> Softmax joined(const Part<S>* parts, int64_t segments, int64_t stride, double scale) {
  Softmax sum{std::numeric_limits<S>::lowest(), 0, 0};
  for (int64_t s = 0; s < segments; ++s) sum.peak = std::max<double>(sum.peak, parts[s * stride].peak);
  for (int64_t s = 0; s < segments; ++s) {
    const Part<S>& part = parts[s * stride];
    if (part.total == 0) continue;  // nothing but -inf
    const double drop = part.peak - sum.peak, rescale = std::exp(scale * drop);
    sum.weighted += rescale * (part.weighted + part.total * drop);
    sum.total += rescale * part.total;
  }
  return sum;
}

// ------------------------------------------------------------------------------------------------------------- operands

// f(element type, operand type), as null pointers.
template <class F> void by_dtype(const Tensor& weight, const F& f) {
  switch (weight.scalar_type()) {
    case ScalarType::Float: return f(static_cast<float*>(nullptr), Single{});
    case ScalarType::Double: return f(static_cast<double*>(nullptr), Double{});
    case ScalarType::Half: return f(static_cast<Half*>(nullptr), Single{});
    case ScalarType::BFloat16:
#if PPO_FAST_X86
      if (current_isa() == kAvx512Bf16) return f(static_cast<BFloat16*>(nullptr), Bf16Pair{});
#endif
      return f(static_cast<BFloat16*>(nullptr), Single{});
    default: throw std::invalid_argument("weight must be float32, bfloat16, float16 or float64");
  }
}

}  // namespace
}  // namespace ppo_fast
