// What the matrix products multiply: tags for the element types of their operands.
#pragma once

#include <cstdint>

namespace ppo_fast {

// A word is what one scalar broadcast holds, one element or two, a lane what one lane of the vectors it meets holds in
// memory; Stat is the type of accumulators and statistics.
struct Single {  // float32, and 16-bit types after widening
  using Element = float;
  using Word = float;
  using Lane = float;
  using Stat = float;
  static constexpr int per_word = 1;
};
struct Double {
  using Element = double;
  using Word = double;
  using Lane = double;
  using Stat = double;
  static constexpr int per_word = 1;
};
struct Bf16Pair {  // two neighbours along the dimension that is summed over
  using Element = uint16_t;
  using Word = uint32_t;
  using Lane = uint32_t;
  using Stat = float;
  static constexpr int per_word = 2;
};

// Tokens to a panel, at most: two vectors of 16 lanes. Narrower instruction sets have narrower panels.
constexpr int kMaxPanel = 32;

// Memory that will be needed soon: `lines` cache lines of it are fetched with every 16 steps of a product. With a gap it
// is a column of strips, `pitch` bytes from one to the next, of which the first ends at `strip_end`.
struct Ahead {
  const char* next;
  const char* end;
  int64_t lines;
  int64_t gap = 0, pitch = 0;
  const char* strip_end = nullptr;
};

}  // namespace ppo_fast
