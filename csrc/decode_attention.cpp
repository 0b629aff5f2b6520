// decode_attention: one query a head for each row, against the keys and values of its own columns
// (ppo_fast/ops/decode_attention.py).
//
// A task is one row and one key head with the query heads that share it: scores, softmax, weighted values, three passes
// over columns that fit a cache. Columns past a row's length are never read, whatever stands there. Keys and values are
// read in place, in their own type.
//
// Numerics. Everything is float32 (float64 for float64): dot products, weights, their sum in double, values in chains of
// 256 columns. What a row gets depends neither on the other rows nor on the number of threads.
#include <memory>

#include "decode_attention.h"
#include "isa.h"
#include "parallel.h"
#include "tensors.h"

#define PPO_FAST_BODY "decode_attention_rows.h"
#include "for_each_isa.h"

namespace ppo_fast {
namespace {

template <class T> Vectors4<T> vectors(const Tensor& x, const char* name, ScalarType dtype) {
  check(x.is_cpu() && x.dim() == 4 && x.scalar_type() == dtype, name, "a CPU tensor of four axes and query's dtype");
  check(x.size(3) == 1 || x.stride(3) == 1, name, "contiguous along its last axis");
  return {static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

constexpr int64_t padded(int64_t count) { return ceil_div(count, kAttentionPad) * kAttentionPad; }

template <class T, class S>
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths, double scale,
              int64_t window, double softcap) {
  const ScalarType dtype = query.scalar_type();
  DecodeAttention<T, S> a;
  a.query = vectors<T>(query, "query", dtype);
  a.key = vectors<T>(key, "key", dtype);
  a.value = vectors<T>(value, "value", dtype);
  const int64_t n = query.size(0), heads = query.size(1), columns = key.size(2);
  a.key_heads = key.size(1);
  check(a.key_heads > 0 && heads % a.key_heads == 0, "key", "of as many heads as divide those of query");
  check(query.size(2) == 1 && query.size(3) > 0, "query", "[n, heads, 1, size]");
  check(key.size(0) == n && key.size(3) == query.size(3), "key", "[n, key heads, columns, size]");
  check(value.size(0) == n && value.size(1) == a.key_heads && value.size(2) == columns && value.size(3) > 0, "value",
        "[n, key heads, columns, value size]");
  a.lengths = data<int64_t>(lengths, "lengths", ScalarType::Long, {n});
  int64_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    check(a.lengths[i] >= 1 && a.lengths[i] <= columns, "lengths", "from 1 to the number of columns");
    most = a.lengths[i] > most ? a.lengths[i] : most;
  }
  check(window >= 0, "window", "positive, or 0 for none");
  a.group = heads / a.key_heads;
  a.size = query.size(3);
  a.value_size = value.size(3);
  a.window = window;
  a.scale = static_cast<S>(scale);
  a.softcap = static_cast<S>(softcap);
  a.padded_size = padded(a.size);
  a.padded_columns = padded(most);
  a.work_size = a.group * (a.padded_size + a.padded_columns);
  Tensor out = empty({n, heads, a.value_size}, dtype);
  a.out = static_cast<T*>(out.mutable_data_ptr());
  const std::unique_ptr<S[]> work(new S[static_cast<size_t>(n * a.key_heads * a.work_size)]);
  a.work = work.get();
  const auto run = PPO_FAST_PICK(decode_attention<T, S>);
  parallel(n * a.key_heads, most * a.group * (a.size + a.value_size) / 2, [&](int64_t begin, int64_t end) {
    run(a, begin, end);
  });
  return out;
}

Tensor decode_attention(Tensor query,    // [n, heads, 1, size]
                        Tensor key,      // [n, key heads, columns, size]
                        Tensor value,    // [n, key heads, columns, value size]
                        Tensor lengths,  // [n] int64
                        double scale, int64_t window, double softcap) {
  switch (query.scalar_type()) {
    case ScalarType::Float: return attend<float, float>(query, key, value, lengths, scale, window, softcap);
    case ScalarType::Double: return attend<double, double>(query, key, value, lengths, scale, window, softcap);
    case ScalarType::BFloat16: return attend<BFloat16, float>(query, key, value, lengths, scale, window, softcap);
    case ScalarType::Half: return attend<Half, float>(query, key, value, lengths, scale, window, softcap);
    default: throw std::invalid_argument("query must be float32, bfloat16, float16 or float64");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_fast, CPU, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }

}  // namespace ppo_fast
