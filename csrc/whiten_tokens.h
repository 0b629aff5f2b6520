// The body of whiten.cpp for one instruction set: a run of tokens.
#include "eight.h"

template <class S>
static void whiten_tokens(const S* x, const bool* mask, int64_t begin, int64_t end, double mean, double scale,
                          double origin, S* out) {
  for (int64_t i = begin; i < end;) {
    if (end - i >= 8 && all_live8(mask + i)) {
      v8 y;
      load8(x + i, y);
      y = (y - mean) * scale + origin;
      store8(out + i, y);
      i += 8;
      continue;
    }
    out[i] = mask[i] ? static_cast<S>((static_cast<double>(x[i]) - mean) * scale + origin) : S(0);
    ++i;
  }
}
