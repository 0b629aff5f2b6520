// linear_sample: tokens drawn from the softmax of an output layer, and their log-probs, without storing its logits
// (ppo_fast/ops/linear_sample.py).
//
// Rows in panels, the vocabulary in segments and blocks, as in linear_head.cpp: a block of the weight, read in place,
// times a panel gives logits [vocabulary row][token], which stay in the caches while a second pass goes over them.
//
// The whole vocabulary: a race (Gumbel-max). Token j has the key  scale * z_j - log(E_j)  with  E_j = -log1p(-u_j)
// exponential; the largest key wins, and does so with probability softmax(scale * z)_j. u_j comes from a counter-based
// generator (noise.h), so a key knows nothing of other rows, of the split or of threads, and an argmax is the same
// however it is taken. The pass also takes the sums of the softmax, for which it has e_j = exp(scale * (z_j - peak)),
// and j can win only if  u_j <= E_j < e_j * exp(scale * peak - best key so far).  That costs no logarithm, and of u_j
// the upper bits suffice. The few that pass, some ln(V) for each row and thread, are decided by their keys in double.
//   u_j = high * 2^-32 + (low + 1/2) * 2^-64. What matters is its resolution near 0: among V = 151936 equal tokens the
// winner's E is about 1 / V. 32 bits are multiples of 2^-32 there: one draw in 30000 would be a tie, and a token of
// probability below 2^-33 would never be drawn; the usual float32 noise, of a uniform with 24 bits, ends at 16.6 and
// loses tokens below 6e-8. Here E keeps its 53 bits down to 2^-64. At the other end u stops at 1 - 2^-53, so that the
// key of an only token is a number.
//
// Top-k and top-p: each thread lists the logits above its floor, no more than the k-th largest it has met (candidates.h).
// The k largest of all lists are sorted; top-p takes the shortest run of them that holds a share p of their softmax; the
// race is run among those, with the same noise.
//
// Numerics as in linear_head.cpp. The bits of a logit depend on its row of hidden and on the weight alone, sums run over
// blocks and segments that the shape fixes, and lanes never mix: neither ids nor log-probs depend on other rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "isa.h"
#include "linear_sample.h"
#include "noise.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_WANTS_BF16
#define PPO_FAST_BODY "linear_sample_rows.h"
#include "for_each_isa.h"
#include "candidates.h"
#include "head_layout.h"

namespace ppo_fast {
namespace {

template <class E> SampleKernels<E> kernels() { return PPO_FAST_PICK(sample_kernels<E>)(); }
#if PPO_FAST_X86
template <> SampleKernels<Bf16Pair> kernels<Bf16Pair>() { return avx512_bf16::sample_kernels<Bf16Pair>(); }
#endif

// What the lists of a group of rows may take.
constexpr int64_t kListBytes = 32 << 20;
// Rows that share a pass over the weight, where there are no lists.
constexpr int64_t kGroupRows = 512;

// The leader of a race.
template <class S> struct Leader {
  double key = -std::numeric_limits<double>::infinity();
  int64_t id = -1;
  S logit = 0;

  void meet(const Leader& other) {
    if (other.id >= 0 && (other.key > key || id < 0 || (other.key == key && other.id < id))) *this = other;
  }
};

// ------------------------------------------------------------------------------------------------------------- sampling

// What is kept.
struct Truncation {
  int64_t top_k;  // 0 for the whole vocabulary
  double top_p;
};

// Where it goes; entropy and kept null if not wanted.
template <class S> struct Samples {
  int64_t* ids;    // [n]
  S *logprobs, *entropy;  // [n]
  int64_t* kept;   // [n][top_k]
};

template <class T, class E> class Sampler {
 public:
  using S = typename E::Stat;
  using Word = typename E::Word;

  Sampler(const HeadRows<T>& x, const Tensor& weight, const S* bias, const int64_t* keys, const Truncation& truncation,
          const Samples<S>& out)
      : x_(x),
        weight_(weight),
        bias_(bias),
        keys_(keys),
        truncation_(truncation),
        out_(out),
        k_(kernels<E>()),
        words_(ceil_div(x.H, E::per_word)),
        cuts_(x.V, words_ * int64_t{sizeof(Word)}),
        threads_(std::min<int64_t>(torch::stable::get_num_threads(), cuts_.segments())) {}

  void run() {
    int64_t rows = kGroupRows;
    if (truncation_.top_k) {
      const int64_t list = Lists<S>::bytes(truncation_.top_k, x_.V, cuts_.block);
      const int64_t weights = truncation_.top_k * int64_t{sizeof(double)};
      threads_ = std::clamp<int64_t>((kListBytes - weights) / list, 1, threads_);
      rows = std::max<int64_t>(1, kListBytes / (threads_ * list + weights));
      const int64_t panel = 2 * k_.lanes;
      if (rows > panel) rows = rows / panel * panel;
    }
    for (int64_t first = 0; first < x_.n; first += rows) group(first, std::min(rows, x_.n - first));
  }

 private:
  bool greedy(int64_t t) const { return x_.temperature_of(t) == 0; }
  double scale_of(int64_t t) const { return greedy(t) ? x_.scale_at(1.0) : x_.scale_of(t); }

  void group(int64_t first, int64_t n) {
    const Panels panels{n, 2 * k_.lanes, k_.lanes};
    const int64_t count = panels.count();
    Buffer<Word> hidden(words_ * panels.padded());
    pack_panels<E>(x_, first, panels, hidden.get());
    Weight<T, E> weight(weight_, cuts_.block, threads_);
    Buffer<S> logits(threads_ * kMaxBlockRows * kMaxPanel);
    Buffer<Hit> hits(threads_ * kMaxBlockRows * kMaxPanel);
    std::optional<Lists<S>> lists;
    if (truncation_.top_k) lists.emplace(n, threads_, truncation_.top_k, x_.V, cuts_.block);
    const int64_t racing = lists ? 0 : count;
    Buffer<LaneSums<S>> sums(threads_ * racing);
    Buffer<RaceLanes<S>> races(threads_ * racing);
    Buffer<Part<S>> parts(racing ? cuts_.segments() * n : 0);
    std::vector<Leader<S>> leaders(static_cast<size_t>(racing ? threads_ * n : 0));
    for (int64_t i = 0; i < threads_ * racing; ++i) begin_race(races[i], first, panels, i % count);

    const int64_t fetches = panels.fetches(cuts_.block, words_);
    over_segments(cuts_, threads_, [&](int64_t thread, const Segment& segment) {
      S* const own_logits = logits.get() + thread * kMaxBlockRows * kMaxPanel;
      Hit* const own_hits = hits.get() + thread * kMaxBlockRows * kMaxPanel;
      LaneSums<S>* const own_sums = sums.get() + thread * racing;
      Leader<S>* const own_leaders = leaders.data() + (racing ? thread * n : 0);
      for (int64_t p = 0; p < racing; ++p) {
        const int64_t row = first + p * panels.width;
        begin_sums(own_sums[p], panels.size(p), [&](int64_t lane) { return scale_of(row + lane); });
      }
      for (int64_t v = segment.first; v < segment.last; v += cuts_.block) {
        Ahead ahead = weight.after(segment, v, fetches);
        LogitsBlock<E> block = logits_block(x_, weight, bias_, thread, segment, v);
        for (int64_t p = 0; p < count; ++p) {
          block.hidden = hidden.get() + p * words_ * panels.width;
          k_.logits[panels.vectors(p) - 1](block, own_logits, ahead);
          const LogitsTile<S> tile{own_logits, block.rows, panels.stride(p), v};
          if (lists) {
            enlist(*lists, thread, panels, p, tile, own_hits);
          } else {
            RaceLanes<S>& race = races[thread * count + p];
            const int64_t found = k_.race(tile, race, own_sums[p], own_hits);
            for (int64_t h = 0; h < found; ++h) {
              const int64_t i = p * panels.width + own_hits[h].lane;
              decide(tile, own_hits[h], first + i, own_leaders[i], race);
            }
            k_.join(own_sums[p], panels.stride(p));
          }
        }
      }
      for (int64_t i = 0; i < (racing ? n : 0); ++i) {
        const LaneSums<S>& s = own_sums[i / panels.width];
        const int64_t lane = i % panels.width;
        parts[segment.index * n + i] = {s.joined_peak[lane], S(0), s.joined_total[lane], s.joined_weighted[lane]};
      }
    });

    if (lists) {
      Buffer<double> weights(n * truncation_.top_k);
      parallel(n, truncation_.top_k * 256, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) draw_kept(*lists, i, first + i, weights.get() + i * truncation_.top_k);
      });
    } else {
      for (int64_t i = 0; i < n; ++i) {
        Leader<S> best;
        for (int64_t thread = 0; thread < threads_; ++thread) best.meet(leaders[static_cast<size_t>(thread * n + i)]);
        const Softmax softmax = joined(parts.get() + i, cuts_.segments(), n, scale_of(first + i));
        put(first + i, best.id, best.logit, softmax);
      }
    }
  }

  // ---- the race over the whole vocabulary

  void begin_race(RaceLanes<S>& race, int64_t first, const Panels& panels, int64_t p) const {
    race.noisy = false;
    for (int64_t lane = 0; lane < kMaxPanel; ++lane) {
      const bool used = lane < panels.size(p);
      const int64_t t = first + p * panels.width + lane;
      const Noise noise(used ? keys_ + 2 * t : keys_);
      for (int i = 0; i < 2; ++i) {
        race.seed[i][lane] = noise.seed[i];
        race.position[i][lane] = noise.position[i];
      }
      const bool noisy = used && !greedy(t);
      race.noisy |= noisy;
      race.factor[lane] = noisy ? S(0x1p-24) : S(0);
      race.offset[lane] = noisy ? S(0) : used ? S(1) : std::numeric_limits<S>::infinity();  // a greedy row has E = 1
      race.best[lane] = -std::numeric_limits<S>::infinity();
    }
  }

  void decide(const LogitsTile<S>& tile, Hit hit, int64_t t, Leader<S>& leader, RaceLanes<S>& race) const {
    const S logit = tile.logits[hit.row * tile.panel + hit.lane];
    const int64_t id = tile.first + hit.row;
    const double scale = scale_of(t);
    double key = scale * logit;
    if (!greedy(t)) {
      const Noise noise(keys_ + 2 * t);
      key += noise.gumbel(id, noise.word(id, 0));
    }
    if (leader.id >= 0 && !(key > leader.key)) return;  // a thread meets ids in ascending order
    leader = {key, id, logit};
    const double best = key / scale;
    race.best[hit.lane] = static_cast<S>(best - std::abs(best) * 2e-7);
  }

  // ---- top-k and top-p

  void enlist(Lists<S>& lists, int64_t thread, const Panels& panels, int64_t p, const LogitsTile<S>& tile,
              Hit* hits) const {
    const int64_t row = p * panels.width;
    const int64_t found = k_.above(tile, lists.floors(thread, row), hits);
    for (int64_t h = 0; h < found; ++h) {
      const Hit hit = hits[h];
      lists.add(thread, row + hit.lane, tile.logits[hit.row * tile.panel + hit.lane], tile.first + hit.row);
    }
    if (found == 0) return;
    for (int64_t lane = 0; lane < panels.size(p); ++lane) lists.trim(thread, row + lane);
  }

  // Row i of the group, t of all; `weights` has room for top_k.
  void draw_kept(Lists<S>& lists, int64_t i, int64_t t, double* weights) const {
    int64_t count;
    const Candidate<S>* list = lists.sorted(i, count);
    const double scale = scale_of(t);
    const double top = count ? list[0].logit : 0;
    double all = 0;
    for (int64_t j = 0; j < count; ++j) all += weights[j] = std::exp(scale * (list[j].logit - top));

    Softmax kept{top, 0, 0};
    int64_t size = 0;
    for (; size < count && (size == 0 || truncation_.top_p == 1 || kept.total < truncation_.top_p * all); ++size) {
      kept.total += weights[size];
      if (weights[size] > 0) kept.weighted += weights[size] * (list[size].logit - top);
    }

    int64_t drawn = 0;
    if (!greedy(t)) {
      const Noise noise(keys_ + 2 * t);
      double best = -std::numeric_limits<double>::infinity(), limit = std::numeric_limits<double>::infinity();
      for (int64_t j = 0; j < size; ++j) {
        const uint32_t high = noise.word(list[j].id, 0);
        if (j > 0 && !(Noise::upper(high) < limit * weights[j])) continue;  // u too large to win
        const double key = scale * list[j].logit + noise.gumbel(list[j].id, high);
        if (key > best || (key == best && list[j].id < list[drawn].id)) {
          best = key;
          drawn = j;
          limit = std::exp(scale * top - best) * 1.001;
        }
      }
    }
    if (out_.kept) {
      int64_t* kept_ids = out_.kept + t * truncation_.top_k;
      for (int64_t j = 0; j < truncation_.top_k; ++j) kept_ids[j] = j < size ? list[j].id : -1;
    }
    put(t, size ? list[drawn].id : -1, size ? list[drawn].logit : S(0), kept);
  }

  void put(int64_t t, int64_t id, S logit, const Softmax& softmax) const {
    const bool usable = id >= 0 && softmax.total > 0;  // NaN isn't
    const double scale = scale_of(t), log_total = std::log(softmax.total);
    const S none = std::numeric_limits<S>::quiet_NaN();
    out_.ids[t] = usable ? id : 0;
    out_.logprobs[t] = usable ? static_cast<S>(scale * (logit - softmax.peak) - log_total) : none;
    if (!out_.entropy) return;
    out_.entropy[t] = usable ? static_cast<S>(log_total - scale * softmax.weighted / softmax.total) : none;
  }

  const HeadRows<T>& x_;
  const Tensor& weight_;
  const S* bias_;
  const int64_t* keys_;
  const Truncation truncation_;
  const Samples<S> out_;
  const SampleKernels<E> k_;
  const int64_t words_;
  const Cuts cuts_;
  int64_t threads_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_sample(Tensor hidden,                      // [n, H]
                                                         Tensor weight,                      // [V, H]
                                                         std::optional<Tensor> bias,         // [V] stat dtype
                                                         std::optional<Tensor> temperature,  // [n] stat dtype
                                                         Tensor keys,                        // [n, 2] int64
                                                         std::optional<double> softcap, double logit_scale,
                                                         int64_t top_k, double top_p, bool return_entropy,
                                                         bool return_kept) {
  std::optional<std::tuple<Tensor, Tensor, Tensor, Tensor>> result;
  by_dtype(weight, [&](auto* type, auto element) {
    using T = std::remove_pointer_t<decltype(type)>;
    using S = typename HeadRows<T>::S;
    constexpr ScalarType dtype = HeadRows<T>::dtype;
    const HeadRows<T> x(hidden, weight, temperature, softcap, logit_scale);
    check(x.V < std::numeric_limits<int32_t>::max(), "weight", "of less than 2^31 rows");
    check(0 <= top_k && top_k <= x.V, "top_k", "in [0, V]");
    check(0 < top_p && top_p <= 1, "top_p", "in (0, 1]");
    check(top_k > 0 || (top_p == 1 && !return_kept), "top_k", "positive with top_p < 1 or return_kept");
    const S* bias_ = optional_data<S>(bias, "bias", dtype, {x.V});
    const int64_t* keys_ = data<int64_t>(keys, "keys", ScalarType::Long, {x.n, 2});
    Tensor ids = empty({x.n}, ScalarType::Long), logprobs = empty({x.n}, dtype),
           entropy = empty({return_entropy ? x.n : 0}, dtype),
           kept = empty({x.n, return_kept ? top_k : 0}, ScalarType::Long);
    const Samples<S> out{writable<int64_t>(ids), writable<S>(logprobs),
                         return_entropy ? writable<S>(entropy) : nullptr,
                         return_kept ? writable<int64_t>(kept) : nullptr};
    Sampler<T, decltype(element)>(x, weight, bias_, keys_, {top_k, top_p}, out).run();
    result = {ids, logprobs, entropy, kept};
  });
  return *result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("linear_sample", TORCH_BOX(&linear_sample)); }

}  // namespace ppo_fast
