// The k largest logits of some rows, gathered by several threads in passing. A thread lists what lies above its floor; a
// full list is cut back to about its k largest, and the floor rises to the least of them. Of V logits in random order a
// list takes k (1 + ln(V / k)), in ascending order all of them. Baseline code only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "head_layout.h"

namespace ppo_fast {
namespace {

template <class S> struct Candidate {
  S logit;
  int32_t id;

  // The order of top-k and top-p.
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  }
};

// The largest logits of each row of a group that each thread has met.
template <class S> class Lists {
 public:
  Lists(int64_t rows, int64_t threads, int64_t k, int64_t V, int64_t block)
      : threads_(threads),
        k_(k),
        capacity_(std::min(2 * k, V) + block),
        block_(block),
        rows_(ceil_div(rows, kMaxPanel) * kMaxPanel),
        floors_(threads * rows_),
        counts_(threads * rows_),
        unusable_(threads * rows_),
        memory_(rows * threads * capacity_) {
    std::fill_n(floors_.get(), threads * rows_, -std::numeric_limits<S>::infinity());
    std::fill_n(counts_.get(), threads * rows_, int64_t{0});
    std::fill_n(unusable_.get(), threads * rows_, int64_t{0});
  }

  static int64_t bytes(int64_t k, int64_t V, int64_t block) {
    return (std::min(2 * k, V) + block) * int64_t{sizeof(Candidate<S>)};
  }

  // Of the rows from `row` on; those past the last row are never read back.
  const S* floors(int64_t thread, int64_t row) const { return floors_.get() + index(thread, row); }

  void add(int64_t thread, int64_t row, S logit, int64_t id) {
    if (!(logit < std::numeric_limits<S>::infinity())) {
      unusable_[index(thread, row)] = 1;
      return;
    }
    list(thread, row)[counts_[index(thread, row)]++] = {logit, static_cast<int32_t>(id)};
  }

  // Makes room for another block: most of what isn't among the k largest goes, and the floor rises.
  void trim(int64_t thread, int64_t row) {
    int64_t& count = counts_[index(thread, row)];
    if (count <= capacity_ - block_) return;
    Candidate<S>* first = list(thread, row);
    S floor = likely_floor(first, count);
    int64_t kept = std::count_if(first, first + count, [=](const Candidate<S>& c) { return c.logit >= floor; });
    if (k_ <= kept && kept <= k_ + k_ / 2) {
      int64_t to = 0;
      for (int64_t from = 0; from < count; ++from) {
        const Candidate<S> c = first[from];
        first[to] = c;
        to += c.logit >= floor;
      }
    } else {
      std::nth_element(first, first + k_ - 1, first + count);
      floor = first[k_ - 1].logit;
      kept = k_;
    }
    count = kept;
    floors_[index(thread, row)] = floor;  // what comes later has a higher id, so an equal logit is too small
  }

  // The k largest in order; `count` is set to their number, 0 where some logit of the row is NaN or infinite.
  const Candidate<S>* sorted(int64_t row, int64_t& count) {
    Candidate<S>* first = list(0, row);
    count = 0;
    for (int64_t t = 0; t < threads_; ++t) {
      const int64_t more = counts_[index(t, row)];
      std::memmove(first + count, list(t, row), static_cast<size_t>(more) * sizeof(*first));
      count += more;
    }
    for (int64_t t = 0; t < threads_; ++t) {
      if (unusable_[index(t, row)]) count = 0;
    }
    if (count > k_) {
      std::nth_element(first, first + k_, first + count);
      count = k_;
    }
    std::sort(first, first + count);
    return first;
  }

 private:
  // What threads write to lies cache lines apart.
  int64_t index(int64_t thread, int64_t row) const { return thread * rows_ + row; }
  Candidate<S>* list(int64_t thread, int64_t row) const {
    return memory_.get() + (row * threads_ + thread) * capacity_;
  }

  // A little below the k-th largest logit, judged by a sample.
  S likely_floor(const Candidate<S>* first, int64_t count) const {
    constexpr int64_t size = 128;
    S sample[size];
    for (int64_t i = 0; i < size; ++i) sample[i] = first[i * count / size].logit;
    const int64_t rank = std::min<int64_t>(size - 1, (k_ + k_ / 5) * size / count);
    std::nth_element(sample, sample + rank, sample + size, [](S a, S b) { return a > b; });
    return sample[rank];
  }

  int64_t threads_, k_, capacity_, block_, rows_;
  Buffer<S> floors_;  // [thread][row], and so are the next two
  Buffer<int64_t> counts_, unusable_;
  Buffer<Candidate<S>> memory_;  // [row][thread][capacity]
};

}  // namespace
}  // namespace ppo_fast
