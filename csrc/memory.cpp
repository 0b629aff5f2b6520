// _fresh and _rounded: buffers of hundreds of megabytes, in which page faults cost more than what is done with them.
#include <algorithm>
#include <cstring>

#include "isa.h"
#include "pages.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "memory_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

constexpr int64_t kLarge = int64_t{4} << 20;  // bytes from which memory comes from the system, not from a free list
constexpr int64_t kPiece = int64_t{1} << 20;  // bytes to a task

// [rows, columns] in the statistics' dtype for `like`, holding zeros or anything.
Tensor fresh(Tensor like, int64_t rows, int64_t columns, bool zero) {
  check(rows >= 0 && columns >= 0, "rows and columns", "at least 0");
  const bool wide = like.scalar_type() == ScalarType::Double;
  Tensor x = empty({rows, columns}, wide ? ScalarType::Double : ScalarType::Float);
  const int64_t bytes = x.numel() * (wide ? 8 : 4);
  char* memory = writable<char>(x);
  const bool large = bytes >= kLarge;
  parallel(zero || large ? ceil_div(bytes, kPiece) : 0, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      char* piece = memory + p * kPiece;
      const int64_t size = std::min(kPiece, bytes - p * kPiece);
      if (large) make_pages(piece, size);
      if (zero) std::memset(piece, 0, static_cast<size_t>(size));
    }
  });
  return x;
}

// A float32 tensor as bfloat16. The source's memory goes back to the system as it is read: the two never exist at once.
Tensor rounded(Tensor source) {
  check(source.is_cpu() && source.scalar_type() == ScalarType::Float && source.dim() == 2 && source.is_contiguous(),
        "source", "a contiguous float32 CPU tensor [rows, columns]");
  Tensor out = empty({source.size(0), source.size(1)}, ScalarType::BFloat16);
  const int64_t n = source.numel(), piece = kPiece / 4;
  float* from = writable<float>(source);
  uint16_t* to = writable<uint16_t>(out);
  const bool large = n * 2 >= kLarge;
  const auto convert = PPO_FAST_PICK(round_to_bfloat);
  parallel(ceil_div(n, piece), piece, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * piece, last = std::min(n, first + piece);
      if (large) make_pages(to + first, (last - first) * 2);
      convert(from + first, last - first, to + first);
      release_pages(from + first, (last - first) * 4);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("_fresh", TORCH_BOX(&fresh));
  m.impl("_rounded", TORCH_BOX(&rounded));
}

}  // namespace ppo_fast
