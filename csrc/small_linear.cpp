// small_linear: out = x @ weight.T + bias for a few rows (ppo_fast/ops/small_linear.py).
//
// The weight is read where it lies, row by row. A tile is 6 rows of x by 4 of the weight on AVX-512: 24 dot products
// side by side, whose operands are vectors along H; the sums of their lanes cost a few percent. Each thread takes a run
// of features, and while all rows meet the features at hand, those after them are fetched: the weight is read from
// memory once, in one stream, for any number of rows up to 64.
//
// A second product (`extra`) is added before the sums are rounded: a low-rank adapter costs no pass over the result.
//
// Numerics. Accumulators are float32, float64 for float64. bfloat16 pairs multiply exactly where the CPU has
// AVX512-BF16; elsewhere 16-bit weights are widened in registers, x beforehand. Each lane's chain is cut after 64
// additions, and lanes are added up as a tree: what a row gets depends neither on the other rows nor on the number of
// threads.
#include <cstring>
#include <memory>

#include "isa.h"
#include "parallel.h"
#include "small_linear.h"
#include "tensors.h"

#define PPO_FAST_WANTS_BF16
#define PPO_FAST_BODY "small_linear_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

// The rows of x as whole steps of X: in place where they can be.
template <class X> class Rows {
 public:
  template <class T> explicit Rows(const Tensor& x, const T*) {
    const int64_t n = x.size(0), H = x.size(1), column = H == 1 ? 1 : x.stride(1);
    const T* source = static_cast<const T*>(x.const_data_ptr());
    stride = x.stride(0);
    // Rows that lie a multiple of a page apart share a few sets of the first-level cache.
    const bool apart = n <= 4 || stride * static_cast<int64_t>(sizeof(T)) % 4096 != 0;
    if constexpr (std::is_same_v<T, X>) {
      if (column == 1 && H % kRowsPadded == 0 && apart) {
        rows = source;
        return;
      }
    }
    const int64_t row = x.stride(0);
    stride = ceil_div(H, kRowsPadded) * kRowsPadded;
    if (stride * static_cast<int64_t>(sizeof(X)) % 4096 == 0) stride += kRowsPadded;
    copy_.reset(new X[static_cast<size_t>(n * stride)]());
    rows = copy_.get();
    parallel(n, H, [&](int64_t begin, int64_t end) {
      std::unique_ptr<T[]> gathered(column == 1 ? nullptr : new T[static_cast<size_t>(H)]);
      for (int64_t i = begin; i < end; ++i) {
        const T* from = source + i * row;
        if (gathered) {
          for (int64_t k = 0; k < H; ++k) gathered[static_cast<size_t>(k)] = from[k * column];
          from = gathered.get();
        }
        X* to = copy_.get() + i * stride;
        if constexpr (std::is_same_v<T, X>) {
          std::memcpy(to, from, static_cast<size_t>(H) * sizeof(T));
        } else {
          PPO_FAST_PICK(widen_row<T>)(from, H, to);
        }
      }
    });
  }

  const X* rows;
  int64_t stride;

 private:
  std::unique_ptr<X[]> copy_;
};

// [n, features] in x's dtype, or in that of the accumulators.
template <class T, class X, class Out, class Kernel>
Tensor multiply(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& extra, const std::optional<Tensor>& extra_weight, Kernel kernel) {
  using S = StatOf<T>;
  const int64_t n = x.size(0), H = x.size(1), features = weight.size(0);
  constexpr ScalarType stat = scalar_type_of<S>;
  SmallLinear<X, T, S, Out> job{};
  job.bias = optional_data<S>(bias, "bias", stat, {features});
  job.rows = n;
  job.features = features;
  Tensor out = empty({n, features}, std::is_same_v<Out, S> ? stat : x.scalar_type());
  if (n == 0) return out;
  const Rows<X> rows(x, static_cast<const T*>(nullptr));
  job.main = {rows.rows, rows.stride, static_cast<const T*>(weight.const_data_ptr()),
              features == 1 ? H : weight.stride(0), H};
  std::optional<Rows<S>> more;
  if (extra.has_value()) {
    const int64_t rank = extra->size(1);
    more.emplace(*extra, static_cast<const S*>(nullptr));
    job.extra = {more->rows, more->stride, data<S>(*extra_weight, "extra_weight", stat, {features, rank}), rank, rank};
  }
  job.out = static_cast<Out*>(out.mutable_data_ptr());
  parallel(ceil_div(features, kFeatures), kFeatures * H, [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
  return out;
}

Tensor small_linear(Tensor x,                     // [n, H], any strides
                    Tensor weight,                // [features, H] of x's dtype, elements of a row side by side
                    std::optional<Tensor> bias,   // [features] stat dtype
                    std::optional<Tensor> extra,  // [n, R] stat dtype, any strides, together with
                    std::optional<Tensor> extra_weight,  // [features, R] stat dtype
                    bool wide) {
  const auto type = x.scalar_type();
  check(x.is_cpu() && x.dim() == 2 && x.size(1) > 0, "x", "a CPU tensor [n, H], H > 0");
  check(weight.is_cpu() && weight.scalar_type() == type && weight.dim() == 2 && weight.size(0) > 0 &&
            weight.size(1) == x.size(1) && (weight.size(1) == 1 || weight.stride(1) == 1),
        "weight", "a CPU tensor [features, H] of x's dtype, with rows that are contiguous");
  check(extra.has_value() == extra_weight.has_value(), "extra", "given together with extra_weight");
  if (extra.has_value()) {
    check(extra->is_cpu() && extra->scalar_type() == (type == ScalarType::Double ? type : ScalarType::Float) &&
              extra->dim() == 2 && extra->size(0) == x.size(0) && extra->size(1) > 0,
          "extra", "a CPU tensor [n, R] of the accumulators' dtype, R > 0");
  }
  const auto run = [&](auto* in, auto* row, auto* to, auto kernel) {
    using T = std::remove_pointer_t<decltype(in)>;
    return multiply<T, std::remove_pointer_t<decltype(row)>, std::remove_pointer_t<decltype(to)>>(
        x, weight, bias, extra, extra_weight, kernel);
  };
  float* const single = nullptr;
  double* const twice = nullptr;
  BFloat16* const bf16 = nullptr;
  Half* const half = nullptr;
  switch (type) {
    case ScalarType::Float: return run(single, single, single, PPO_FAST_PICK(plain<float, float>));
    case ScalarType::Double: return run(twice, twice, twice, PPO_FAST_PICK(plain<double, double>));
    case ScalarType::Half:
      return wide ? run(half, single, single, PPO_FAST_PICK(widened<Half, float>))
                  : run(half, single, half, PPO_FAST_PICK(widened<Half, Half>));
    case ScalarType::BFloat16:
#if PPO_FAST_X86
      if (current_isa() >= kAvx512Bf16) {
        return wide ? run(bf16, bf16, single, &avx512_bf16::paired<BFloat16, float>)
                    : run(bf16, bf16, bf16, &avx512_bf16::paired<BFloat16, BFloat16>);
      }
#endif
      return wide ? run(bf16, single, single, PPO_FAST_PICK(widened<BFloat16, float>))
                  : run(bf16, single, bf16, PPO_FAST_PICK(widened<BFloat16, BFloat16>));
    default: throw std::invalid_argument("x must be float32, bfloat16, float16 or float64");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("small_linear", TORCH_BOX(&small_linear)); }

}  // namespace ppo_fast
