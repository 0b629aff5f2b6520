// The body of gae.cpp for one instruction set: one row from its last token to its first.
#include "eight.h"

// See gae.cpp. Eight live tokens in a run are a scan in three steps, after which only the carried advantage waits for
// the tokens behind; any other token is taken by itself.
template <class S>
static RowMoments gae_row(const S* rewards, const S* values, const bool* mask, int64_t T, double gamma, double lam,
                          double bootstrap, S* advantages, S* returns) {
  const double c = gamma * lam;
  const v8 zero = {}, gammas = zero + gamma, c1 = zero + c, c2 = c1 * c1, c4 = c2 * c2;
  v8 powers = c1;
  for (int i = 6; i >= 0; --i) powers[i] = powers[i + 1] * c;
  double next_value = bootstrap, advantage = 0;
  double origin = 0, count = 0;
  v8 offsets = {}, squares8 = {};
  double offset = 0, squares = 0;  // sums of (advantage - origin) and its square
  int64_t t = T;                   // tokens from t on are done
  while (t > 0) {
    if (count > 0 && t >= 8 && all_live8(mask + t - 8)) {
      const v8 origins = zero + origin;
      v8 carried = zero + advantage, next = zero + next_value;  // in every element
      do {
        t -= 8;
        count += 8;
        v8 value, x;
        load8(values + t, value);
        load8(rewards + t, x);
        x = (x + gammas * __builtin_shufflevector(value, next, 1, 2, 3, 4, 5, 6, 7, 8)) - value;
        x += c1 * __builtin_shufflevector(x, zero, 1, 2, 3, 4, 5, 6, 7, 8);
        x += c2 * __builtin_shufflevector(x, zero, 2, 3, 4, 5, 6, 7, 8, 9);
        x += c4 * __builtin_shufflevector(x, zero, 4, 5, 6, 7, 8, 9, 10, 11);
        x += powers * carried;
        carried = __builtin_shufflevector(x, x, 0, 0, 0, 0, 0, 0, 0, 0);
        next = __builtin_shufflevector(value, value, 0, 0, 0, 0, 0, 0, 0, 0);
        value += x;
        store8(returns + t, value);
        store8(advantages + t, x);
        x -= origins;
        offsets += x;
        squares8 += x * x;
      } while (t >= 8 && all_live8(mask + t - 8));
      advantage = carried[0];
      next_value = next[0];
      continue;
    }
    --t;
    if (!mask[t]) {
      advantages[t] = returns[t] = 0;
      continue;
    }
    const double value = static_cast<double>(values[t]);
    advantage = (static_cast<double>(rewards[t]) + gamma * next_value - value) + c * advantage;
    next_value = value;
    advantages[t] = static_cast<S>(advantage);
    returns[t] = static_cast<S>(advantage + value);

    const double rounded = static_cast<double>(advantages[t]);
    if (count == 0) origin = rounded;
    count += 1;
    offset += rounded - origin;
    squares += (rounded - origin) * (rounded - origin);
  }
  if (count == 0) return {0, 0, 0};
  for (int i = 0; i < 8; ++i) {
    offset += offsets[i];
    squares += squares8[i];
  }
  const double m2 = squares - offset * offset / count;
  return {count, offset + count * origin, m2 < 0 ? 0 : m2};
}
