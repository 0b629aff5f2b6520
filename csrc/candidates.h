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

// The largest logits of each row of a group that each thread has met. Rows are counted up to whole panels.
template <class S> class Lists {
 public:
  Lists(int64_t rows, int64_t threads, int64_t k, int64_t V, int64_t block)
      : threads_(threads),
        k_(k),
        capacity_(std::min(2 * k, V) + block),
        block_(block),
        rows_(ceil_div(rows, kMaxPanel) * kMaxPanel),
        floors_(threads * rows_),
        ends_(threads * rows_),
        unusable_(threads * rows_),
        memory_(rows * threads * capacity_) {
    for (int64_t t = 0; t < threads; ++t) {
      for (int64_t row = 0; row < rows_; ++row) {
        const bool used = row < rows;
        floors_[index(t, row)] = (used ? -1 : 1) * std::numeric_limits<S>::infinity();
        ends_[index(t, row)] = used ? list(t, row) : nullptr;
        unusable_[index(t, row)] = 0;
      }
    }
  }

  static int64_t bytes(int64_t k, int64_t V, int64_t block) {
    return (std::min(2 * k, V) + block) * int64_t{sizeof(Candidate<S>)};
  }

  // Of a panel's rows, from `row` on.
  const S* floors(int64_t thread, int64_t row) const { return floors_.get() + index(thread, row); }

  // A logit that isn't at most the floor.
  void add(int64_t thread, int64_t row, S logit, int64_t id) {
    const int64_t i = index(thread, row);
    if (logit < std::numeric_limits<S>::infinity()) {
      *ends_[i]++ = {logit, static_cast<int32_t>(id)};
    } else {
      unusable_[i] = 1;
    }
  }

  // Makes room for another block.
  void trim(int64_t thread, int64_t row) {
    const int64_t i = index(thread, row);
    Candidate<S>* const first = list(thread, row);
    if (ends_[i] - first <= capacity_ - block_) return;
    // What comes later has a higher id, so that a logit equal to the floor is too small.
    ends_[i] = cut_back(first, ends_[i], floors_[i]);
  }

  // The k largest in order; `count` is set to their number, 0 where some logit of the row is NaN or infinite.
  const Candidate<S>* sorted(int64_t row, int64_t& count) {
    Candidate<S>* const first = list(0, row);
    Candidate<S>* last = ends_[index(0, row)];
    for (int64_t t = 1; t < threads_; ++t) {
      const int64_t more = ends_[index(t, row)] - list(t, row);
      std::memmove(last, list(t, row), static_cast<size_t>(more) * sizeof(*first));
      last += more;
    }
    S floor;
    if (last - first > k_) last = cut_back(first, last, floor);
    std::sort(first, last);
    count = std::min<int64_t>(k_, last - first);
    for (int64_t t = 0; t < threads_; ++t) {
      if (unusable_[index(t, row)]) count = 0;
    }
    return first;
  }

 private:
  // What threads write to lies cache lines apart.
  int64_t index(int64_t thread, int64_t row) const { return thread * rows_ + row; }
  Candidate<S>* list(int64_t thread, int64_t row) const {
    return memory_.get() + (row * threads_ + thread) * capacity_;
  }

  // Leaves the k largest, of more than k, and at most half as many more; the new end. `floor` is set to the least.
  Candidate<S>* cut_back(Candidate<S>* first, Candidate<S>* last, S& floor) const {
    floor = likely_floor(first, last - first);
    const int64_t above = std::count_if(first, last, [&](const Candidate<S>& c) { return c.logit >= floor; });
    if (above < k_ || above > k_ + k_ / 2) {
      std::nth_element(first, first + k_ - 1, last);
      floor = first[k_ - 1].logit;
      return first + k_;
    }
    Candidate<S>* to = first;
    for (Candidate<S>* from = first; from < last; ++from) {
      const Candidate<S> c = *from;
      *to = c;
      to += c.logit >= floor;
    }
    return to;
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

  const int64_t threads_, k_, capacity_, block_, rows_;
  const Buffer<S> floors_;  // [thread][row], and so are the next two
  const Buffer<Candidate<S>*> ends_;
  const Buffer<int64_t> unusable_;
  const Buffer<Candidate<S>> memory_;  // [row][thread][capacity]
};

}  // namespace
}  // namespace ppo_fast
