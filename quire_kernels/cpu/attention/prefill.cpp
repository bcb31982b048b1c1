// Attention of several new tokens of a row: tiles of queries against tiles of the context, as products of small
// matrices. All query heads of a key/value head are lines of the same tile, so keys and values are read and packed once
// for them.
#include "attention/tiles.h"
#include "runtime/isa.h"

namespace quire::QUIRE_ISA {
namespace {

// The int8 keys and values of a span of one head as numbers in scratch memory, [2, kCapacity, D].
template <class T, int kCapacity>
void dequantize_span(const AttentionArgs& args, const Span<int8_t, kCapacity>& quantized, T* memory,
                     Span<T, kCapacity>& span) {
  const int64_t bytes = args.int8_line_bytes, values = args.value_offset, half = kCapacity * args.head_dim;
  for (int t = 0; t < quantized.count; ++t) {
    T* to = memory + t * args.head_dim;
    dequantize_line(to, quantized.lines[t], args.head_dim, bytes);
    dequantize_line(to + half, quantized.lines[t] + values, args.head_dim, bytes);
  }
  span.count = quantized.count;
  for (int t = 0; t < kCapacity; ++t)
    span.lines[t] = memory + (t < quantized.count ? t : quantized.count - 1) * args.head_dim;
}

// Scratch memory of one thread. Lines are (token, head) of the tile, heads running fastest.
template <class T>
struct Tile {
  using Element = typename Words<T>::Element;

  int64_t tokens;  // at most
  int64_t group;
  int64_t lines;      // tokens * group, padded
  int64_t stride;     // D, padded
  Element* query;     // [lines, stride]
  Element* weights;   // [lines, kKeyTile]
  float* scores;      // [lines, kKeyTile]
  float* sums;        // [lines, stride]
  float* keys;        // [stride words, kKeyTile]
  float* values;      // [kKeyTile words, stride]
  float* max_scores;  // [lines]
  Softmax* softmax;   // [lines]
  T* made;            // [2, kKeyTile, D], keys and values from int8 lines; empty for other pools

  Tile(const AttentionArgs& args, Arena& arena)
      : tokens(query_tokens(args)),
        group(args.num_heads / args.num_kv_heads),
        lines(padded(tokens * group)),
        stride(padded(args.head_dim)) {
    query = arena.take<Element>(lines * stride);
    weights = arena.take<Element>(lines * kKeyTile);
    scores = arena.take<float>(lines * kKeyTile);
    sums = arena.take<float>(lines * stride);
    keys = arena.take<float>(stride * kKeyTile);
    values = arena.take<float>(kKeyTile * stride);
    max_scores = arena.take<float>(lines);
    softmax = arena.take<Softmax>(lines);
    made = arena.take<T>(args.int8_line_bytes > 0 ? 2 * kKeyTile * args.head_dim : 0);
  }

  Matrix query_words() const { return {reinterpret_cast<float*>(query), stride / Words<T>::kPair}; }
  Matrix weight_words() const { return {reinterpret_cast<float*>(weights), kKeyTile / Words<T>::kPair}; }
};

// The inputs and outputs of one unit of work.
template <class T>
struct TileWork {
  const AttentionArgs& args;
  int64_t row;
  int64_t kv_head;
  int64_t first_token;     // of the tile, in the batch
  int64_t first_position;  // of the same token, in the context
  int64_t num_tokens;

  TileWork(const AttentionArgs& args, const Unit& unit)
      : args(args),
        row(unit.row),
        kv_head(unit.head_begin),
        first_token(args.query_start_loc[unit.row] + unit.begin),
        first_position(args.seq_lens[unit.row] - args.query_start_loc[unit.row + 1] + first_token),
        num_tokens(unit.end - unit.begin) {}

  // The first position that a token at `position` sees.
  int64_t window_begin(int64_t position) const {
    return position < args.sliding_window ? 0 : position - args.sliding_window + 1;
  }
};

template <class T>
void start(Tile<T>& tile, const TileWork<T>& work) {
  std::memset(tile.query, 0, tile.lines * tile.stride * sizeof(*tile.query));
  std::memset(tile.sums, 0, tile.lines * tile.stride * sizeof(float));
  std::memset(tile.weights, 0, tile.lines * kKeyTile * sizeof(*tile.weights));
  // Columns after the head are zeros: NaN in memory that nothing wrote would reach the sums.
  std::memset(tile.values, 0, kKeyTile * tile.stride * sizeof(float));
  std::memset(tile.keys, 0, kKeyTile * tile.stride * sizeof(float));
  for (int64_t line = 0; line < work.num_tokens * tile.group; ++line) {
    const int64_t head = work.kv_head * tile.group + line % tile.group;
    const T* query = query_of<T>(work.args, work.first_token + line / tile.group, head);
    copy_query(tile.query + line * tile.stride, query, work.args.head_dim);
    tile.softmax[line] = first_softmax(work.args, head);
  }
}

// Scores of the tile against `count` keys from position `at` on become weights. In three passes, since in each of them
// the processor can work on several lines at once.
template <class T>
void weigh_lines(Tile<T>& tile, const TileWork<T>& work, int64_t at, int64_t count) {
  const int64_t lines = work.num_tokens * tile.group;
  for (int64_t token = 0; token < work.num_tokens; ++token) {
    const int64_t position = work.first_position + token, first = work.window_begin(position) - at;
    const int first_seen = static_cast<int>(first < 0 ? 0 : first);
    const int last_seen = static_cast<int>(position + 1 - at < count ? position + 1 - at : count);
    for (int64_t h = 0; h < tile.group; ++h) {
      const int64_t line = token * tile.group + h;
      tile.max_scores[line] = score(tile.scores + line * kKeyTile, kKeyTile, first_seen, last_seen,
                                    ScoreRule(work.args, work.kv_head * tile.group + h), at - position);
    }
  }
  for (int64_t line = 0; line < lines; ++line) {
    const float factor = tile.softmax[line].raise(tile.max_scores[line]);
    if (factor == 1.0f) continue;
    float* sums = tile.sums + line * tile.stride;
    for (int64_t d = 0; d < tile.stride; d += kWidth) store(sums + d, load(sums + d) * set1(factor));
  }
  for (int64_t line = 0; line < lines; ++line) {
    Softmax& softmax = tile.softmax[line];
    softmax.sum += weigh(tile.scores + line * kKeyTile, tile.weights + line * kKeyTile, kKeyTile, softmax.base());
  }
}

// Keys and values of some tokens.
template <class T>
struct KeysAndValues {
  Span<T, kKeyTile> keys, values;
};

// The next ones from position `at` on.
template <class T>
void read(const Tile<T>& tile, const TileWork<T>& work, int64_t at, int64_t end, KeysAndValues<T>& context) {
  const AttentionArgs& args = work.args;
  const int64_t first = work.window_begin(work.first_position);
  int64_t values = args.value_offset;
  if (args.int8_line_bytes == 0) {
    context.keys.fill(args, work.row, work.kv_head, at, end, first);
  } else {
    Span<int8_t, kKeyTile> quantized;
    quantized.fill(args, work.row, work.kv_head, at, end, first);
    dequantize_span(args, quantized, tile.made, context.keys);
    values = kKeyTile * args.head_dim;
  }
  context.values.count = context.keys.count;
  for (int t = 0; t < kKeyTile; ++t) context.values.lines[t] = context.keys.lines[t] + values;
}

template <class T>
void attend(Tile<T>& tile, const TileWork<T>& work, const KeysAndValues<T>& context, int64_t at) {
  const int64_t lines = padded(work.num_tokens * tile.group, kLinesAtOnce), head_dim = work.args.head_dim;
  const Matrix keys{tile.keys, kKeyTile}, values{tile.values, tile.stride};
  const int64_t words = padded(head_dim, 16 * Words<T>::kPair) / Words<T>::kPair;
  pack_keys(keys, context.keys, kKeyTile, head_dim);
  multiply<T>({tile.scores, kKeyTile}, tile.query_words(), keys, lines, kKeyTile, words, false);
  weigh_lines(tile, work, at, context.keys.count);
  pack_values(values, context.values, kKeyTile, head_dim);
  multiply<T>({tile.sums, tile.stride}, tile.weight_words(), values, lines, tile.stride, kKeyTile / Words<T>::kPair,
              true);
}

template <class T>
void prefill(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  const MatrixUnit matrix_unit;
  Arena arena(scratch);
  Tile<T> tile(args, arena);
  const TileWork<T> work(args, unit);
  start(tile, work);
  const int64_t end = work.first_position + work.num_tokens;
  KeysAndValues<T> context;
  // From a border of tiles on, so that sums of a token round alike whichever tokens it is computed with.
  for (int64_t at = work.window_begin(work.first_position) / kKeyTile * kKeyTile; at < end; at += kKeyTile) {
    read(tile, work, at, end, context);
    attend(tile, work, context, at);
  }
  for (int64_t line = 0; line < work.num_tokens * tile.group; ++line) {
    T* output = output_of<T>(args, work.first_token + line / tile.group, work.kv_head * tile.group + line % tile.group);
    write_output(output, tile.sums + line * tile.stride, tile.softmax[line].sum, args.head_dim);
  }
}

template <class T>
int64_t scratch_of(const AttentionArgs& args) {
  Arena arena(nullptr);
  Tile<T> tile(args, arena);
  return arena.used();
}

}  // namespace

extern const decltype(IsaKernels::prefill) prefill_kernels = {{prefill<float>, prefill<BF16>, prefill<F16>}};
extern const decltype(IsaKernels::prefill_scratch) prefill_scratch = {
    {scratch_of<float>, scratch_of<BF16>, scratch_of<F16>}};

}  // namespace quire::QUIRE_ISA
