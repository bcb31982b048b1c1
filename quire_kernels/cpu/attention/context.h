// Shared by decode and prefill: the tokens of a row's context, wherever in the pool they lie, the lines of queries and
// outputs, scores from products of query and key, and the softmax over scores that come in parts.
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

// The addresses of some tokens of one row and head. In a pool these are the keys; the values are
// `AttentionArgs::value_offset` elements behind them.
template <class T, int kCapacity>
struct Span {
  int count = 0;
  const T* lines[kCapacity];

  // Finds the tokens from `token` up to `end`, at most kCapacity. Entries of tokens before `first`, whose blocks may be
  // gone, and entries after the last one repeat the next one that is there, so that reading them is safe.
  void fill(const AttentionArgs& args, int64_t row, int64_t head, int64_t token, int64_t end, int64_t first) {
    const int32_t* table = args.block_tables + row * args.table_stride;
    const int64_t line = line_size<T>(args), tile = args.block_size * line, skipped = first > token ? first - token : 0;
    int64_t column = (token + skipped) / args.block_size, offset = token + skipped - column * args.block_size;
    count = static_cast<int>(skipped);
    for (const int64_t total = end - token < kCapacity ? end - token : kCapacity; count < total; ++column, offset = 0) {
      const T* key = static_cast<const T*>(args.kv_cache) + table[column] * args.block_stride + head * tile;
      key += offset * line;
      for (; count < total && offset < args.block_size; ++offset, key += line) lines[count++] = key;
    }
    for (int i = 0; i < skipped; ++i) lines[i] = lines[skipped];
    for (int i = count; i < kCapacity; ++i) lines[i] = lines[count - 1];
  }
};

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

// Computes scores from the products of one query.
struct ScoreRule {
  float scale;
  float soft_cap;  // 0: none
  float slope;     // of ALiBi for this head; 0: none

  ScoreRule(const AttentionArgs& args, int64_t head)
      : scale(static_cast<float>(args.scale)),
        soft_cap(static_cast<float>(args.soft_cap)),
        slope(args.alibi_slopes == nullptr ? 0.0f : args.alibi_slopes[head]) {}

  // `distance` is the position of the key in lane 0 less the position of the query.
  Vec operator()(Vec product, int64_t distance) const {
    Vec score = product * set1(scale);
    if (soft_cap != 0.0f) score = set1(soft_cap) * tanh(score / set1(soft_cap));
    if (slope != 0.0f) score = fma(set1(slope), set1(static_cast<float>(distance)) + lane_numbers(), score);
    return score;
  }
};

// The running softmax of one query: `max_score` is the largest score so far, and `sum` the sum of e^(score -
// max_score).
struct Softmax {
  float max_score = -kInfinity;
  float sum = 0.0f;

  // Raises the maximum to `new_max` where that is larger; returns the factor for all sums so far.
  float raise(float new_max) {
    const float before = max_score;
    if (!(new_max > max_score)) return 1.0f;
    max_score = new_max;
    const float factor = before == -kInfinity ? 0.0f : one_exp(before - max_score);
    sum *= factor;
    return factor;
  }

  // Weights are relative to this. While all scores are -infinity it is 0, so that weights are 0 and not NaN.
  float base() const { return max_score == -kInfinity ? 0.0f : max_score; }

  static float one_exp(float x) { return first_lane(exp(set1(x))); }
};

// The softmax before the first score of a row. The sink of the head, where there is one, counts as a score so far.
inline Softmax first_softmax(const AttentionArgs& args, int64_t head) {
  return args.sinks == nullptr ? Softmax() : Softmax{args.sinks[head], 1.0f};
}

// Computes scores of products, in place; hidden ones, outside of `first` to `last` - 1, become -infinity.
// Returns the largest. `count` is a multiple of kWidth; the key of the first product is at `distance`.
template <bool kAllSeen>
inline float score_all(float* products, int count, int first, int last, const ScoreRule& rule, int64_t distance) {
  const Vec hidden = set1(-kInfinity);
  Vec largest = hidden;
  for (int i = 0; i < count; i += kWidth) {
    Vec score = rule(load(products + i), distance + i);
    if constexpr (!kAllSeen) score = keep(score, first - i, last - i, hidden);
    store(products + i, score);
    largest = max(largest, score);
  }
  return reduce_max(largest);
}

inline float score(float* products, int count, int first, int last, const ScoreRule& rule, int64_t distance) {
  return first <= 0 && last >= count ? score_all<true>(products, count, first, last, rule, distance)
                                     : score_all<false>(products, count, first, last, rule, distance);
}

// Computes weights of scores, relative to `base`; returns their sum.
template <class Weight>
inline float weigh(const float* scores, Weight* weights, int count, float base) {
  Vec sum = zero();
  for (int i = 0; i < count; i += kWidth) {
    const Vec score = load(scores + i) - set1(base);
    const Vec weight = std::is_same_v<Weight, BF16> ? exp_to_bfloat16(score) : exp(score);
    sum = sum + weight;
    store(weights + i, weight);
  }
  return reduce_add(sum);
}

}  // namespace quire::QUIRE_ISA
