// What small_linear's kernels and their driver hand to each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "elements.h"

namespace ppo_fast {

constexpr int64_t kFeatures = 24;    // output features to a piece of work: whole tiles on every instruction set
constexpr int64_t kSumsRow = 32;     // their sums, as far apart as whole vectors need
constexpr int64_t kRowBlock = 64;    // rows that meet a feature in one go
constexpr int64_t kRowsPadded = 32;  // elements: rows of x are read in steps of up to so many

// One product's operands: x[i] . weight[j] over `depth` elements.
template <class X, class T> struct Factors {
  const X* x;  // rows of whole steps, zeros past `depth`
  int64_t x_row;
  const T* weight;
  int64_t weight_row;
  int64_t depth;
};

// out = x @ weight.T + more x @ more weight.T + bias.
template <class X, class T, class S, class Out> struct SmallLinear {
  Factors<X, T> main;
  Factors<S, S> extra;  // depth 0 if there is none
  const S* bias;        // [features] or null
  int64_t rows, features;
  Out* out;  // [rows][features]
};

}  // namespace ppo_fast
