#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ppo_fast {

// Memory aligned to a cache line, not initialised. Made outside of parallel regions, since it may throw.
template <class X> class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = (static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(X) + 63) / 64 * 64;
    memory_.reset(static_cast<X*>(std::aligned_alloc(64, bytes)));
    if (!memory_) throw std::bad_alloc();
  }
  X* get() const { return memory_.get(); }
  X& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  struct Free {
    void operator()(X* p) const { std::free(p); }
  };
  std::unique_ptr<X[], Free> memory_;
};

}  // namespace ppo_fast
