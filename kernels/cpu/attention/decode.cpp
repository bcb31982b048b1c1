// Attention of one new token a row, straight from the pool: each key and value is read once for all query heads of its
// head, while the next ones are prefetched. The tiles of one block lie side by side, so all heads of a unit take turns
// at every block: memory is read in long stretches, wherever the blocks are.
#include "attention/context.h"
#include "runtime/isa.h"

namespace quire::QUIRE_ISA {
namespace {

// Products of a query with a key, operand by operand: in float, or for bfloat16 in pairs where the processor has it.
template <class T>
struct Dot {
  using Operand = Vec;
  using Query = float;
  static constexpr int kStep = kWidth;

  static Operand operand(const T* key) { return load(key); }
  static Operand operand(const T* key, int n) { return load(key, n); }
  static Vec add(Vec sum, Operand key, const Query* query) { return fma(key, load(query), sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<BF16> {
  using Operand = __m512bh;
  using Query = BF16;
  static constexpr int kStep = 2 * kWidth;

  static Operand operand(const BF16* key) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(key)); }
  static Operand operand(const BF16* key, int n) {
    const __mmask32 lanes = n < 32 ? (1u << n) - 1 : ~0u;
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(lanes, key));
  }
  static Vec add(Vec sum, Operand key, const Query* query) { return {_mm512_dpbf16_ps(sum.v, key, operand(query))}; }
};
#endif

// Tokens between two corrections of the softmax.
constexpr int kSpan = 32;
constexpr int kTokensAtOnce = 4;

// Scores of a head in a span, with room for what is read and written at once behind the last.
constexpr int kScores = kSpan + kWidth;

// Tokens of a row's context that lie in one block.
template <class Stored>
struct Piece {
  const Stored* keys;  // of the first of them and head 0
  int count;
};

// Some tokens of a row, block by block.
template <class Stored, int kCapacity>
struct Pieces {
  int count = 0;  // of tokens
  int num_pieces = 0;
  Piece<Stored> pieces[kCapacity];

  // The next tokens from `token` up to `end`, at most kCapacity.
  void fill(const AttentionArgs& args, int64_t row, int64_t token, int64_t end) {
    const int32_t* table = args.block_tables + row * args.table_stride;
    const int64_t line = line_size<Stored>(args), block = args.num_kv_heads * args.block_size * line;
    int64_t column = token / args.block_size, first = token - column * args.block_size;
    int64_t left = end - token < kCapacity ? end - token : kCapacity;
    count = left > 0 ? static_cast<int>(left) : 0;
    for (num_pieces = 0; left > 0; ++column, first = 0) {
      const int64_t tokens = args.block_size - first < left ? args.block_size - first : left;
      const Stored* keys = static_cast<const Stored*>(args.kv_cache) + table[column] * block + first * line;
      pieces[num_pieces++] = {keys, static_cast<int>(tokens)};
      left -= tokens;
    }
  }
};

// Keys or values of one head in a piece, as they lie in memory.
template <class Stored>
inline const Stored* tokens_of(const AttentionArgs& args, const Piece<Stored>& piece, int64_t head, bool values) {
  return piece.keys + head * args.block_size * line_size<Stored>(args) + (values ? value_offset<Stored>(args) : 0);
}

constexpr int64_t num_lines(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine; }

// Memory to prefetch a few lines at a time: a processor whose queue of requests is full does nothing else.
struct PrefetchLines {
  const char *next = nullptr, *end = nullptr;

  void fetch(int64_t lines) {
    for (; lines > 0 && next < end; --lines, next += kCacheLine) prefetch<kPrefetchCache>(next);
  }
  void fetch_all() {
    for (; next < end; next += kCacheLine) prefetch<kPrefetchCache>(next);
  }
};

// The memory that a unit reads, in that order: span after span the keys of all its heads, block by block, then the
// values. While one part is read, another some way ahead is prefetched.
template <class Stored>
class PrefetchQueue {
 public:
  // Prefetches the first parts.
  PrefetchQueue(const AttentionArgs& args, const Unit& unit) : args_(args), unit_(unit), token_(unit.begin) {
    pieces_.fill(args, unit.row, token_, unit.end);
    for (int64_t bytes = 0; bytes < kPrefetchDistance && token_ < unit_.end;) {
      PrefetchLines part = next();
      bytes += part.end - part.next;
      part.fetch_all();
    }
  }

  // The lines to prefetch while the next part is read.
  PrefetchLines next() {
    if (token_ >= unit_.end) return {};
    const Piece<Stored>& piece = pieces_.pieces[piece_];
    const Stored* tokens = tokens_of(args_, piece, unit_.head_begin + head_, values_);
    const Stored* last = tokens + piece.count * line_size<Stored>(args_);
    const PrefetchLines lines{reinterpret_cast<const char*>(tokens), reinterpret_cast<const char*>(last)};
    go_on();
    return lines;
  }

 private:
  static constexpr int64_t kPrefetchDistance = 1 << 13;

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
struct HeadGroup {
  int64_t heads;
  int64_t head_dim;
  int64_t line;  // elements of a token in the pool
  int64_t stride;
  typename Dot<T>::Query* query;  // [heads, stride], zeros after the head
  float* sums;                    // [heads, stride]
  float* weights;                 // [heads, kScores]
  float* max_scores;              // [heads]
  Softmax* softmax;               // [heads]

  HeadGroup(const AttentionArgs& args, int64_t num_kv_heads, Arena& arena)
      : heads(args.num_heads / args.num_kv_heads * num_kv_heads),
        head_dim(args.head_dim),
        line(line_size<T>(args)),
        stride(padded(head_dim)) {
    query = arena.take<typename Dot<T>::Query>(heads * stride);
    sums = arena.take<float>(heads * stride);
    weights = arena.take<float>(heads * kScores);
    max_scores = arena.take<float>(heads);
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
  HeadGroup part(int64_t first, int64_t count) const {
    HeadGroup group = *this;
    group.heads = count;
    group.query += first * stride;
    group.sums += first * stride;
    group.weights += first * kScores;
    group.max_scores += first;
    group.softmax += first;
    return group;
  }
};

// Products of heads h to h + kHeads - 1 with four keys, to column `column` of the weights and those after it.
template <class T, int kHeads>
inline void multiply(const HeadGroup<T>& group, int64_t h, const T* const (&tokens)[kTokensAtOnce], int column) {
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

// Adds the values of `count` tokens, times the weights from column `column` on, to dimensions d to d + kVectors *
// kWidth - 1 of kHeads heads.
template <class T, int kHeads, int kVectors>
inline void add_values(HeadGroup<T>& group, int64_t h, int64_t d, const T* value, int count, int column,
                       PrefetchLines& ahead) {
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
      for (int i = 0; i < kVectors; ++i) totals[k][i] = fma(set1(weights[k * kScores + t]), values[i], totals[k][i]);
  }
  for (int k = 0; k < kHeads; ++k)
    for (int i = 0; i < kVectors; ++i) store(sums + k * group.stride + i * kWidth, totals[k][i]);
}

// The same for the last dimensions, fewer than a vector.
template <class T>
inline void add_last_values(HeadGroup<T>& group, int64_t h, int64_t d, const T* value, int count, int column) {
  float* sums = group.sums + h * group.stride + d;
  Vec total = load(sums);
  value += d;
  for (int t = 0; t < count; ++t, value += group.line)
    total =
        fma(set1(group.weights[h * kScores + column + t]), load(value, static_cast<int>(group.head_dim - d)), total);
  store(sums, total);
}

// Calls function(head) for all heads, kMax at once where there are so many; how many is its template argument.
template <int kMax, class Function>
inline void for_heads(int64_t heads, Function function) {
  int64_t h = 0;
  if constexpr (kMax >= 4)
    for (; h + 4 <= heads; h += 4) function.template operator()<4>(h);
  for (; h + 2 <= heads; h += 2) function.template operator()<2>(h);
  for (; h < heads; ++h) function.template operator()<1>(h);
}

// Keys of `count` tokens, one after the other.
template <class T>
void multiply_keys(HeadGroup<T>& group, const T* keys, int count, int column, PrefetchLines& ahead) {
  for (int t = 0; t < count; t += kTokensAtOnce) {
    ahead.fetch(num_lines(kTokensAtOnce * group.line * sizeof(T)));
    const T* tokens[kTokensAtOnce];
    for (int i = 0; i < kTokensAtOnce; ++i) tokens[i] = keys + (t + i < count ? t + i : count - 1) * group.line;
    for_heads<kSums / kTokensAtOnce>(group.heads,
                                     [&]<int kHeads>(int64_t h) { multiply<T, kHeads>(group, h, tokens, column + t); });
  }
}

// Multiplies the weights of each token by the scale of its int8 line.
inline void scale_tokens(const HeadGroup<int8_t>& group, const int8_t* tokens, int count, int column) {
  float scales[kScores];
  for (int t = 0; t < count; ++t) scales[t] = scale_of(tokens + t * group.line, group.line);
  for (int t = count; t % kWidth != 0; ++t) scales[t] = 1.0f;
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kScores + column;
    for (int t = 0; t < count; t += kWidth) store(weights + t, load(weights + t) * load(scales + t));
  }
}

// Floating pools have no scales.
template <class T>
inline void scale_tokens(const HeadGroup<T>&, const T*, int, int) {}

template <class T>
void scale_sums(HeadGroup<T>& group, int64_t h, float factor) {
  float* sums = group.sums + h * group.stride;
  for (int64_t d = 0; d < group.stride; d += kWidth) store(sums + d, load(sums + d) * set1(factor));
}

// In three passes, since in each of them the processor can work on several heads at once.
template <class T>
void weigh_heads(const AttentionArgs& args, HeadGroup<T>& group, int64_t first_head, int count, int64_t distance) {
  for (int64_t h = 0; h < group.heads; ++h)
    group.max_scores[h] =
        score(group.weights + h * kScores, kSpan, 0, count, ScoreRule(args, first_head + h), distance);
  for (int64_t h = 0; h < group.heads; ++h) {
    const float factor = group.softmax[h].raise(group.max_scores[h]);
    if (factor != 1.0f) scale_sums(group, h, factor);
  }
  for (int64_t h = 0; h < group.heads; ++h) {
    float* weights = group.weights + h * kScores;
    group.softmax[h].sum += weigh(weights, weights, kSpan, group.softmax[h].base());
  }
}

// Values of `count` tokens, one after the other.
template <class T>
void add_weighted_values(HeadGroup<T>& group, const T* values, int count, int column, PrefetchLines& ahead) {
  for_heads<4>(group.heads, [&]<int kHeads>(int64_t h) {
    constexpr int kVectors = kSums / kHeads < 4 ? kSums / kHeads : 4;
    int64_t d = 0;
    for (; d + kVectors * kWidth <= group.head_dim; d += kVectors * kWidth)
      add_values<T, kHeads, kVectors>(group, h, d, values, count, column, ahead);
    for (; d + kWidth <= group.head_dim; d += kWidth)
      add_values<T, kHeads, 1>(group, h, d, values, count, column, ahead);
    for (int64_t k = h; d < group.head_dim && k < h + kHeads; ++k) add_last_values(group, k, d, values, count, column);
  });
}

// Leaves the result in the output or, where it is a part of the context only, as states.
template <class T, class Stored>
void finish(const AttentionArgs& args, const Unit& unit, const HeadGroup<Stored>& group, int64_t token,
            int64_t first_head) {
  for (int64_t h = 0; h < group.heads; ++h) {
    const float* sums = group.sums + h * group.stride;
    if (unit.states == nullptr) {
      write_output(output_of<T>(args, token, first_head + h), sums, group.softmax[h].sum, group.head_dim);
      continue;
    }
    float* state = unit.states + h * state_size(args);
    state[0] = group.softmax[h].max_score;
    state[1] = group.softmax[h].sum;
    std::memcpy(state + 2, sums, group.head_dim * sizeof(float));
  }
}

// Whether the unit has the first token that is seen: of all units of a row and head, one takes the sink in.
bool begins_row(const AttentionArgs& args, const Unit& unit, int64_t position) {
  return unit.begin == 0 || unit.begin == position + 1 - args.sliding_window;
}

// The key/value heads of a unit, over a pool of Stored.
template <class Stored>
class UnitHeads {
 public:
  UnitHeads(const AttentionArgs& args, const Unit& unit, Arena& arena)
      : args_(args),
        unit_(unit),
        group_size_(args.num_heads / args.num_kv_heads),
        heads_(args, unit.head_end - unit.head_begin, arena) {}

  static int64_t scratch_bytes(const AttentionArgs& args) {
    Arena arena(nullptr);
    const Unit all{0, 0, static_cast<int32_t>(args.num_kv_heads), 0, 0, nullptr};
    UnitHeads heads(args, all, arena);
    return arena.used();
  }

  // With queries of Element, to an output of the same.
  template <class Element>
  void attend() {
    const int64_t token = args_.query_start_loc[unit_.row], position = args_.seq_lens[unit_.row] - 1;
    const int64_t first_head = unit_.head_begin * group_size_;
    heads_.template start<Element>(args_, token, first_head, begins_row(args_, unit_, position));
    PrefetchQueue<Stored> ahead(args_, unit_);
    for (int64_t at = unit_.begin; at < unit_.end; at += kSpan) {
      Pieces<Stored, kSpan> span;
      span.fill(args_, unit_.row, at, unit_.end);
      for_parts(span, false, ahead,
                [&](HeadGroup<Stored>& group, const Stored* keys, int count, int column, PrefetchLines& lines) {
                  multiply_keys(group, keys, count, column, lines);
                  scale_tokens(group, keys, count, column);
                });
      weigh_heads(args_, heads_, first_head, span.count, at - position);
      for_parts(span, true, ahead,
                [&](HeadGroup<Stored>& group, const Stored* values, int count, int column, PrefetchLines& lines) {
                  scale_tokens(group, values, count, column);
                  add_weighted_values(group, values, count, column, lines);
                });
    }
    finish<Element>(args_, unit_, heads_, token, first_head);
  }

 private:
  // Calls function(group, tokens, count, column, ahead) for the keys or values of each block and head, as memory has
  // them.
  template <class Function>
  void for_parts(const Pieces<Stored, kSpan>& span, bool values, PrefetchQueue<Stored>& ahead, Function function) {
    for (int i = 0, column = 0; i < span.num_pieces; column += span.pieces[i++].count) {
      for (int64_t head = unit_.head_begin; head < unit_.head_end; ++head) {
        const Piece<Stored>& piece = span.pieces[i];
        HeadGroup<Stored> group = heads_.part((head - unit_.head_begin) * group_size_, group_size_);
        PrefetchLines lines = ahead.next();
        function(group, tokens_of(args_, piece, head, values), piece.count, column, lines);
        lines.fetch_all();
      }
    }
  }

  const AttentionArgs& args_;
  const Unit& unit_;
  const int64_t group_size_;
  HeadGroup<Stored> heads_;
};

// Over a pool of T, or of int8 lines.
template <class T>
void decode(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  Arena arena(scratch);
  if (args.int8_line_bytes > 0)
    UnitHeads<int8_t>(args, unit, arena).template attend<T>();
  else
    UnitHeads<T>(args, unit, arena).template attend<T>();
}

template <class T>
int64_t scratch_of(const AttentionArgs& args) {
  return args.int8_line_bytes > 0 ? UnitHeads<int8_t>::scratch_bytes(args) : UnitHeads<T>::scratch_bytes(args);
}

// The states of one head: that of the first chunk takes the others in, which lie `stride` floats apart. Returns the
// sum.
float merge_head(float* total, int64_t chunks, int64_t stride, int64_t head_dim) {
  Softmax softmax;
  softmax.max_score = total[0];
  softmax.sum = total[1];
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    const float* state = total + chunk * stride;
    const float before = softmax.raise(state[0]);
    const float factor = state[0] == -kInfinity ? 0.0f : Softmax::one_exp(state[0] - softmax.base());
    softmax.sum += state[1] * factor;
    for (int64_t d = 2; d < head_dim + 2; ++d) total[d] = total[d] * before + state[d] * factor;
  }
  return softmax.sum;
}

template <class T>
void merge(const AttentionArgs& args, const Unit& unit, float* states, int64_t chunks) {
  const int64_t group_size = args.num_heads / args.num_kv_heads, size = state_size(args);
  for (int64_t head = unit.head_begin * group_size; head < unit.head_end * group_size; ++head, states += size) {
    const float sum = merge_head(states, chunks, args.num_heads * size, args.head_dim);
    write_output(output_of<T>(args, args.query_start_loc[unit.row], head), states + 2, sum, args.head_dim);
  }
}

}  // namespace

extern const decltype(IsaKernels::decode) decode_kernels = {{decode<float>, decode<BF16>, decode<F16>}};
extern const decltype(IsaKernels::merge) merge_kernels = {{merge<float>, merge<BF16>, merge<F16>}};
extern const decltype(IsaKernels::decode_scratch) decode_scratch = {
    {scratch_of<float>, scratch_of<BF16>, scratch_of<F16>}};

}  // namespace quire::QUIRE_ISA
