// What every op needs of the LibTorch stable ABI: argument checks and output tensors. Baseline code only.
//
// The Python wrappers have checked their arguments in words by the time a kernel runs; the checks here keep a direct
// call of torch.ops.ppo_fast.* from reading memory that isn't there. std::invalid_argument arrives as ValueError and
// std::out_of_range as IndexError in Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace ppo_fast {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(bool condition, const char* argument, const char* expected) {
  if (!condition) throw std::invalid_argument(std::string(argument) + " must be " + expected);
}

// Contiguous, of this dtype and shape; `data` and `optional_data` return its memory.
inline void check_tensor(const Tensor& x, const char* name, ScalarType dtype, std::initializer_list<int64_t> shape) {
  check(x.is_cpu() && x.scalar_type() == dtype, name, "a CPU tensor of the statistics' (or its own fixed) dtype");
  bool same = x.dim() == static_cast<int64_t>(shape.size());
  int64_t axis = 0;
  for (const int64_t size : shape) same = same && x.size(axis++) == size;
  check(same && x.is_contiguous(), name, "contiguous and of the shape that the first argument implies");
}

template <class S>
const S* data(const Tensor& x, const char* name, ScalarType dtype, std::initializer_list<int64_t> shape) {
  check_tensor(x, name, dtype, shape);
  return static_cast<const S*>(x.const_data_ptr());
}
template <class S>
const S* optional_data(const std::optional<Tensor>& x, const char* name, ScalarType dtype,
                       std::initializer_list<int64_t> shape) {
  return x.has_value() ? data<S>(*x, name, dtype, shape) : nullptr;
}

// Live ids lie in [0, V). The check stands before any parallel region: an exception in one would end the process.
inline void check_token_ids(const int64_t* ids, const bool* mask, int64_t count, int64_t V) {
  for (int64_t i = 0; i < count; ++i) {
    if ((ids[i] < 0 || ids[i] >= V) && !(mask && !mask[i])) {
      throw std::out_of_range("token_ids must lie in [0, " + std::to_string(V) + "), got " + std::to_string(ids[i]) +
                              " at live position " + std::to_string(i));
    }
  }
}

template <class S> S* writable(const Tensor& x) { return static_cast<S*>(x.mutable_data_ptr()); }

inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::empty(std::vector<int64_t>(shape), dtype);
}

template <class S> constexpr ScalarType scalar_type_of = ScalarType::Float;
template <> inline constexpr ScalarType scalar_type_of<double> = ScalarType::Double;

// Of statistics and accumulators.
template <class T> using StatOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f with a null pointer to the element type.
template <class F> auto by_dtype(const Tensor& x, const char* name, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return f(static_cast<float*>(nullptr));
    case ScalarType::BFloat16: return f(static_cast<BFloat16*>(nullptr));
    case ScalarType::Half: return f(static_cast<Half*>(nullptr));
    case ScalarType::Double: return f(static_cast<double*>(nullptr));
    default: throw std::invalid_argument(std::string(name) + " must be float32, bfloat16, float16 or float64");
  }
}

}  // namespace ppo_fast
