// Large fresh memory is mostly page faults: 2 MiB pages, where the system has them on request, make them rare.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ppo_fast {

// Before the first touch. A hint, which the system may ignore.
inline void ask_for_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

// Gives the whole pages in [begin, end) back to the system; what they held is lost.
inline void release_pages(void* begin_, void* end_) {
#if defined(__linux__) && defined(MADV_DONTNEED)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(begin_) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(end_) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#else
  (void)begin_;
  (void)end_;
#endif
}

}  // namespace ppo_fast
