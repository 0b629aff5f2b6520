// small_linear: out = x @ weight.T + bias for a few rows, the weight packed beforehand (ppo_fast/ops/small_linear.py).
//
// The packed weight is panels of 32 output features, [panel][word][feature], a word being one element along H or, in
// bfloat16, two neighbours. Each thread takes a run of panels, one stream in memory; a panel goes by pieces of up to 256
// words, each against all rows, in as few tiles as there can be, of equal height (8 rows x 32 features of accumulators
// at most), while the piece after it is fetched. The weight is read from memory once for any number of rows. x is read
// in place wherever its rows can be.
//
// Numerics. Accumulators are float32, float64 for float64. bfloat16 pairs multiply exactly where the CPU has
// AVX512-BF16; elsewhere 16-bit weights are widened in registers, x beforehand. Chains of 64 additions are added up in
// order, and so are pieces: what a row gets depends neither on the other rows nor on the number of threads.
#include <cstring>
#include <memory>

#include "isa.h"
#include "parallel.h"
#include "small_linear.h"
#include "tensors.h"

#define PPO_FAST_WANTS_BF16
#define PPO_FAST_BODY "small_linear_panels.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

template <class E, class Out> auto kernel() {
#if PPO_FAST_X86
  if constexpr (std::is_same_v<E, Bf16Pair>) {
    return &avx512_bf16::small_linear<E, Out>;
  } else
#endif
  {
    return PPO_FAST_PICK(small_linear<E, Out>);
  }
}

// The rows of x as words: in place where they can be.
template <class T, class E> class Rows {
 public:
  using Word = typename E::Word;
  static constexpr int per_word = E::per_word;

  explicit Rows(const Tensor& x) {
    const int64_t n = x.size(0), H = x.size(1), row = x.stride(0), column = H == 1 ? 1 : x.stride(1);
    const T* source = static_cast<const T*>(x.const_data_ptr());
    words_ = ceil_div(H, per_word);
    const bool whole = reinterpret_cast<uintptr_t>(source) % alignof(Word) == 0 && H % per_word == 0 && row % per_word == 0;
    // Rows that lie a multiple of a page apart share a few sets of the first-level cache.
    const bool apart = n <= 4 || row * static_cast<int64_t>(sizeof(T)) % 4096 != 0;
    if (sizeof(Word) == per_word * sizeof(T) && column == 1 && whole && apart) {
      words = reinterpret_cast<const Word*>(source);
      stride = row / per_word;
      return;
    }
    stride = words_;
    if (stride * static_cast<int64_t>(sizeof(Word)) % 4096 == 0) stride += 64 / static_cast<int64_t>(sizeof(Word));
    copy_.reset(new Word[static_cast<size_t>(n * stride)]);
    words = copy_.get();
    parallel(n, H, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) copy(source + i * row, H, column, copy_.get() + i * stride);
    });
  }

  const Word* words;
  int64_t stride;

 private:
  void copy(const T* from, int64_t H, int64_t column, Word* to) const {
    using Element = typename E::Element;
    std::memset(static_cast<void*>(to + words_ - 1), 0, sizeof(Word));  // the second half of an odd H
    Element* elements = reinterpret_cast<Element*>(to);
    if constexpr (sizeof(T) == sizeof(Element)) {
      for (int64_t k = 0; k < H; ++k) std::memcpy(elements + k, from + k * column, sizeof(T));
    } else if (column == 1) {
      PPO_FAST_PICK(widen<T>)(from, H, elements);
    } else {
      for (int64_t k = 0; k < H; ++k) elements[k] = static_cast<float>(from[k * column]);
    }
  }

  std::unique_ptr<Word[]> copy_;
  int64_t words_;
};

template <class T, class E, class Out>
void multiply(const Tensor& x, const Tensor& panels, const typename E::Stat* bias, const Tensor& out) {
  const int64_t n = x.size(0), words = ceil_div(x.size(1), E::per_word);
  if (n == 0) return;
  const Rows<T, E> rows(x);
  const SmallLinear<E, Out> job{rows.words, rows.stride, n, words,
                                static_cast<const typename E::Lane*>(panels.const_data_ptr()), bias, out.size(1),
                                static_cast<Out*>(out.mutable_data_ptr())};
  const auto run = kernel<E, Out>();
  parallel(panels.size(0), kPanelLanes * words, [&](int64_t begin, int64_t end) { run(job, begin, end); });
}

// [n, features] in x's dtype, or in that of the accumulators.
Tensor small_linear(Tensor x,                    // [n, H], any strides
                    Tensor panels,               // [ceil(features / 32), words, 32], in bfloat16 with a last axis of 2
                    std::optional<Tensor> bias,  // [features] stat dtype
                    int64_t features, bool wide) {
  const bool paired = x.scalar_type() == ScalarType::BFloat16;
  check(x.is_cpu() && x.dim() == 2 && x.size(1) > 0, "x", "a CPU tensor [n, H], H > 0");
  check(features > 0, "features", "positive");
  const int64_t count = ceil_div(features, kPanelLanes);
  if (paired) {
    check_tensor(panels, "panels", x.scalar_type(), {count, ceil_div(x.size(1), 2), kPanelLanes, 2});
  } else {
    check_tensor(panels, "panels", x.scalar_type(), {count, x.size(1), kPanelLanes});
  }
  const auto run = [&](auto* type, auto element, auto* to) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Out = std::remove_pointer_t<decltype(to)>;
    using E = decltype(element);
    const auto* added = optional_data<typename E::Stat>(bias, "bias", scalar_type_of<typename E::Stat>, {features});
    Tensor out = empty({x.size(0), features}, wide ? scalar_type_of<typename E::Stat> : x.scalar_type());
    multiply<T, E, Out>(x, panels, added, out);
    return out;
  };
  float* const single = nullptr;
  double* const twice = nullptr;
  BFloat16* const bf16 = nullptr;
  Half* const half = nullptr;
  switch (x.scalar_type()) {
    case ScalarType::Float: return run(single, Single{}, single);
    case ScalarType::Double: return run(twice, Double{}, twice);
    case ScalarType::Half: return wide ? run(half, WithHalf{}, single) : run(half, WithHalf{}, half);
    case ScalarType::BFloat16:
#if PPO_FAST_X86
      if (current_isa() >= kAvx512Bf16) {
        return wide ? run(bf16, Bf16Pair{}, single) : run(bf16, Bf16Pair{}, bf16);
      }
#endif
      return wide ? run(bf16, WithBf16Pair{}, single) : run(bf16, WithBf16Pair{}, bf16);
    default: throw std::invalid_argument("x must be float32, bfloat16, float16 or float64");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("small_linear", TORCH_BOX(&small_linear)); }

}  // namespace ppo_fast
