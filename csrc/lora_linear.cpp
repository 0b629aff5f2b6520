// lora_linear: out = x @ weight.T + down @ up.T + bias for hundreds of rows, in float32 (ppo_fast/ops/lora_linear.py).
//
// Pieces of the features, and of the rows where threads outnumber panels, go to whichever thread is free. It packs the
// weight of its features into panels, [depth][lane], two vectors of features wide and as many as stay in the
// second-level cache; the adapter's `up` lies behind the weight in the same panel, so that its product goes on in the
// same accumulators. Then 12 rows of x at a time, read in place, meet all panels, in the register tile of multiply.h.
// The weight may lie either way round: `x @ weight` of a backward pass is the same call over its transpose, and cheaper
// to pack.
//
// Numerics. float32 accumulators, chains of additions cut after 256. What a row gets depends neither on the other rows
// nor on the number of threads.
#include <algorithm>
#include <cstring>
#include <optional>

#include "buffer.h"
#include "isa.h"
#include "lora_linear.h"
#include "elements.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "lora_linear_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

constexpr int64_t kPanelBytes = 640 * 1024;  // of all panels of a piece, where one isn't more
constexpr int64_t kLeastRows = 96;           // to a piece

const float* matrix(const Tensor& x, const char* name, int64_t rows, int64_t columns) {
  check(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.size(0) == rows && x.size(1) == columns,
        name, "a float32 CPU tensor of the shape that the other arguments imply");
  return static_cast<const float*>(x.const_data_ptr());
}

// A matrix whose rows are read in place, or a copy where they can't be: rows a multiple of a page apart share a few
// sets of the first-level cache, and a tile has more of them than a set has ways.
class InPlace {
 public:
  InPlace(const Tensor& x, const float* memory) : rows(memory), row(x.stride(0)) {
    const int64_t n = x.size(0), depth = x.size(1), column = depth == 1 ? 1 : x.stride(1);
    if (column == 1 && (n == 1 || row * static_cast<int64_t>(sizeof(float)) % 4096 != 0)) return;
    const int64_t from_row = row, padded = ceil_div(depth, 16) * 16;
    row = padded % 1024 == 0 ? padded + 16 : padded;
    copy_.emplace(n * row);
    float* to = copy_->get();
    parallel(n, depth, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (column == 1) {
          std::memcpy(to + i * row, memory + i * from_row, static_cast<size_t>(depth) * sizeof(float));
        } else {
          for (int64_t k = 0; k < depth; ++k) to[i * row + k] = memory[i * from_row + k * column];
        }
      }
    });
    rows = to;
  }

  const float* rows;
  int64_t row;

 private:
  std::optional<Buffer<float>> copy_;
};

Tensor lora_linear(Tensor x,                      // [n, depth], any strides, as all of these
                   Tensor weight,                 // [features, depth]
                   std::optional<Tensor> bias,    // [features], contiguous
                   std::optional<Tensor> down_,   // [n, rank], together with
                   std::optional<Tensor> up) {    // [features, rank]
  check(x.dim() == 2 && x.size(1) > 0, "x", "a float32 CPU tensor [n, depth], depth > 0");
  check(weight.dim() == 2 && weight.size(0) > 0, "weight", "a float32 CPU tensor [features, depth], features > 0");
  check(down_.has_value() == up.has_value(), "down", "given together with up");
  check(!down_.has_value() || down_->dim() == 2, "down", "a float32 CPU tensor [n, rank]");
  const int64_t n = x.size(0), depth = x.size(1), features = weight.size(0), rank = down_ ? down_->size(1) : 0;
  const float* x_ = matrix(x, "x", n, depth);
  const float* weight_ = matrix(weight, "weight", features, depth);
  const float* bias_ = optional_data<float>(bias, "bias", ScalarType::Float, {features});
  const float* up_ = rank ? matrix(*up, "up", features, rank) : nullptr;
  Tensor out = empty({n, features}, ScalarType::Float);
  if (n == 0) return out;
  const InPlace rows(x, x_);
  std::optional<InPlace> down;
  if (rank) down.emplace(*down_, matrix(*down_, "down", n, rank));
  float* const out_ = writable<float>(out);

  const auto pack = PPO_FAST_PICK(pack_panel);
  const auto run = PPO_FAST_PICK(lora_rows);
  const int64_t lanes = PPO_FAST_PICK(panel_lanes)(), panel = (depth + rank) * lanes;
  const int64_t panels = ceil_div(features, lanes), available = torch::stable::get_num_threads();
  const int64_t at_once = std::clamp<int64_t>(kPanelBytes / static_cast<int64_t>(sizeof(float)) / panel, 1, panels);
  // As many pieces as keep every thread busy until the end.
  const int64_t groups = std::min(panels, ceil_div(ceil_div(panels, at_once), available) * available);
  const int64_t bands = std::clamp<int64_t>(available / groups, 1, ceil_div(n, kLeastRows));
  const int64_t threads = std::min(available, groups * bands), most = ceil_div(panels, groups);
  Buffer<float> packed(threads * most * panel);
  Queue queue(groups * bands);
  on_threads(threads, [&](int64_t thread) {
    float* const own = packed.get() + thread * most * panel;
    for (int64_t piece = queue.take(); queue.holds(piece); piece = queue.take()) {
      const int64_t group = piece / bands, band = piece % bands;
      const int64_t first = group * panels / groups * lanes, begin = band * n / bands;
      const int64_t last = std::min(features, (group + 1) * panels / groups * lanes);
      for (int64_t f = first; f < last; f += lanes) {
        float* const to = own + (f - first) / lanes * panel;
        const int64_t count = std::min(lanes, last - f);
        pack(weight_ + f * weight.stride(0), weight.stride(0), weight.stride(1), count, depth, to);
        if (rank) pack(up_ + f * up->stride(0), up->stride(0), up->stride(1), count, rank, to + depth * lanes);
      }
      LoraRows job{};
      job.x = rows.rows + begin * rows.row;
      job.x_row = rows.row;
      job.depth = depth;
      if (rank) {
        job.down = down->rows + begin * down->row;
        job.down_row = down->row;
        job.rank = rank;
      }
      job.panels = own;
      job.bias = bias_ ? bias_ + first : nullptr;
      job.rows = (band + 1) * n / bands - begin;
      job.features = last - first;
      job.out = out_ + begin * features + first;
      job.out_row = features;
      run(job);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("lora_linear", TORCH_BOX(&lora_linear)); }

}  // namespace ppo_fast
