// What linear_sample's kernels and their driver hand to each other.
#pragma once

#include <cstdint>

#include "linear_head.h"

namespace ppo_fast {

// A logit that may be the one drawn, or among the largest.
struct Hit {
  uint8_t row, lane;  // of its block, of its panel
};
static_assert(kMaxBlockRows <= 256);

// A block of logits in a panel.
template <class S> struct LogitsTile {
  const S* logits;  // [rows][panel]
  int64_t rows, panel;
  int64_t first;    // vocabulary id of the first row, a multiple of 4
};

// What the race of one panel's tokens needs, a token to a lane; see linear_sample.cpp. A logit is a hit if
// factor * (high word of its noise, 24 bits) + offset < exp(scale * (logit - best)), a little more being let through.
template <class S> struct alignas(64) RaceLanes {
  uint32_t seed[2][kMaxPanel], position[2][kMaxPanel];  // low and high words
  S factor[kMaxPanel], offset[kMaxPanel];
  S best[kMaxPanel];  // of the keys so far, over the scale, rounded down
  bool noisy;         // some lane looks at its noise
};

// The kernels of one instruction set; [0] for panels of one vector, [1] for panels of two. Hits come back in ascending
// order of the rows of each lane, their number as the result.
template <class E> struct SampleKernels {
  using S = typename E::Stat;
  int lanes;  // of a vector
  void (*logits[2])(const LogitsBlock<E>&, S* out, Ahead&);  // [rows][panel]
  // Adds a block to the sums, unjoined, and reports the logits that may win the race.
  int64_t (*race)(const LogitsTile<S>&, const RaceLanes<S>&, LaneSums<S>&, Hit*);
  void (*join)(LaneSums<S>&, int64_t lanes);
  // The logits above their lane's floor, NaN included.
  int64_t (*above)(const LogitsTile<S>&, const S* floor, Hit*);
};

}  // namespace ppo_fast
