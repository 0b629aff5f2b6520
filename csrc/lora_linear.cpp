// lora_linear and lora_linear_backward: a frozen layer and its adapter at hundreds of rows, in float32
// (ppo_fast/ops/lora_linear.py). Five matrix products, all of them one function:
//
//     h = scaling x A^T, y = x W^T + bias + h B^T; dh = scaling dy B, dx = dy W + dh A, dA = dh^T x, dB^T = h^T dy
//
// Pieces of the features, and of the rows where threads outnumber panels, go to whichever thread is free. It packs the
// right operand's features into panels, [depth][lane], two vectors of features wide (one, where there are no more) and
// as many as stay in the second-level cache; the adapter's operand lies behind the weight's in the same panel, so that
// its product goes on in the same accumulators. Then 12 rows of the left operand at a time, read in place, meet all
// panels, in the register tile of multiply.h, while the next rows and the weight of the next piece are fetched. Right
// operands may lie either way round.
//
// Numerics. float32 accumulators, chains of additions cut after 256. What a row gets depends neither on the other rows
// nor on the number of threads.
#include <algorithm>
#include <cstring>
#include <optional>

#include "buffer.h"
#include "elements.h"
#include "isa.h"
#include "lora_linear.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "lora_linear_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

constexpr int64_t kPanelBytes = 640 * 1024;  // of all panels of a piece, where one isn't more
constexpr int64_t kLeastRows = 96;           // to a piece

// A matrix in memory, either way round.
struct Matrix {
  const float* memory;
  int64_t rows, columns, row, column;  // sizes and strides

  static Matrix of(const Tensor& x, const char* name, int64_t rows, int64_t columns) {
    check(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.size(0) == rows &&
              x.size(1) == columns,
          name, "a float32 CPU tensor of the shape that the other arguments imply");
    return {static_cast<const float*>(x.const_data_ptr()), rows, columns, x.stride(0), columns == 1 ? 1 : x.stride(1)};
  }
  static Matrix dense(const float* memory, int64_t rows, int64_t columns) { return {memory, rows, columns, columns, 1}; }
  Matrix turned() const { return {memory, columns, rows, column, row}; }
};

// A matrix whose rows are read in place, or a copy where they can't be: rows a multiple of a page apart share a few
// sets of the first-level cache, and a tile has more of them than a set has ways.
class InPlace {
 public:
  explicit InPlace(const Matrix& x) : memory(x.memory), row(x.row) {
    if (x.column == 1 && (x.rows == 1 || row * static_cast<int64_t>(sizeof(float)) % 4096 != 0)) return;
    const int64_t padded = ceil_div(x.columns, 16) * 16;
    row = padded % 1024 == 0 ? padded + 16 : padded;
    copy_.emplace(x.rows * row);
    float* const to = copy_->get();
    parallel(x.rows, x.columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float* const from = x.memory + i * x.row;
        if (x.column == 1) {
          std::memcpy(to + i * row, from, static_cast<size_t>(x.columns) * sizeof(float));
        } else {
          for (int64_t k = 0; k < x.columns; ++k) to[i * row + k] = from[k * x.column];
        }
      }
    });
    memory = to;
  }

  const float* memory;
  int64_t row;

 private:
  std::optional<Buffer<float>> copy_;
};

// Rows [first, last) of a weight, to be fetched in `steps` steps.
Ahead fetched(const Matrix& weight, int64_t first, int64_t last, int64_t steps) {
  const auto at = [&](int64_t row, int64_t column) {
    return reinterpret_cast<const char*>(weight.memory + row * weight.row + column * weight.column);
  };
  const char *begin = at(first, 0), *end = at(last - 1, weight.columns - 1) + sizeof(float);
  if (weight.row != 1) return {begin, end, ceil_div(ceil_div(end - begin, 64), steps)};
  const int64_t strip = (last - first) * static_cast<int64_t>(sizeof(float));
  const int64_t pitch = weight.column * static_cast<int64_t>(sizeof(float));
  const int64_t lines = weight.columns * (strip / 64 + 1);
  return {begin, end, ceil_div(lines, steps), pitch - strip, pitch, begin + strip};
}

// out [rows of x][rows of weight] = x @ weight.T + down @ up.T + bias; `down` and `up` null for none.
void product(const Matrix& x_, const Matrix& weight, const float* bias, const Matrix* down_, const Matrix* up,
             float* out) {
  const int64_t n = x_.rows, depth = x_.columns, features = weight.rows, rank = down_ ? down_->columns : 0;
  if (n == 0) return;
  const InPlace x(x_);
  std::optional<InPlace> down;
  if (rank) down.emplace(*down_);

  const auto pack = PPO_FAST_PICK(pack_panel);
  const int64_t vector = PPO_FAST_PICK(lanes_of_vector)();
  const bool narrow = features <= vector;
  const auto run = narrow ? PPO_FAST_PICK(lora_rows<1>) : PPO_FAST_PICK(lora_rows<2>);
  const int64_t lanes = narrow ? vector : 2 * vector, panel = (depth + rank) * lanes;
  const int64_t panels = ceil_div(features, lanes), available = torch::stable::get_num_threads();
  const int64_t at_once = std::clamp<int64_t>(kPanelBytes / static_cast<int64_t>(sizeof(float)) / panel, 1, panels);
  // As many pieces as keep every thread busy until the end.
  const int64_t groups = std::min(panels, ceil_div(ceil_div(panels, at_once), available) * available);
  const int64_t bands = std::clamp<int64_t>(available / groups, 1, ceil_div(n, kLeastRows));
  const int64_t threads = std::min(available, groups * bands), most = ceil_div(panels, groups);
  Buffer<float> packed(threads * most * panel);
  const auto begins = [&](int64_t group) { return std::min(features, group * panels / groups * lanes); };
  const int64_t steps = ceil_div(n / bands, 12) * std::max<int64_t>(most - 1, 1) * ceil_div(depth, 16);
  Queue queue(groups * bands);
  on_threads(threads, [&](int64_t thread) {
    float* const own = packed.get() + thread * most * panel;
    for (int64_t piece = queue.take(); queue.holds(piece); piece = queue.take()) {
      const int64_t group = piece / bands, band = piece % bands;
      const int64_t first = begins(group), last = begins(group + 1), begin = band * n / bands;
      for (int64_t f = first; f < last; f += lanes) {
        float* const to = own + (f - first) / lanes * panel;
        const int64_t count = std::min(lanes, last - f);
        pack(weight.memory + f * weight.row, weight.row, weight.column, count, depth, lanes, to);
        if (rank) pack(up->memory + f * up->row, up->row, up->column, count, rank, lanes, to + depth * lanes);
      }
      LoraRows job{};
      job.x = x.memory + begin * x.row;
      job.x_row = x.row;
      job.depth = depth;
      if (rank) {
        job.down = down->memory + begin * down->row;
        job.down_row = down->row;
        job.rank = rank;
      }
      job.panels = own;
      job.bias = bias ? bias + first : nullptr;
      job.rows = (band + 1) * n / bands - begin;
      job.features = last - first;
      job.out = out + begin * features + first;
      job.out_row = features;
      // Not the piece that the queue would give: there may be no more than one for each thread.
      const int64_t next = (piece + threads) / bands;
      Ahead ahead{nullptr, nullptr, 0};
      if (next < groups && next != group) ahead = fetched(weight, begins(next), begins(next + 1), steps);
      run(job, ahead);
    }
  });
}

// The arguments that both directions have.
struct Layer {
  int64_t n, depth, features, rank;
  Matrix x, weight, a, b;  // the last two with a rank alone

  Layer(const Tensor& x_, const Tensor& weight_, const std::optional<Tensor>& a_, const std::optional<Tensor>& b_) {
    check(x_.dim() == 2 && x_.size(1) > 0, "x", "a float32 CPU tensor [n, in], in > 0");
    check(weight_.dim() == 2 && weight_.size(0) > 0, "weight", "a float32 CPU tensor [out, in], out > 0");
    check(a_.has_value() == b_.has_value(), "a", "given together with b");
    check(!a_.has_value() || (a_->dim() == 2 && a_->size(0) > 0), "a", "a float32 CPU tensor [r, in], r > 0");
    n = x_.size(0);
    depth = x_.size(1);
    features = weight_.size(0);
    rank = a_.has_value() ? a_->size(0) : 0;
    x = Matrix::of(x_, "x", n, depth);
    weight = Matrix::of(weight_, "weight", features, depth);
    if (rank) {
      a = Matrix::of(*a_, "a", rank, depth);
      b = Matrix::of(*b_, "b", features, rank);
    }
  }
};

void scale(float* x, int64_t count, double factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= static_cast<float>(factor);
}

std::tuple<Tensor, Tensor> lora_linear(Tensor x,                    // [n, in], any strides, as all matrices here
                                       Tensor weight,               // [out, in]
                                       std::optional<Tensor> bias,  // [out], contiguous
                                       std::optional<Tensor> a,     // [r, in], together with
                                       std::optional<Tensor> b,     // [out, r]
                                       double scaling) {
  const Layer l(x, weight, a, b);
  const float* bias_ = optional_data<float>(bias, "bias", ScalarType::Float, {l.features});
  Tensor y = empty({l.n, l.features}, ScalarType::Float), h = empty({l.n, l.rank}, ScalarType::Float);
  if (l.rank == 0) {
    product(l.x, l.weight, bias_, nullptr, nullptr, writable<float>(y));
    return {y, h};
  }
  float* const h_ = writable<float>(h);
  product(l.x, l.a, nullptr, nullptr, nullptr, h_);
  scale(h_, l.n * l.rank, scaling);
  const Matrix down = Matrix::dense(h_, l.n, l.rank);
  product(l.x, l.weight, bias_, &down, &l.b, writable<float>(y));
  return {y, h};
}

// dx [n, in], dA [r, in] and dB [out, r]; [0] where one isn't wanted.
std::tuple<Tensor, Tensor, Tensor> lora_linear_backward(Tensor grad,  // [n, out]
                                                        Tensor x, Tensor weight, std::optional<Tensor> a,
                                                        std::optional<Tensor> b,
                                                        Tensor h,  // [n, r]
                                                        double scaling, bool want_x, bool want_a, bool want_b) {
  const Layer l(x, weight, a, b);
  const Matrix dy = Matrix::of(grad, "grad", l.n, l.features), h_ = Matrix::of(h, "h", l.n, l.rank);
  want_a = want_a && l.rank;
  want_b = want_b && l.rank;
  const auto wanted = [](bool want, int64_t rows, int64_t columns) {
    return want ? empty({rows, columns}, ScalarType::Float) : empty({0}, ScalarType::Float);
  };
  Tensor dx = wanted(want_x, l.n, l.depth), da = wanted(want_a, l.rank, l.depth), db = wanted(want_b, l.features, l.rank);
  Buffer<float> dh_(l.n * l.rank);
  const Matrix dh = Matrix::dense(dh_.get(), l.n, l.rank);
  if (l.rank && (want_x || want_a)) {
    product(dy, l.b.turned(), nullptr, nullptr, nullptr, dh_.get());
    scale(dh_.get(), l.n * l.rank, scaling);
  }
  if (want_x) {
    const Matrix up = l.rank ? l.a.turned() : Matrix{};
    product(dy, l.weight.turned(), nullptr, l.rank ? &dh : nullptr, &up, writable<float>(dx));
  }
  const auto sum_over_rows = [&](const Matrix& narrow, const Matrix& wide, float* out) {  // narrow.T @ wide
    if (l.n == 0) {
      std::fill_n(out, narrow.columns * wide.columns, 0.0f);
    } else {
      product(narrow.turned(), wide.turned(), nullptr, nullptr, nullptr, out);
    }
  };
  if (want_a) sum_over_rows(dh, l.x, writable<float>(da));
  if (want_b) {
    Buffer<float> turned(l.rank * l.features);
    sum_over_rows(h_, dy, turned.get());
    float* const to = writable<float>(db);
    for (int64_t i = 0; i < l.features; ++i) {
      for (int64_t j = 0; j < l.rank; ++j) to[i * l.rank + j] = turned[j * l.features + i];
    }
  }
  return {dx, da, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) {
  m.impl("lora_linear", TORCH_BOX(&lora_linear));
  m.impl("lora_linear_backward", TORCH_BOX(&lora_linear_backward));
}

}  // namespace ppo_fast
