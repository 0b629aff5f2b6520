// What small_linear's kernels and their driver hand to each other.
#pragma once

#include <cstdint>

#include "elements.h"

namespace ppo_fast {

constexpr int64_t kPanelLanes = 32;   // output features to a panel of the packed weight
constexpr int64_t kRowBlock = 64;    // rows that meet a panel in one go

// Rows of x against panels of output features.
template <class E, class Out> struct SmallLinear {
  const typename E::Word* x;  // [rows][x_row], `words` of each row used
  int64_t x_row;
  int64_t rows, words;
  const typename E::Lane* panels;  // [panels][words][kPanelLanes]
  const typename E::Stat* bias;    // [features] or null
  int64_t features;
  Out* out;                        // [rows][features]
};

}  // namespace ppo_fast
