// What decode_attention's kernel and its driver hand to each other.
#pragma once

#include <cstdint>

namespace ppo_fast {

// A matrix of vectors [rows][heads][columns][size], the last axis contiguous.
template <class T> struct Vectors4 {
  const T* data;
  int64_t row, head, column;  // strides in elements
};

template <class T, class S> struct DecodeAttention {
  Vectors4<T> query;  // [n][key heads * group][1][size]
  Vectors4<T> key;    // [n][key heads][columns][size]
  Vectors4<T> value;  // [n][key heads][columns][value size]
  const int64_t* lengths;  // [n], columns that a row attends to
  int64_t key_heads, group, size, value_size;
  int64_t window;  // of the last columns alone; 0 for all
  S scale, softcap;  // softcap 0 for none
  T* out;  // [n][key heads * group][value size]
  S* work;  // [n * key heads][work_size]
  int64_t work_size, padded_size, padded_columns;
};

// Longer than two vectors of any level, so that loops over whole vectors stay inside.
constexpr int64_t kAttentionPad = 32;

}  // namespace ppo_fast
