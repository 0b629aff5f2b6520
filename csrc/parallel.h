// Splitting work over threads so that results never depend on how many there are: work is cut by shape alone, each
// piece writes to its own place, and pieces are combined in order by one thread. Baseline code only.
//
// Nothing that throws may run inside a parallel region: an exception on a worker thread ends the process.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace ppo_fast {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(begin, end) over disjoint ranges of [0, count); `cost` is the work of one index in elements touched. Threads start
// from 32768 elements (some 5 microseconds) each.
template <class F> void parallel(int64_t count, int64_t cost, const F& f) {
  if (count <= 0) return;
  const int64_t grain = cost >= 32768 ? 1 : 32768 / (cost > 0 ? cost : 1);
  torch::stable::parallel_for(0, count, grain, f);
}

// Pieces of work for whichever thread is free. Each thread may learn its next one early, to fetch the memory ahead.
class Queue {
 public:
  explicit Queue(int64_t count) : count_(count) {}
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }
  bool holds(int64_t piece) const { return piece < count_; }

 private:
  const int64_t count_;
  std::atomic<int64_t> next_{0};
};

// f(thread) once for every thread there is.
template <class F> void on_threads(int64_t threads, const F& f) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) f(t);
  });
}

constexpr int64_t kTokenBlock = 4096;

// The sums of f(begin, end, partial [Count]) over blocks of tokens.
template <int Count, class F> std::vector<double> sum_over_tokens(int64_t tokens, const F& f) {
  const int64_t blocks = ceil_div(tokens, kTokenBlock);
  std::vector<double> partial(static_cast<size_t>(blocks) * Count), sums(Count, 0.0);
  parallel(blocks, kTokenBlock * 4, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * kTokenBlock, end = tokens < begin + kTokenBlock ? tokens : begin + kTokenBlock;
      f(begin, end, &partial[static_cast<size_t>(b) * Count]);
    }
  });
  for (int64_t b = 0; b < blocks; ++b) {
    for (int k = 0; k < Count; ++k) sums[static_cast<size_t>(k)] += partial[static_cast<size_t>(b * Count + k)];
  }
  return sums;
}

}  // namespace ppo_fast
