// What the query heads of one key/value head do with one span of keys and values.
#pragma once

#include "codes.h"
#include "context.h"
#include "dot.h"
#include "isa.h"
#include "scores.h"

namespace quire::QUIRE_ISA {
namespace {

// Tokens between two corrections of the softmax.
constexpr int kSpan = 32;
constexpr int kTokensAtOnce = 4;

// A span of one head, all kSpan tokens of which can be read: its keys lie `offset` elements after those that the span
// names, its values `values` elements after its keys.
template <class T>
struct Place {
  const Span<T, kSpan>* span;
  int64_t offset;
  int64_t values;

  int count() const { return span->count; }
  const T* key(int t) const { return span->lines[t] + offset; }
  const T* value(int t) const { return key(t) + values; }
  void fetch_key(int t, int64_t elements) const { prefetch(key(t), elements); }
  void fetch_value(int t, int64_t d, int64_t elements) const { prefetch(value(t) + d, elements); }
};

// The scales of the codes of one head in a span; 0 where there is no token. Pools of numbers have none.
template <class T>
struct Scales {
  static constexpr const float *keys = nullptr, *values = nullptr;

  Scales(const Place<T>&, int64_t) {}
};

template <>
struct Scales<int8_t> {
  float keys[kSpan] = {}, values[kSpan] = {};

  Scales(const Place<int8_t>& place, int64_t line) {
    for (int t = 0; t < place.count(); ++t) {
      keys[t] = scale_of(place.key(t), line);
      values[t] = scale_of(place.value(t), line);
    }
  }
};

// The query heads of some key/value heads, over a pool of T: scratch memory of one thread.
template <class T>
struct Group {
  int64_t heads;
  int64_t head_dim;
  int64_t line;  // elements of a token in the pool
  int64_t stride;
  typename Dot<T>::Query* query;  // [heads, stride], zeros after the head
  float* sums;                    // [heads, stride]
  float* weights;                 // [heads, kSpan]
  float* most;                    // [heads]
  Softmax* softmax;               // [heads]

  Group(const AttentionArgs& args, int64_t num_kv_heads, Arena& arena)
      : heads(args.num_heads / args.num_kv_heads * num_kv_heads),
        head_dim(args.head_dim),
        line(line_size<T>(args)),
        stride(padded(head_dim)) {
    query = arena.take<typename Dot<T>::Query>(heads * stride);
    sums = arena.take<float>(heads * stride);
    weights = arena.take<float>(heads * kSpan);
    most = arena.take<float>(heads);
    softmax = arena.take<Softmax>(heads);
  }

  // With queries of Element; `begins_row` where no other group has the same queries on earlier tokens.
  template <class Element>
  void start(const AttentionArgs& args, int64_t token, int64_t first_head, bool begins_row) {
    std::memset(query, 0, heads * stride * sizeof(*query));
    std::memset(sums, 0, heads * stride * sizeof(float));
    for (int64_t h = 0; h < heads; ++h) {
      copy_query(query + h * stride, query_of<Element>(args, token, first_head + h), head_dim);
      softmax[h] = begins_row ? first_softmax(args, first_head + h) : Softmax();
    }
  }

  // The `count` heads from `first` on.
  Group part(int64_t first, int64_t count) const {
    Group group = *this;
    group.heads = count;
    group.query += first * stride;
    group.sums += first * stride;
    group.weights += first * kSpan;
    group.most += first;
    group.softmax += first;
    return group;
  }
};

// Products of heads h to h + kHeads - 1 with the keys of four tokens, to column t of the weights.
template <class T, int kHeads>
inline void multiply(const Group<T>& group, int64_t h, const Place<T>& place, int t) {
  constexpr int kStep = Dot<T>::kStep;
  const typename Dot<T>::Query* query = group.query + h * group.stride;
  Vec products[kHeads][kTokensAtOnce] = {};
  auto add = [&](int64_t d, auto... count) {
    typename Dot<T>::Operand keys[kTokensAtOnce];
    for (int i = 0; i < kTokensAtOnce; ++i) keys[i] = Dot<T>::operand(place.key(t + i) + d, count...);
    for (int k = 0; k < kHeads; ++k)
      for (int i = 0; i < kTokensAtOnce; ++i)
        products[k][i] = Dot<T>::add(products[k][i], keys[i], query + k * group.stride + d);
  };
  int64_t d = 0;
  for (; d + kStep <= group.head_dim; d += kStep) add(d);
  if (d < group.head_dim) add(d, static_cast<int>(group.head_dim - d));
  for (int k = 0; k < kHeads; ++k) reduce_add4(products[k], group.weights + (h + k) * kSpan + t);
}

// Adds the weighted values of a span to dimensions d to d + kVectors * kWidth - 1 of kHeads heads, of which the first ones
// fetch the next place.
template <class T, int kHeads, int kVectors, class Next>
inline void add_values(Group<T>& group, int64_t h, int64_t d, const Place<T>& place, Next& next) {
  float* sums = group.sums + h * group.stride + d;
  const float* weights = group.weights + h * kSpan;
  Vec totals[kHeads][kVectors];
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) totals[k][i] = load(sums + k * group.stride + i * kWidth);
  for (int t = 0; t < place.count(); ++t) {
    if (h == 0) next.fetch_value(t, d, kVectors * kWidth);
    const T* value = place.value(t) + d;
    Vec values[kVectors];
    for (int i = 0; i < kVectors; ++i) values[i] = load(value + i * kWidth);
    for (int k = 0; k < kHeads; ++k)
      for (int i = 0; i < kVectors; ++i)
        totals[k][i] = fma(set1(weights[k * kSpan + t]), values[i], totals[k][i]);
  }
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) store(sums + k * group.stride + i * kWidth, totals[k][i]);
}

// The same for the last dimensions, fewer than a vector.
template <class T>
inline void add_last_values(Group<T>& group, int64_t h, int64_t d, const Place<T>& place) {
  float* sums = group.sums + h * group.stride + d;
  Vec total = load(sums);
  for (int t = 0; t < place.count(); ++t) {
    const Vec value = load(place.value(t) + d, static_cast<int>(group.head_dim - d));
    total = fma(set1(group.weights[h * kSpan + t]), value, total);
  }
  store(sums, total);
}

// Calls function(head) for all heads, kMost at once where there are so many; how many is its template argument.
template <int kMost, class Function>
inline void for_heads(int64_t heads, Function function) {
  int64_t h = 0;
  if constexpr (kMost >= 4)
    for (; h + 4 <= heads; h += 4) function.template operator()<4>(h);
  for (; h + 2 <= heads; h += 2) function.template operator()<2>(h);
  for (; h < heads; ++h) function.template operator()<1>(h);
}

template <class T, class Next>
void multiply_keys(Group<T>& group, const Place<T>& place, Next& next) {
  for (int t = 0; t < place.count(); t += kTokensAtOnce) {
    for (int i = t; i < t + kTokensAtOnce; ++i) next.fetch_key(i, group.line);
    for_heads<kSums / kTokensAtOnce>(group.heads, [&]<int kHeads>(int64_t h) { multiply<T, kHeads>(group, h, place, t); });
  }
}

// What is by token in the weights times what codes of that token stand for.
inline void scale_tokens(const Group<int8_t>& group, const float* scales) {
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kSpan;
    for (int t = 0; t < kSpan; t += kWidth) store(weights + t, load(weights + t) * load(scales + t));
  }
}

// Pools of numbers have no scales.
template <class T>
inline void scale_tokens(const Group<T>&, const float*) {}

template <class T>
void scale_sums(Group<T>& group, int64_t h, float factor) {
  float* sums = group.sums + h * group.stride;
  for (int64_t d = 0; d < group.stride; d += kWidth) store(sums + d, load(sums + d) * set1(factor));
}

// In three passes, since in each of them the processor can work on several heads at once.
template <class T>
void weigh_heads(const AttentionArgs& args, Group<T>& group, int64_t first_head, int count, int64_t distance) {
  for (int64_t h = 0; h < group.heads; ++h)
    group.most[h] = score(group.weights + h * kSpan, kSpan, 0, count, ScoreRule(args, first_head + h), distance);
  for (int64_t h = 0; h < group.heads; ++h) {
    const float factor = group.softmax[h].raise(group.most[h]);
    if (factor != 1.0f) scale_sums(group, h, factor);
  }
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kSpan;
    group.softmax[h].sum += weigh(weights, weights, kSpan, group.softmax[h].base());
  }
}

template <class T, class Next>
void add_weighted_values(Group<T>& group, const Place<T>& place, Next& next) {
  for_heads<4>(group.heads, [&]<int kHeads>(int64_t h) {
    constexpr int kVectors = kSums / kHeads < 4 ? kSums / kHeads : 4;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= group.head_dim; d += kVectors * kWidth)
      add_values<T, kHeads, kVectors>(group, h, d, place, next);
    for (; d + kWidth <= group.head_dim; d += kWidth) add_values<T, kHeads, 1>(group, h, d, place, next);
    for (int64_t k = h; d < group.head_dim && k < h + kHeads; ++k) add_last_values(group, k, d, place);
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
