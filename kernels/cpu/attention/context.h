// The tokens of a row's context, wherever in the pool they lie, and the lines of queries and outputs.
#pragma once

#include <type_traits>

#include "runtime/api.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {

// Elements of one token and head in a pool of T; int8_t stands for int8 lines.
template <class T>
inline int64_t line_size(const AttentionArgs& args) {
  return std::is_same_v<T, int8_t> ? args.int8_line_bytes : args.head_dim;
}

// Where some tokens of one row and head are in memory: in a pool their keys, `value_offset` elements behind which are
// their values.
template <class T, int kCapacity>
struct Span {
  int count = 0;
  const T* lines[kCapacity];

  // The next tokens from `token` up to `end`, at most kCapacity. Places after the last repeat it: reading them is safe.
  void fill(const AttentionArgs& args, int64_t row, int64_t head, int64_t token, int64_t end) {
    const int32_t* table = args.block_tables + row * args.table_stride;
    const int64_t line = line_size<T>(args), tile = args.block_size * line;
    int64_t column = token / args.block_size, offset = token - column * args.block_size;
    count = 0;
    for (const int64_t total = end - token < kCapacity ? end - token : kCapacity; count < total; ++column, offset = 0) {
      const T* key = static_cast<const T*>(args.kv_cache) + (table[column] * args.num_kv_heads + head) * tile;
      key += offset * line;
      for (; count < total && offset < args.block_size; ++offset, key += line) lines[count++] = key;
    }
    for (int i = count; i < kCapacity; ++i) lines[i] = lines[count - 1];
  }
};

template <class T>
inline int64_t value_offset(const AttentionArgs& args) {
  return args.num_blocks * args.num_kv_heads * args.block_size * line_size<T>(args);
}

inline constexpr int kCacheLine = 64;

template <class T>
inline const T* query_of(const AttentionArgs& args, int64_t token, int64_t head) {
  return static_cast<const T*>(args.query) + token * args.query_token_stride + head * args.query_head_stride;
}

// One head of a query, as elements to multiply: T itself or float.
template <class Element, class T>
inline void copy_query(Element* to, const T* from, int64_t head_dim) {
  if constexpr (sizeof(Element) == sizeof(T)) {
    std::memcpy(to, from, head_dim * sizeof(T));
  } else {
    int64_t d = 0;
    for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(from + d));
    if (d < head_dim) store(to + d, load(from + d, static_cast<int>(head_dim - d)));
  }
}

template <class T>
inline T* output_of(const AttentionArgs& args, int64_t token, int64_t head) {
  return static_cast<T*>(args.output) + (token * args.num_heads + head) * args.head_dim;
}

// Writes sums / sum in the element type.
template <class T>
inline void write_output(T* output, const float* sums, float sum, int64_t head_dim) {
  const Vec divisor = set1(sum);
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(output + d, load(sums + d) / divisor);
  if (d < head_dim) store(output + d, load(sums + d, head_dim - d) / divisor, head_dim - d);
}

}  // namespace quire::QUIRE_ISA
