// Attention of one new token a row, straight from the pool: each key and value is read once for all query heads of its
// head, and for all rows of the unit, while the next ones are prefetched. The tiles of one block lie side by side, so
// all heads of a unit take turns at every block: memory is read in long stretches, wherever the blocks are.
//
// A row's result is bitwise the same whatever other rows the unit has: the numbers of each query are computed and
// summed in one order, and the numbers of tokens that it does not see are left out.
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

// Tokens between two corrections of the softmax. Spans begin at multiples of this.
constexpr int kSpan = 32;
constexpr int kTokensAtOnce = 4;
static_assert(kChunk % kSpan == 0);

// The end of the span that has `token`, at most `end`.
inline int64_t span_end(int64_t token, int64_t end) {
  const int64_t next = (token / kSpan + 1) * kSpan;
  return next < end ? next : end;
}

// Scores of a head in a span, with room for a vector behind the last score.
constexpr int kScores = kSpan + kWidth;

// Tokens of a sequence that lie in one block.
template <class Stored>
struct Piece {
  const Stored* keys;  // of the first of them and head 0
  int count;
};

// The tokens of a unit in one span, block by block.
template <class Stored>
struct Pieces {
  int num_pieces;
  Piece<Stored> pieces[kSpan];

  // Fills in the pieces from `token` on.
  void fill(const AttentionArgs& args, const Unit& unit, int64_t token) {
    // The last row has the blocks of all.
    const int32_t* table = args.block_tables + (unit.row + unit.num_rows - 1) * args.table_stride;
    const int64_t line = line_size<Stored>(args);
    int64_t column = token / args.block_size, first = token - column * args.block_size;
    int64_t left = span_end(token, unit.end) - token;
    for (num_pieces = 0; left > 0; ++column, first = 0) {
      const int64_t tokens = args.block_size - first < left ? args.block_size - first : left;
      const Stored* keys = static_cast<const Stored*>(args.kv_cache) + table[column] * args.block_stride + first * line;
      pieces[num_pieces++] = {keys, static_cast<int>(tokens)};
      left -= tokens;
    }
  }
};

// Keys or values of one head in a piece, as they lie in memory.
template <class Stored>
inline const Stored* tokens_of(const AttentionArgs& args, const Piece<Stored>& piece, int64_t head, bool values) {
  return piece.keys + head * args.block_size * line_size<Stored>(args) + (values ? args.value_offset : 0);
}

constexpr int64_t num_lines(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine; }

// Memory to prefetch a few lines at a time: a processor whose queue of requests is full does nothing else.
struct PrefetchLines {
  const char *next = nullptr, *end = nullptr;

  void fetch(int64_t lines) {
    for (; lines > 0 && next < end; --lines, next += kCacheLine) prefetch<kOnceCache>(next);
  }
  void fetch_all() {
    for (; next < end; next += kCacheLine) prefetch<kOnceCache>(next);
  }
};

// The memory that a unit reads, in that order: span after span the keys of all its heads, block by block, then the
// values. While one part is read, another some way ahead is prefetched.
template <class Stored>
class PrefetchQueue {
 public:
  // Prefetches the first parts.
  PrefetchQueue(const AttentionArgs& args, const Unit& unit) : args_(args), unit_(unit), token_(unit.begin) {
    pieces_.fill(args, unit, token_);
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
    if (!values_) pieces_.fill(args_, unit_, token_ = span_end(token_, unit_.end));
  }

  const AttentionArgs& args_;
  const Unit& unit_;
  int64_t token_;
  Pieces<Stored> pieces_;
  bool values_ = false;
  int piece_ = 0;
  int64_t head_ = 0;
};

// Query heads that share key/value heads, of one row or several, over a pool of T: scratch memory of one thread.
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

  HeadGroup(const AttentionArgs& args, int64_t num_heads, Arena& arena)
      : heads(num_heads), head_dim(args.head_dim), line(line_size<T>(args)), stride(padded(head_dim)) {
    query = arena.take<typename Dot<T>::Query>(heads * stride);
    sums = arena.take<float>(heads * stride);
    weights = arena.take<float>(heads * kScores);
    max_scores = arena.take<float>(heads);
    softmax = arena.take<Softmax>(heads);
  }

  void clear() {
    std::memset(query, 0, heads * stride * sizeof(*query));
    std::memset(sums, 0, heads * stride * sizeof(float));
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

// Calls function(head) for all heads, kMax heads at once if possible; their number is its template argument.
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

// Tokens of a context from `begin` to before `end`; empty if these are not in order.
struct Range {
  int64_t begin, end;

  Range within(const Range& other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
};

// The rows and key/value heads of a unit, over a pool of Stored.
template <class Stored>
class UnitHeads {
 public:
  UnitHeads(const AttentionArgs& args, const Unit& unit, Arena& arena)
      : args_(args),
        unit_(unit),
        group_size_(args.num_heads / args.num_kv_heads),
        first_head_(unit.head_begin * group_size_),
        heads_(args, (unit.head_end - unit.head_begin) * unit.num_rows * group_size_, arena) {}

  static int64_t scratch_bytes(const AttentionArgs& args, int64_t num_rows) {
    Arena arena(nullptr);
    const Unit all{0, static_cast<int32_t>(num_rows), 0, static_cast<int32_t>(args.num_kv_heads), 0, 0, nullptr};
    UnitHeads heads(args, all, arena);
    return arena.used();
  }

  // With queries of Element, to an output of the same.
  template <class Element>
  void attend() {
    for (int64_t row = 0; row < unit_.num_rows; ++row) {
      const int64_t end = args_.seq_lens[unit_.row + row], begin = end - args_.sliding_window;
      seen_[row] = {begin > 0 ? begin : 0, end};
    }
    start<Element>();
    PrefetchQueue<Stored> ahead(args_, unit_);
    for (int64_t at = unit_.begin; at < unit_.end; at = span_end(at, unit_.end)) {
      Pieces<Stored> span;
      span.fill(args_, unit_, at);
      for_parts(span, at, false, ahead,
                [&](HeadGroup<Stored>& group, const Stored* keys, int count, int64_t token, PrefetchLines& lines) {
                  multiply_keys(group, keys, count, column_of(token), lines);
                  scale_tokens(group, keys, count, column_of(token));
                });
      weigh_heads(at - column_of(at));
      for_parts(span, at, true, ahead,
                [&](HeadGroup<Stored>& group, const Stored* values, int count, int64_t token, PrefetchLines& lines) {
                  scale_tokens(group, values, count, column_of(token));
                  add_seen_values(group, values, count, token, lines);
                });
    }
    finish<Element>();
  }

 private:
  static int column_of(int64_t token) { return static_cast<int>(token % kSpan); }

  // Calls function(h, row, head) for all queries: h among `heads_`, the row of the unit and the query head.
  template <class Function>
  void for_queries(Function function) {
    int64_t h = 0;
    for (int64_t head = first_head_; head < unit_.head_end * group_size_; head += group_size_)
      for (int64_t row = 0; row < unit_.num_rows; ++row)
        for (int64_t i = 0; i < group_size_; ++i, ++h) function(h, row, head + i);
  }

  template <class Element>
  void start() {
    heads_.clear();
    for_queries([&](int64_t h, int64_t row, int64_t head) {
      const Element* query = query_of<Element>(args_, args_.query_start_loc[unit_.row + row], head);
      copy_query(heads_.query + h * heads_.stride, query, heads_.head_dim);
      // Among the units of a row and head, the one with the first visible token adds the sink.
      heads_.softmax[h] = seen_[row].begin >= unit_.begin ? first_softmax(args_, head) : Softmax();
    });
  }

  // Calls function(group, tokens, count, first token, ahead) for the keys or values of each block and head, as memory
  // has them.
  template <class Function>
  void for_parts(const Pieces<Stored>& span, int64_t token, bool values, PrefetchQueue<Stored>& ahead,
                 Function function) {
    const int64_t size = unit_.num_rows * group_size_;
    for (int i = 0; i < span.num_pieces; token += span.pieces[i++].count) {
      for (int64_t head = unit_.head_begin; head < unit_.head_end; ++head) {
        const Piece<Stored>& piece = span.pieces[i];
        HeadGroup<Stored> group = heads_.part((head - unit_.head_begin) * size, size);
        PrefetchLines lines = ahead.next();
        function(group, tokens_of(args_, piece, head, values), piece.count, token, lines);
        lines.fetch_all();
      }
    }
  }

  // Weights of the span from `begin` on. In three passes, since in each of them the processor can work on several heads
  // at once.
  void weigh_heads(int64_t begin) {
    for_queries([&](int64_t h, int64_t row, int64_t head) {
      const Range range = seen_[row].within({begin, begin + kSpan});
      const int first = static_cast<int>(range.begin - begin), last = static_cast<int>(range.end - begin);
      heads_.max_scores[h] = score(heads_.weights + h * kScores, kSpan, first, last, ScoreRule(args_, head),
                                   begin - seen_[row].end + 1);
    });
    for (int64_t h = 0; h < heads_.heads; ++h) {
      const float factor = heads_.softmax[h].raise(heads_.max_scores[h]);
      if (factor != 1.0f) scale_sums(heads_, h, factor);
    }
    for (int64_t h = 0; h < heads_.heads; ++h) {
      float* weights = heads_.weights + h * kScores;
      heads_.softmax[h].sum += weigh(weights, weights, kSpan, heads_.softmax[h].base());
    }
  }

  // Adds values of `count` tokens from `token` on, to the queries that see them: a weight of 0 would not do, since a
  // value may be no number.
  void add_seen_values(HeadGroup<Stored>& group, const Stored* values, int count, int64_t token,
                       PrefetchLines& ahead) {
    // Rows see tokens in order: tokens that the first and the last row see are seen by all.
    Range common = seen_[0].within(seen_[unit_.num_rows - 1]).within({token, token + count});
    if (common.begin > common.end) common = {token, token};
    const Range parts[] = {{token, common.begin}, common, {common.end, token + count}};
    for (const Range& part : parts) {
      if (part.begin == part.end) continue;
      const int64_t at_once = &part == parts + 1 ? unit_.num_rows : 1;
      for (int64_t row = 0; row < unit_.num_rows; row += at_once) {
        const Range range = seen_[row].within(part);
        if (range.begin >= range.end) continue;
        HeadGroup<Stored> rows = group.part(row * group_size_, at_once * group_size_);
        const Stored* first = values + (range.begin - token) * group.line;
        add_weighted_values(rows, first, static_cast<int>(range.end - range.begin), column_of(range.begin), ahead);
      }
    }
  }

  // Leaves the results in the output or, where they are a part of the context only, as states.
  template <class Element>
  void finish() {
    for_queries([&](int64_t h, int64_t row, int64_t head) {
      const float *sums = heads_.sums + h * heads_.stride, sum = heads_.softmax[h].sum;
      if (unit_.states == nullptr) {
        write_output(output_of<Element>(args_, args_.query_start_loc[unit_.row + row], head), sums, sum,
                     heads_.head_dim);
        return;
      }
      float* state = unit_.states + (row * args_.num_heads + head - first_head_) * state_size(args_);
      state[0] = heads_.softmax[h].max_score;
      state[1] = sum;
      std::memcpy(state + 2, sums, heads_.head_dim * sizeof(float));
    });
  }

  const AttentionArgs& args_;
  const Unit& unit_;
  const int64_t group_size_;
  const int64_t first_head_;
  HeadGroup<Stored> heads_;
  Range seen_[kMaxDecoded];  // by each row, of the whole context
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
int64_t scratch_of(const AttentionArgs& args, int64_t num_rows) {
  return args.int8_line_bytes > 0 ? UnitHeads<int8_t>::scratch_bytes(args, num_rows)
                                  : UnitHeads<T>::scratch_bytes(args, num_rows);
}

// The states of one head, `stride` floats apart: the first chunk's state absorbs the others. Returns the sum.
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
  const int64_t of_row = args.num_heads * size, first_head = unit.head_begin * group_size;
  for (int64_t row = 0; row < unit.num_rows; ++row, states += of_row) {
    float* total = states;
    for (int64_t head = first_head; head < unit.head_end * group_size; ++head, total += size) {
      const float sum = merge_head(total, chunks, unit.num_rows * of_row, args.head_dim);
      write_output(output_of<T>(args, args.query_start_loc[unit.row + row], head), total + 2, sum, args.head_dim);
    }
  }
}

}  // namespace

extern const decltype(IsaKernels::decode) decode_kernels = {{decode<float>, decode<BF16>, decode<F16>}};
extern const decltype(IsaKernels::merge) merge_kernels = {{merge<float>, merge<BF16>, merge<F16>}};
extern const decltype(IsaKernels::decode_scratch) decode_scratch = {
    {scratch_of<float>, scratch_of<BF16>, scratch_of<F16>}};

}  // namespace quire::QUIRE_ISA
