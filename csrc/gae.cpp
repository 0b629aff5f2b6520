// gae: advantages, returns and the moments of the live advantages of [B, T], in one backward pass over each row.
//
// Pipeline: rows in parallel -> each row from its last token to its first, eight live tokens at a time where there are
// eight in a run, two numbers carried: the advantage and the value of the next live token -> per row count, sum and sum
// of squares about the row's own last live advantage -> rows combined in order.
//
// Numerics: the recursion runs in double for float32 too and is rounded once, so errors don't build up over T. Moments
// are those of the rounded advantages; squares are taken about an advantage of the row and rows are joined by the
// parallel-variance formula (Chan, Golub, LeVeque 1979), so a mean far from zero costs no digits. A row belongs to one
// thread and the order of rows is fixed: the same bits for any number of threads, and at every instruction set. Runs are
// counted from the last live token: padding behind a row changes nothing.
#include "parallel.h"
#include "tensors.h"

namespace ppo_fast {

struct RowMoments {
  double count, sum, m2;
};

}  // namespace ppo_fast

#define PPO_FAST_BODY "gae_row.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

struct Moments {
  double count = 0, sum = 0, m2 = 0;

  void add(const RowMoments& other) {
    if (other.count == 0) return;
    if (count > 0) {
      const double difference = other.sum / other.count - sum / count;
      m2 += difference * difference * (count * other.count / (count + other.count));
    }
    m2 += other.m2;
    count += other.count;
    sum += other.sum;
  }
};

template <class S>
std::tuple<Tensor, Tensor, Tensor> gae_of(const Tensor& rewards_, const Tensor& values_, const Tensor& mask_,
                                          double gamma, double lam, const std::optional<Tensor>& bootstrap_values) {
  const int64_t B = rewards_.size(0), T = rewards_.size(1);
  const ScalarType dtype = scalar_type_of<S>;
  const S* rewards = data<S>(rewards_, "rewards", dtype, {B, T});
  const S* values = data<S>(values_, "values", dtype, {B, T});
  const bool* mask = data<bool>(mask_, "mask", ScalarType::Bool, {B, T});
  const S* bootstrap = optional_data<S>(bootstrap_values, "bootstrap_values", dtype, {B});
  Tensor advantages = empty({B, T}, dtype), returns = empty({B, T}, dtype), moments = empty({3}, ScalarType::Double);
  S *a = writable<S>(advantages), *r = writable<S>(returns);

  const auto gae_row = PPO_FAST_PICK(gae_row<S>);
  std::vector<RowMoments> rows(static_cast<size_t>(B));
  parallel(B, T * 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t o = b * T;
      rows[static_cast<size_t>(b)] = gae_row(rewards + o, values + o, mask + o, T, gamma, lam,
                                             bootstrap ? static_cast<double>(bootstrap[b]) : 0.0, a + o, r + o);
    }
  });
  Moments total;
  for (const RowMoments& row : rows) total.add(row);
  double* out = writable<double>(moments);
  out[0] = total.count;
  out[1] = total.sum;
  out[2] = total.m2;
  return {advantages, returns, moments};
}

std::tuple<Tensor, Tensor, Tensor> gae(Tensor rewards,  // [B, T]
                                       Tensor values,   // [B, T]
                                       Tensor mask,     // [B, T] bool
                                       double gamma, double lam,
                                       std::optional<Tensor> bootstrap_values) {  // [B]
  check(rewards.dim() == 2, "rewards", "[B, T]");
  const auto op = rewards.scalar_type() == ScalarType::Double ? &gae_of<double> : &gae_of<float>;
  return op(rewards, values, mask, gamma, lam, bootstrap_values);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("gae", TORCH_BOX(&gae)); }

}  // namespace ppo_fast
