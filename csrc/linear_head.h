// What the output layer's kernels and their driver hand to each other.
#pragma once

#include <cstdint>

#include "elements.h"

namespace ppo_fast {

constexpr int64_t kMaxBlockRows = 192;  // vocabulary rows to a block; divisible by every tile

// Where a token's own logit is found: `id` in the vocabulary, `lane` in its panel.
struct Target {
  int64_t id;
  int64_t lane;
};

// The softmax of one panel of tokens, one a lane, over the vocabulary rows met so far. A logit here is what is stored:
// bias and softcap applied, scale not.
template <class S> struct alignas(64) LaneSums {
  S scale[kMaxPanel];                         // by which a logit is multiplied on its way into the softmax
  S peak[kMaxPanel];                          // largest logit; lowest finite number before the first
  S total[kMaxPanel], weighted[kMaxPanel];    // sums of e = exp(scale * (logit - peak)) and of e * (logit - peak)
  S target[kMaxPanel];                        // the token's own logit
  S joined_peak[kMaxPanel];                   // the peak that the two below refer to
  double joined_total[kMaxPanel], joined_weighted[kMaxPanel];  // earlier blocks
  const Target* next;                         // targets in ascending order, from the first not met; ends in id INT64_MAX
};

// Vocabulary rows against one panel of tokens.
template <class E> struct LogitsBlock {
  using S = typename E::Stat;
  const typename E::Word* weight;  // [rows][weight_row], `words` of each row used
  int64_t weight_row;
  const typename E::Word* hidden;  // [words][panel]
  int64_t words, rows;
  int64_t first;                   // vocabulary id of the first row
  const S* bias;                   // [rows] or null
  S cap, into_cap;                 // logit = cap * tanh(into_cap * z); cap = 0 for none
};

// And the softmax of their logits.
template <class E> struct ScoreBlock : LogitsBlock<E> {
  using S = typename E::Stat;
  S* logits;                       // [rows][panel], stored past the caches; null to store nothing
  LaneSums<S>* sums;
};

// gradient = e * (constant + slope * d), d = logit - peak, e = exp(scale * d); times 1 - (logit / cap)^2 with a softcap.
template <class S> struct alignas(64) GradientLanes {
  S scale[kMaxPanel], peak[kMaxPanel], constant[kMaxPanel], slope[kMaxPanel];
  const S* logits[kMaxPanel];   // each lane's logit of the first row
  int64_t stride[kMaxPanel];    // and the distance to its logit of the next
  bool dense;                   // the lanes lie side by side
};

// d_hidden of all panels: out[panel][column][token] (+)= sum over vocabulary rows of weight * gradient.
template <class E> struct HiddenProduct {
  const typename E::Element* weight;  // [rows][weight_row]
  int64_t weight_row;
  int64_t rows, columns;             // rows <= kMaxBlockRows
  const typename E::Word* gradient;  // [panel][words of the rows][token], panels `gradient_panel` apart
  int64_t gradient_panel;
  typename E::Stat* out;
  int64_t panels;
  int last_vectors;                  // of the last panel, 2 of the others
  bool add;
};

// d_weight of some vocabulary rows: out[row][column] += sum over tokens of gradient * hidden.
template <class E> struct WeightProduct {
  const typename E::Word* gradient;  // panels of [panel_rows][words of the panel's tokens]
  int64_t panels, panel_rows, wide_words, last_words;  // words to a row, in all panels but the last, and there
  const typename E::Word* hidden;    // blocks of columns, each [words of all tokens][panel]
  int64_t rows, columns;
  typename E::Stat* out;             // [rows][out_row]
  int64_t out_row;
};

// The kernels of one instruction set; [0] for panels of one vector, [1] for panels of two.
template <class E> struct HeadKernels {
  using S = typename E::Stat;
  int lanes;  // of a vector
  void (*score[2])(const ScoreBlock<E>&, Ahead&);
  void (*join)(LaneSums<S>&, int64_t lanes);
  void (*gradient[2])(const GradientLanes<S>&, int64_t rows, S cap, S* out);  // [rows][panel]
  void (*add_hidden)(const HiddenProduct<E>&, Ahead&);
  void (*add_weight)(const WeightProduct<E>&, Ahead&);
};

}  // namespace ppo_fast
