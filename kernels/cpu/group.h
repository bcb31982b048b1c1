// What the query heads of one key/value head do with one span of keys and values.
#pragma once

#include "codes.h"
#include "context.h"
#include "dot.h"
#include "isa.h"
#include "pieces.h"
#include "scores.h"

namespace quire::QUIRE_ISA {
namespace {

// Tokens between two corrections of the softmax.
constexpr int kSpan = 32;
constexpr int kTokensAtOnce = 4;

// Scores of a head in a span, with room for what is read and written at once behind the last.
constexpr int kScores = kSpan + kWidth;

// The memory that a unit reads, in the order in which it does so: span after span the keys of all its heads, block by block, then
// the values. While a part is read, one some way ahead of it is asked for.
template <class Stored>
class UnitAhead {
 public:
  // Asks for the first parts.
  UnitAhead(const AttentionArgs& args, const Unit& unit) : args_(args), unit_(unit), token_(unit.begin) {
    pieces_.fill(args, unit.row, token_, unit.end);
    for (int64_t bytes = 0; bytes < kBytesAhead && token_ < unit_.end;) {
      LinesAhead part = next();
      bytes += part.end - part.next;
      part.fetch_all();
    }
  }

  // What to ask for while the next part is read.
  LinesAhead next() {
    if (token_ >= unit_.end) return {};
    const Part<Stored> part(args_, pieces_.pieces[piece_], unit_.head_begin + head_, values_);
    const LinesAhead lines{part.begin(), part.end()};
    go_on();
    return lines;
  }

 private:
  static constexpr int64_t kBytesAhead = 1 << 13;

  void go_on() {
    if (++head_ < unit_.head_end - unit_.head_begin) return;
    head_ = 0;
    if (++piece_ < pieces_.num_pieces) return;
    piece_ = 0;
    values_ = !values_;
    if (!values_) pieces_.fill(args_, unit_.row, token_ += kSpan, unit_.end);
  }

  const AttentionArgs& args_;
  const Unit& unit_;
  int64_t token_;
  Pieces<Stored, kSpan> pieces_;
  bool values_ = false;
  int piece_ = 0;
  int64_t head_ = 0;
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
  float* weights;                 // [heads, kScores]
  float* most;                    // [heads]
  Softmax* softmax;               // [heads]

  Group(const AttentionArgs& args, int64_t num_kv_heads, Arena& arena)
      : heads(args.num_heads / args.num_kv_heads * num_kv_heads),
        head_dim(args.head_dim),
        line(line_size<T>(args)),
        stride(padded(head_dim)) {
    query = arena.take<typename Dot<T>::Query>(heads * stride);
    sums = arena.take<float>(heads * stride);
    weights = arena.take<float>(heads * kScores);
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
    group.weights += first * kScores;
    group.most += first;
    group.softmax += first;
    return group;
  }
};

// Products of heads h to h + kHeads - 1 with four keys, to column `column` of the weights and those after it.
template <class T, int kHeads>
inline void multiply(const Group<T>& group, int64_t h, const T* const (&tokens)[kTokensAtOnce], int column) {
  constexpr int kStep = Dot<T>::kStep;
  const typename Dot<T>::Query* query = group.query + h * group.stride;
  Vec products[kHeads][kTokensAtOnce] = {};
  auto add = [&](int64_t d, auto... count) {
    typename Dot<T>::Operand keys[kTokensAtOnce];
    for (int i = 0; i < kTokensAtOnce; ++i) keys[i] = Dot<T>::operand(tokens[i] + d, count...);
    for (int k = 0; k < kHeads; ++k)
      for (int i = 0; i < kTokensAtOnce; ++i)
        products[k][i] = Dot<T>::add(products[k][i], keys[i], query + k * group.stride + d);
  };
  int64_t d = 0;
  for (; d + kStep <= group.head_dim; d += kStep) add(d);
  if (d < group.head_dim) add(d, static_cast<int>(group.head_dim - d));
  for (int k = 0; k < kHeads; ++k) reduce_add4(products[k], group.weights + (h + k) * kScores + column);
}

// Adds the values of `count` tokens, times the weights from column `column` on, to dimensions d to d + kVectors * kWidth - 1 of
// kHeads heads.
template <class T, int kHeads, int kVectors>
inline void add_values(Group<T>& group, int64_t h, int64_t d, const T* value, int count, int column, LinesAhead& ahead) {
  float* sums = group.sums + h * group.stride + d;
  const float* weights = group.weights + h * kScores + column;
  Vec totals[kHeads][kVectors];
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) totals[k][i] = load(sums + k * group.stride + i * kWidth);
  value += d;
  for (int t = 0; t < count; ++t, value += group.line) {
    ahead.fetch(num_lines(kVectors * kWidth * sizeof(T)));
    Vec values[kVectors];
    for (int i = 0; i < kVectors; ++i) values[i] = load(value + i * kWidth);
    for (int k = 0; k < kHeads; ++k)
      for (int i = 0; i < kVectors; ++i)
        totals[k][i] = fma(set1(weights[k * kScores + t]), values[i], totals[k][i]);
  }
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) store(sums + k * group.stride + i * kWidth, totals[k][i]);
}

// The same for the last dimensions, fewer than a vector.
template <class T>
inline void add_last_values(Group<T>& group, int64_t h, int64_t d, const T* value, int count, int column) {
  float* sums = group.sums + h * group.stride + d;
  Vec total = load(sums);
  value += d;
  for (int t = 0; t < count; ++t, value += group.line)
    total = fma(set1(group.weights[h * kScores + column + t]), load(value, static_cast<int>(group.head_dim - d)), total);
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

// Keys of `count` tokens, one after the other.
template <class T>
void multiply_keys(Group<T>& group, const T* keys, int count, int column, LinesAhead& ahead) {
  for (int t = 0; t < count; t += kTokensAtOnce) {
    ahead.fetch(num_lines(kTokensAtOnce * group.line * sizeof(T)));
    const T* tokens[kTokensAtOnce];
    for (int i = 0; i < kTokensAtOnce; ++i) tokens[i] = keys + (t + i < count ? t + i : count - 1) * group.line;
    for_heads<kSums / kTokensAtOnce>(group.heads,
                                     [&]<int kHeads>(int64_t h) { multiply<T, kHeads>(group, h, tokens, column + t); });
  }
}

// What is by token in the weights times what codes of that token stand for.
inline void scale_tokens(const Group<int8_t>& group, const int8_t* tokens, int count, int column) {
  float scales[kScores];
  for (int t = 0; t < count; ++t) scales[t] = scale_of(tokens + t * group.line, group.line);
  for (int t = count; t % kWidth != 0; ++t) scales[t] = 1.0f;
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kScores + column;
    for (int t = 0; t < count; t += kWidth) store(weights + t, load(weights + t) * load(scales + t));
  }
}

// Pools of numbers have no scales.
template <class T>
inline void scale_tokens(const Group<T>&, const T*, int, int) {}

template <class T>
void scale_sums(Group<T>& group, int64_t h, float factor) {
  float* sums = group.sums + h * group.stride;
  for (int64_t d = 0; d < group.stride; d += kWidth) store(sums + d, load(sums + d) * set1(factor));
}

// In three passes, since in each of them the processor can work on several heads at once.
template <class T>
void weigh_heads(const AttentionArgs& args, Group<T>& group, int64_t first_head, int count, int64_t distance) {
  for (int64_t h = 0; h < group.heads; ++h)
    group.most[h] = score(group.weights + h * kScores, kSpan, 0, count, ScoreRule(args, first_head + h), distance);
  for (int64_t h = 0; h < group.heads; ++h) {
    const float factor = group.softmax[h].raise(group.most[h]);
    if (factor != 1.0f) scale_sums(group, h, factor);
  }
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kScores;
    group.softmax[h].sum += weigh(weights, weights, kSpan, group.softmax[h].base());
  }
}

// Values of `count` tokens, one after the other.
template <class T>
void add_weighted_values(Group<T>& group, const T* values, int count, int column, LinesAhead& ahead) {
  for_heads<4>(group.heads, [&]<int kHeads>(int64_t h) {
    constexpr int kVectors = kSums / kHeads < 4 ? kSums / kHeads : 4;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= group.head_dim; d += kVectors * kWidth)
      add_values<T, kHeads, kVectors>(group, h, d, values, count, column, ahead);
    for (; d + kWidth <= group.head_dim; d += kWidth) add_values<T, kHeads, 1>(group, h, d, values, count, column, ahead);
    for (int64_t k = h; d < group.head_dim && k < h + kHeads; ++k) add_last_values(group, k, d, values, count, column);
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
