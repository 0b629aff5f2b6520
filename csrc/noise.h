// The noise of sampling: Philox4x32-10 (Salmon et al., 2011) keyed by a row's seed; the counter is (token / 4, half,
// position). Half 0 holds the upper words of four tokens' uniform numbers, half 1 the lower ones. Baseline code only;
// ppo_fast/ops/_noise.py has the same in plain PyTorch, linear_sample_rows.h in vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ppo_fast {

// Of one row.
struct Noise {
  uint32_t seed[2], position[2];

  explicit Noise(const int64_t* key) {
    for (int i = 0; i < 2; ++i) {
      seed[i] = static_cast<uint32_t>(static_cast<uint64_t>(key[0]) >> 32 * i);
      position[i] = static_cast<uint32_t>(static_cast<uint64_t>(key[1]) >> 32 * i);
    }
  }

  // Its half of the token's uniform number.
  uint32_t word(int64_t id, uint32_t half) const {
    uint32_t c[4] = {static_cast<uint32_t>(id / 4), half, position[0], position[1]};
    uint32_t k = seed[0], l = seed[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xd2511f53u} * c[0], b = uint64_t{0xcd9e8d57u} * c[2];
      c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k;
      c[1] = static_cast<uint32_t>(b);
      c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ l;
      c[3] = static_cast<uint32_t>(a);
      k += 0x9e3779b9u;
      l += 0xbb67ae85u;
    }
    return c[id % 4];
  }

  static double upper(uint32_t high) { return high * 0x1p-32; }

  // -log(E) of a token whose word 0 is known.
  double gumbel(int64_t id, uint32_t high) const {
    const double u = std::min(upper(high) + (word(id, 1) + 0.5) * 0x1p-64, 1 - 0x1p-53);
    return -std::log(-std::log1p(-u));
  }
};

}  // namespace ppo_fast
