// What lora_linear's kernels and their driver hand to each other.
#pragma once

#include <cstdint>

namespace ppo_fast {

// Some rows of x and `down` against some features: out = x . weight + down . up + bias.
struct LoraRows {
  const float* x;  // [rows][x_row], `depth` of each row used
  int64_t x_row, depth;
  const float* down;  // [rows][down_row], `rank` of each row used
  int64_t down_row, rank;
  const float* panels;  // [panel][depth of weight, then rank of up][lane]
  const float* bias;    // of these features, or null
  int64_t rows, features;
  float* out;  // [rows][out_row]
  int64_t out_row;
};

}  // namespace ppo_fast
