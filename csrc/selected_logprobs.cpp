// selected_logprobs: the log-prob of one token per row of logits [A, B, V], the entropy of the row, and its gradient.
//
// Forward: live rows are cut into segments of 32768 columns -> each segment in one pass, memory read once, gives a
// reference r, sum of exp((x - r) / T) and, if the entropy is wanted, the same sum weighted by x - r -> segments of a
// row are joined in order. Backward: each element is exp((x - r) / T) * (constant + slope * (x - r)), written once,
// over the logits or into a fresh tensor past the caches; the token's own element is then set from double arithmetic.
//
// Numerics. Differences x - r are exact for close neighbours wherever the row lies, so logits around -1e4 cost
// nothing. The reference trails the maximum by at most 2 nats: the entropy is the difference of two numbers of the
// size of that lag (with 8 nats it lost a digit on peaked rows). Blocks of 2048 are summed in float32 lanes, 32 terms
// to a lane at AVX-512, and joined in double. The reference's own term is exactly 1, so the total is at least 1, and
// no log-prob comes out above 0, no entropy below: where a token stands above the reference, the reference alone
// takes an eighth of it.
//   The backward pass knows a row's normaliser only as lse, in float32 good to |lse| * 6e-8 relative in every
// probability. Rows beyond |lse| > 32 (2e-6) are summed again, the second read coming from a cache; without that,
// logits at -1e4 would be off by 5e-4 each, all to one side, and float64 ones at 1e20 would overflow.
//   Bits depend on the row, its width and the instruction set: not on threads, other rows, strides or alignment.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "pages.h"
#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {

constexpr int64_t kSegment = 32768;  // columns to a task: 5 for 151936, so that one row keeps several threads busy
constexpr int64_t kBlock = 2048;     // columns between two looks at what is above the reference
constexpr int64_t kFirstBlock = 256;
constexpr double kSlack = 2;         // nats by which the maximum may exceed the reference

// What part of a row amounts to, in the units of its logits.
struct RowSums {
  double reference;  // -inf where every element is
  double total;      // sum of exp((x - reference) / T); NaN where an element is NaN or +inf
  double weighted;   // sum of the same times (x - reference)
};

// gradient_j = exp(d / T) * (constant + slope * d), d = x_j - reference.
struct RowGradient {
  double reference, temperature, constant, slope;
};

}  // namespace ppo_fast

#define PPO_FAST_BODY "selected_logprobs_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

template <class T> auto row_sums_kernel(bool entropy) {
  if constexpr (std::is_same_v<T, double>) {
    return entropy ? &portable::row_sums<T, true> : &portable::row_sums<T, false>;
  } else {
    return entropy ? PPO_FAST_PICK(row_sums<T, true>) : PPO_FAST_PICK(row_sums<T, false>);
  }
}

template <class T> auto row_gradient_kernel(bool stream) {
  if constexpr (std::is_same_v<T, double>) {
    return &portable::row_gradient<T, false>;
  } else {
    return stream ? PPO_FAST_PICK(row_gradient<T, true>) : PPO_FAST_PICK(row_gradient<T, false>);
  }
}

// Joins the segments of a row, in order.
RowSums join(const RowSums* segments, int64_t count, double temperature) {
  RowSums row{-std::numeric_limits<double>::infinity(), 0, 0};
  for (int64_t s = 0; s < count; ++s) row.reference = std::max(row.reference, segments[s].reference);
  for (int64_t s = 0; s < count; ++s) {
    const RowSums& part = segments[s];
    if (part.total == 0) continue;  // nothing but -inf
    const double drop = part.reference - row.reference, scale = std::exp(drop / temperature);
    row.total += scale * part.total;
    row.weighted += scale * (part.weighted + part.total * drop);
  }
  return row;
}

// Rows of [A, B, V] by flat index a * B + b.
template <class T> struct Rows {
  T* base;
  int64_t B, V, stride_a, stride_b;

  Rows(const Tensor& logits, T* memory)
      : base(memory), B(logits.size(1)), V(logits.size(2)), stride_a(logits.stride(0)), stride_b(logits.stride(1)) {}
  T* operator[](int64_t row) const { return base + (row / B) * stride_a + (row % B) * stride_b; }
};

// Through memcpy: rows may stand at any address.
template <class T> double element(const T* row, int64_t column) {
  T x;
  std::memcpy(&x, row + column, sizeof(x));
  return static_cast<double>(static_cast<StatOf<T>>(x));
}
template <class T> void set_element(T* row, int64_t column, double value) {
  const T x = static_cast<T>(static_cast<StatOf<T>>(value));
  std::memcpy(static_cast<void*>(row + column), &x, sizeof(x));
}

void check_logits(const Tensor& logits) {
  check(logits.is_cpu() && logits.dim() == 3, "logits", "a CPU tensor [A, B, V]");
  check(logits.size(2) < 2 || logits.stride(2) == 1, "logits", "contiguous in its last dimension");
}

// Whether no two rows share memory.
bool rows_are_apart(const Tensor& logits) {
  int64_t near = 1, far = 0;
  if (logits.stride(0) < logits.stride(1)) std::swap(near, far);
  int64_t extent = logits.size(2);  // of what lies within one step of the dimension
  for (const int64_t dim : {near, far}) {
    if (logits.size(dim) < 2) continue;
    if (logits.stride(dim) < extent) return false;
    extent += (logits.size(dim) - 1) * logits.stride(dim);
  }
  return true;
}

// f(index of a row, first column, columns) for every segment of one row, in order.
template <class F> void over_row(int64_t i, int64_t V, const F& f) {
  for (int64_t column = 0; column < V; column += kSegment) f(i, column, std::min(kSegment, V - column));
}

// The same for `count` rows, in parallel.
template <class F> void over_segments(int64_t count, int64_t V, const F& f) {
  const int64_t segments = ceil_div(V, kSegment);
  parallel(count * segments, std::min(V, kSegment), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t column = task % segments * kSegment;
      f(task / segments, column, std::min(kSegment, V - column));
    }
  });
}

// ------------------------------------------------------------------------------------------------------------ forward

template <class T>
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& logits, const Tensor& token_ids, const Tensor& temperature_,
                                           const std::optional<Tensor>& mask_, bool return_entropy) {
  using S = StatOf<T>;
  constexpr ScalarType dtype = scalar_type_of<S>;
  const int64_t A = logits.size(0), B = logits.size(1), V = logits.size(2);
  const int64_t* ids = data<int64_t>(token_ids, "token_ids", ScalarType::Long, {A, B});
  const S* temperature = data<S>(temperature_, "temperature", dtype, {A, B});
  const bool* mask = optional_data<bool>(mask_, "mask", ScalarType::Bool, {A, B});
  const Rows<const T> rows(logits, static_cast<const T*>(logits.const_data_ptr()));
  check_token_ids(ids, mask, A * B, V);
  std::vector<int64_t> live;
  for (int64_t row = 0; row < A * B; ++row) {
    if (!mask || mask[row]) live.push_back(row);
  }

  Tensor logprobs_ = empty({A, B}, dtype), lse_ = empty({A, B}, dtype);
  Tensor entropy_ = return_entropy ? empty({A, B}, dtype) : empty({0}, dtype);
  S *logprobs = writable<S>(logprobs_), *lse = writable<S>(lse_), *entropy = writable<S>(entropy_);
  std::fill_n(logprobs, A * B, S(0));
  std::fill_n(lse, A * B, S(0));
  if (return_entropy) std::fill_n(entropy, A * B, S(0));

  const int64_t count = static_cast<int64_t>(live.size()), segments = ceil_div(V, kSegment);
  std::vector<RowSums> parts(static_cast<size_t>(count * segments));
  const auto sums = row_sums_kernel<T>(return_entropy);
  over_segments(count, V, [&](int64_t i, int64_t column, int64_t columns) {
    const int64_t row = live[static_cast<size_t>(i)];
    parts[static_cast<size_t>(i * segments + column / kSegment)] = sums(rows[row] + column, columns, temperature[row]);
  });
  parallel(count, 64 * segments, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = live[static_cast<size_t>(i)];
      const double t = temperature[row];
      const RowSums s = join(&parts[static_cast<size_t>(i * segments)], segments, t);
      if (s.reference == -std::numeric_limits<double>::infinity()) {
        logprobs[row] = lse[row] = -std::numeric_limits<S>::infinity();  // the entropy stays 0
        continue;
      }
      const double log_total = std::log(s.total);
      logprobs[row] = static_cast<S>((element(rows[row], ids[row]) - s.reference) / t - log_total);
      lse[row] = static_cast<S>(s.reference / t + log_total);
      if (return_entropy) entropy[row] = static_cast<S>(log_total - s.weighted / (s.total * t));
    }
  });
  return {logprobs_, entropy_, lse_};
}

// ----------------------------------------------------------------------------------------------------------- backward

// A row whose gradient isn't simply zero.
struct Work {
  int64_t row;
  double c, e, entropy;         // gradients of the log-prob and the entropy, and the entropy
  double reference, log_total;  // lse = reference / T + log_total
  bool sum_again;               // log_total is too coarse
};

constexpr double kTrustedLse = 32;

// d logprob_j = c (1[j = y] - p_j), d entropy_j = -e p_j (log p_j + entropy), with log p_j = d / T - log_total.
RowGradient row_constants(const Work& w, double t) {
  const double scale = std::exp(-w.log_total) / t;
  return {w.reference, t, scale * (-w.c - w.e * w.entropy + w.e * w.log_total), -scale * w.e / t};
}

// The gradient at the token itself, where 1 - p would cancel.
double gradient_at_token(const Work& w, double x, double t) {
  const double logp = (x - w.reference) / t - w.log_total, p = std::exp(logp);
  const double from_entropy = p == 0 ? 0 : w.e * p * (logp + w.entropy);
  return (-w.c * std::expm1(logp) - from_entropy) / t;
}

template <class T>
void write_gradient(const std::optional<Tensor>& grad_logprobs, const std::optional<Tensor>& grad_entropy,
                    const Tensor& logits, const Tensor& token_ids, const Tensor& temperature_,
                    const std::optional<Tensor>& mask_, const Tensor& entropy_, const Tensor& lse_, const Rows<T>& out,
                    bool fresh) {  // past the caches, into memory never touched
  using S = StatOf<T>;
  constexpr ScalarType dtype = scalar_type_of<S>;
  const int64_t A = logits.size(0), B = logits.size(1), V = logits.size(2);
  const S* c = optional_data<S>(grad_logprobs, "grad_logprobs", dtype, {A, B});
  const S* e = optional_data<S>(grad_entropy, "grad_entropy", dtype, {A, B});
  const int64_t* ids = data<int64_t>(token_ids, "token_ids", ScalarType::Long, {A, B});
  const S* temperature = data<S>(temperature_, "temperature", dtype, {A, B});
  const bool* mask = optional_data<bool>(mask_, "mask", ScalarType::Bool, {A, B});
  const S* entropy = e ? data<S>(entropy_, "entropy", dtype, {A, B}) : nullptr;
  const S* lse = data<S>(lse_, "lse", dtype, {A, B});
  const Rows<const T> rows(logits, static_cast<const T*>(logits.const_data_ptr()));
  check_token_ids(ids, mask, A * B, V);

  std::vector<Work> work;
  std::vector<int64_t> zero;
  for (int64_t row = 0; row < A * B; ++row) {
    const double c_row = c ? c[row] : 0, e_row = e ? e[row] : 0;
    const bool live = !mask || mask[row];
    // A row no gradient arrives at costs no read, unless it holds NaN, which shows in its lse: 0 * NaN is NaN.
    const bool dead = c_row == 0 && e_row == 0 && !std::isnan(lse[row]);
    if (!live || dead || lse[row] == -std::numeric_limits<S>::infinity()) {
      zero.push_back(row);
      continue;
    }
    const double t = temperature[row], reference = static_cast<S>(lse[row] * t);
    const bool coarse = std::fabs(lse[row]) > kTrustedLse;
    work.push_back({row, c_row, e_row, e ? entropy[row] : 0, reference, lse[row] - reference / t, coarse});
  }

  over_segments(static_cast<int64_t>(zero.size()), V, [&](int64_t i, int64_t column, int64_t columns) {
    void* segment = out[zero[static_cast<size_t>(i)]] + column;
    if (fresh) make_pages(segment, columns * int64_t{sizeof(T)});
    std::memset(segment, 0, static_cast<size_t>(columns) * sizeof(T));
  });

  const auto sums = row_sums_kernel<T>(false);
  const auto gradient = row_gradient_kernel<T>(fresh);
  const int64_t count = static_cast<int64_t>(work.size()), segments = ceil_div(V, kSegment);
  std::vector<RowSums> parts(static_cast<size_t>(count * segments));
  const auto sum_segment = [&](int64_t i, int64_t column, int64_t columns) {
    const int64_t row = work[static_cast<size_t>(i)].row;
    parts[static_cast<size_t>(i * segments + column / kSegment)] = sums(rows[row] + column, columns, temperature[row]);
  };
  const auto write_segment = [&](int64_t i, int64_t column, int64_t columns) {
    const Work& w = work[static_cast<size_t>(i)];
    const double t = temperature[w.row];
    const int64_t y = ids[w.row];
    const bool holds_token = column <= y && y < column + columns;
    const double x_token = holds_token ? element(rows[w.row], y) : 0;  // before it may be overwritten
    if (fresh) make_pages(out[w.row] + column, columns * int64_t{sizeof(T)});
    gradient(rows[w.row] + column, out[w.row] + column, columns, row_constants(w, t));
    if (holds_token) set_element(out[w.row], y, gradient_at_token(w, x_token, t));
  };
  // With rows enough for all threads a row stays with one, which reads it the second time from its own cache.
  const bool whole_rows = count >= 4 * int64_t{torch::stable::get_num_threads()};
  parallel(count, V, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Work& w = work[static_cast<size_t>(i)];
      if (w.sum_again) {
        over_row(i, V, sum_segment);
        const RowSums s = join(&parts[static_cast<size_t>(i * segments)], segments, temperature[w.row]);
        w.reference = s.reference;
        w.log_total = std::log(s.total);
      }
      if (whole_rows) over_row(i, V, write_segment);
    }
  });
  if (!whole_rows) over_segments(count, V, write_segment);
}

std::tuple<Tensor, Tensor, Tensor> selected_logprobs(Tensor logits,               // [A, B, V]
                                                     Tensor token_ids,            // [A, B] int64
                                                     Tensor temperature,          // [A, B]
                                                     std::optional<Tensor> mask,  // [A, B] bool
                                                     bool return_entropy) {
  check_logits(logits);
  std::optional<std::tuple<Tensor, Tensor, Tensor>> result;
  by_dtype(logits, "logits", [&](auto* type) {
    result = forward<std::remove_pointer_t<decltype(type)>>(logits, token_ids, temperature, mask, return_entropy);
  });
  return *result;
}

Tensor selected_logprobs_backward(std::optional<Tensor> grad_logprobs,  // [A, B]
                                  std::optional<Tensor> grad_entropy,   // [A, B]
                                  Tensor logits,                        // [A, B, V]
                                  Tensor token_ids,                     // [A, B] int64
                                  Tensor temperature,                   // [A, B]
                                  std::optional<Tensor> mask,           // [A, B] bool
                                  Tensor entropy,                       // [A, B], or [0] without grad_entropy
                                  Tensor lse) {                         // [A, B]
  check_logits(logits);
  Tensor out = empty({logits.size(0), logits.size(1), logits.size(2)}, logits.scalar_type());
  by_dtype(logits, "logits", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    // Fresh from the system; less than that may as well stay in the caches for its reader.
    const bool large = out.numel() * int64_t{sizeof(T)} >= (int64_t{4} << 20);
    write_gradient<T>(grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse,
                      Rows<T>(out, writable<T>(out)), large);
  });
  return out;
}

void selected_logprobs_backward_(std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy, Tensor logits,
                                 Tensor token_ids, Tensor temperature, std::optional<Tensor> mask, Tensor entropy,
                                 Tensor lse) {
  check_logits(logits);
  check(rows_are_apart(logits), "logits", "without overlapping rows, since they are overwritten");
  by_dtype(logits, "logits", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    write_gradient<T>(grad_logprobs, grad_entropy, logits, token_ids, temperature, mask, entropy, lse,
                      Rows<T>(logits, writable<T>(logits)), false);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("selected_logprobs", TORCH_BOX(&selected_logprobs));
  m.impl("selected_logprobs_backward", TORCH_BOX(&selected_logprobs_backward));
  m.impl("selected_logprobs_backward_", TORCH_BOX(&selected_logprobs_backward_));
}

}  // namespace ppo_fast
