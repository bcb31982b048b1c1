// Attention of one new token a row, straight from the pool: each key and value is read once for all query heads of its
// head, while those of the next span are on their way from memory.
#include "context.h"
#include "dot.h"
#include "isa.h"
#include "scores.h"

namespace quire::QUIRE_ISA {
namespace {

// Tokens between two corrections of the softmax, and how far memory is read ahead.
constexpr int kSpan = 16;
constexpr int kTokensAtOnce = 4;
constexpr int kCacheLine = 64;

template <class T>
using Tokens = Span<T, kSpan>;

// Scratch memory of one thread: the query heads of one key/value head.
template <class T>
struct Group {
  int64_t heads;
  int64_t head_dim;
  int64_t stride;
  typename Dot<T>::Query* query;  // [heads, stride], zeros after the head
  float* sums;                    // [heads, stride]
  float* weights;                 // [heads, kSpan]
  float* most;                    // [heads]
  Softmax* softmax;               // [heads]

  Group(const AttentionArgs& args, Arena& arena)
      : heads(args.num_heads / args.num_kv_heads), head_dim(args.head_dim), stride(padded(head_dim)) {
    query = arena.take<typename Dot<T>::Query>(heads * stride);
    sums = arena.take<float>(heads * stride);
    weights = arena.take<float>(heads * kSpan);
    most = arena.take<float>(heads);
    softmax = arena.take<Softmax>(heads);
  }

  void start(const AttentionArgs& args, int64_t token, int64_t first_head) {
    std::memset(query, 0, heads * stride * sizeof(*query));
    std::memset(sums, 0, heads * stride * sizeof(float));
    for (int64_t h = 0; h < heads; ++h) {
      copy_query(query + h * stride, query_of<T>(args, token, first_head + h), head_dim);
      softmax[h] = Softmax();
    }
  }
};

template <class T>
inline void prefetch(const T* from, int64_t elements) {
  const char* line = reinterpret_cast<const char*>(from);
  const char* end = reinterpret_cast<const char*>(from + elements);
  for (; line < end; line += kCacheLine) _mm_prefetch(line, _MM_HINT_T0);
}

// Products of heads h to h + kHeads - 1 with the keys of four tokens, to column t of the weights.
template <class T, int kHeads>
inline void multiply(const Group<T>& group, int64_t h, const Tokens<T>& tokens, int t) {
  constexpr int kStep = Dot<T>::kStep;
  const typename Dot<T>::Query* query = group.query + h * group.stride;
  Vec products[kHeads][kTokensAtOnce] = {};
  auto add = [&](int64_t d, auto... count) {
    typename Dot<T>::Operand keys[kTokensAtOnce];
    for (int i = 0; i < kTokensAtOnce; ++i) keys[i] = Dot<T>::operand(tokens.keys[t + i] + d, count...);
    for (int k = 0; k < kHeads; ++k)
      for (int i = 0; i < kTokensAtOnce; ++i)
        products[k][i] = Dot<T>::add(products[k][i], keys[i], query + k * group.stride + d);
  };
  int64_t d = 0;
  for (; d + kStep <= group.head_dim; d += kStep) add(d);
  if (d < group.head_dim) add(d, static_cast<int>(group.head_dim - d));
  for (int k = 0; k < kHeads; ++k) reduce_add4(products[k], group.weights + (h + k) * kSpan + t);
}

// Adds the weighted values of a span to dimensions d to d + kVectors * kWidth - 1 of kHeads heads.
template <class T, int kHeads, int kVectors>
inline void add_values(Group<T>& group, int64_t h, int64_t d, const Tokens<T>& tokens, int64_t offset) {
  float* sums = group.sums + h * group.stride + d;
  const float* weights = group.weights + h * kSpan;
  Vec totals[kHeads][kVectors];
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) totals[k][i] = load(sums + k * group.stride + i * kWidth);
  for (int t = 0; t < tokens.count; ++t) {
    const T* value = tokens.keys[t] + offset + d;
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
inline void add_last_values(Group<T>& group, int64_t h, int64_t d, const Tokens<T>& tokens, int64_t offset) {
  float* sums = group.sums + h * group.stride + d;
  Vec total = load(sums);
  for (int t = 0; t < tokens.count; ++t) {
    const Vec value = load(tokens.keys[t] + offset + d, static_cast<int>(group.head_dim - d));
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

template <class T>
void multiply_keys(Group<T>& group, const Tokens<T>& tokens, const Tokens<T>& next) {
  for (int t = 0; t < tokens.count; t += kTokensAtOnce) {
    for (int i = t; i < t + kTokensAtOnce && i < next.count; ++i) prefetch(next.keys[i], group.head_dim);
    for_heads<kSums / kTokensAtOnce>(group.heads, [&]<int kHeads>(int64_t h) { multiply<T, kHeads>(group, h, tokens, t); });
  }
}

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

template <class T>
void add_weighted_values(Group<T>& group, const Tokens<T>& tokens, const Tokens<T>& next, int64_t offset) {
  for (int t = 0; t < next.count; ++t) prefetch(next.keys[t] + offset, group.head_dim);
  for_heads<4>(group.heads, [&]<int kHeads>(int64_t h) {
    constexpr int kVectors = kSums / kHeads < 4 ? kSums / kHeads : 4;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= group.head_dim; d += kVectors * kWidth)
      add_values<T, kHeads, kVectors>(group, h, d, tokens, offset);
    for (; d + kWidth <= group.head_dim; d += kWidth) add_values<T, kHeads, 1>(group, h, d, tokens, offset);
    for (int64_t k = h; d < group.head_dim && k < h + kHeads; ++k) add_last_values(group, k, d, tokens, offset);
  });
}

// Leaves the result of one key/value head in the output or, where it is a part of the context only, as states.
template <class T>
void finish(const AttentionArgs& args, const Unit& unit, const Group<T>& group, int64_t token, int64_t first_head) {
  for (int64_t h = 0; h < group.heads; ++h) {
    const float* sums = group.sums + h * group.stride;
    if (unit.states == nullptr) {
      write_output(output_of<T>(args, token, first_head + h), sums, group.softmax[h].sum, group.head_dim);
      continue;
    }
    float* state = unit.states + h * state_size(args);
    state[0] = group.softmax[h].most;
    state[1] = group.softmax[h].sum;
    std::memcpy(state + 2, sums, group.head_dim * sizeof(float));
  }
}

template <class T>
void decode(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  Arena arena(scratch);
  Group<T> group(args, arena);
  const int64_t offset = value_offset(args), token = args.query_start_loc[unit.row];
  const int64_t position = args.seq_lens[unit.row] - 1;
  Tokens<T> tokens, next;
  next.fill(args, unit.row, unit.head_begin, unit.begin, unit.end);
  for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
    group.start(args, token, head * group.heads);
    for (int64_t at = unit.begin; at < unit.end; at += kSpan) {
      tokens = next;
      next.count = 0;
      if (at + kSpan < unit.end)
        next.fill(args, unit.row, head, at + kSpan, unit.end);
      else if (head + 1 < unit.head_end)
        next.fill(args, unit.row, head + 1, unit.begin, unit.end);
      multiply_keys(group, tokens, next);
      weigh_heads(args, group, head * group.heads, tokens.count, at - position);
      add_weighted_values(group, tokens, next, offset);
    }
    finish(args, unit, group, token, head * group.heads);
  }
}

template <class T>
int64_t scratch_of(const AttentionArgs& args) {
  Arena arena(nullptr);
  Group<T> group(args, arena);
  return arena.used();
}

template <class T>
void merge(const AttentionArgs& args, const Unit& unit, float* states, int64_t chunks) {
  const int64_t group = args.num_heads / args.num_kv_heads, size = state_size(args), dims = args.head_dim;
  for (int64_t h = 0; h < group; ++h) {
    const int64_t head = unit.head_begin * group + h;
    // The first chunk's state takes the others in.
    float* total = states + h * size;
    Softmax softmax;
    softmax.most = total[0];
    softmax.sum = total[1];
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      const float* state = states + (chunk * group + h) * size;
      const float before = softmax.raise(state[0]);
      const float factor = state[0] == -kInfinity ? 0.0f : Softmax::one_exp(state[0] - softmax.base());
      softmax.sum += state[1] * factor;
      for (int64_t d = 0; d < dims; ++d) total[2 + d] = total[2 + d] * before + state[2 + d] * factor;
    }
    write_output(output_of<T>(args, args.query_start_loc[unit.row], head), total + 2, softmax.sum, dims);
  }
}

}  // namespace

extern const decltype(IsaKernels::decode) decode_kernels = {{decode<float>, decode<BF16>, decode<F16>}};
extern const decltype(IsaKernels::merge) merge_kernels = {{merge<float>, merge<BF16>, merge<F16>}};
extern const decltype(IsaKernels::decode_scratch) decode_scratch = {
    {scratch_of<float>, scratch_of<BF16>, scratch_of<F16>}};

}  // namespace quire::QUIRE_ISA
