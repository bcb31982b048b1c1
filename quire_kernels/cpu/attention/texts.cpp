// Attention in both directions within texts that lie one after the other: tiles of a text's queries against tiles of
// its keys, head by head. The result of a tile depends on its own text only.
#include "attention/tiles.h"
#include "runtime/isa.h"

namespace quire::QUIRE_ISA {
namespace {

// One tile of queries of one head, and its scratch memory. Lines are tokens of the tile.
template <class T>
class TextTile {
 public:
  TextTile(const TextAttentionArgs& args, Arena& arena) : args_(args), stride_(padded(args.head_dim)) {
    query_ = arena.take<Element>(kQueryRows * stride_);
    weights_ = arena.take<Element>(kQueryRows * kKeyTile);
    scores_ = arena.take<float>(kQueryRows * kKeyTile);
    sums_ = arena.take<float>(kQueryRows * stride_);
    keys_ = arena.take<float>(stride_ * kKeyTile);
    values_ = arena.take<float>(kKeyTile * stride_);
    softmax_ = arena.take<Softmax>(kQueryRows);
  }

  void attend(const TextUnit& unit) {
    begin(unit);
    const int64_t first = unit.begin < args_.window ? 0 : unit.begin - args_.window;
    const int64_t end = unit.length - unit.end < args_.window ? unit.length : unit.end + args_.window;
    for (int64_t at = first / kKeyTile * kKeyTile; at < end; at += kKeyTile)
      add(unit, at, end - at < kKeyTile ? end - at : kKeyTile, at > first);
    for (int64_t line = 0; line < unit.end - unit.begin; ++line) {
      const int64_t token = unit.first_token + unit.begin + line;
      T* output = static_cast<T*>(args_.output) + (token * args_.num_heads + unit.head) * args_.head_dim;
      write_output(output, sums_ + line * stride_, softmax_[line].sum, args_.head_dim);
    }
  }

 private:
  using Element = typename Words<T>::Element;
  static constexpr int64_t kPair = Words<T>::kPair;

  const T* line_of(const TextHeads& heads, int64_t token, int64_t head) const {
    return static_cast<const T*>(heads.at) + token * heads.token_stride + head * heads.head_stride;
  }

  // Lines after the last token, and columns after the head, are zeros: what multiplies them may be NaN.
  void begin(const TextUnit& unit) {
    lines_ = padded(unit.end - unit.begin, kLinesAtOnce);
    const int64_t count = unit.end - unit.begin, head_dim = args_.head_dim;
    const bool has_gaps = head_dim != stride_;
    if (has_gaps) {
      std::memset(query_, 0, lines_ * stride_ * sizeof(Element));
      std::memset(keys_, 0, stride_ * kKeyTile * sizeof(float));
      std::memset(values_, 0, kKeyTile * stride_ * sizeof(float));
    }
    std::memset(query_ + count * stride_, 0, (lines_ - count) * stride_ * sizeof(Element));
    std::memset(weights_ + count * kKeyTile, 0, (lines_ - count) * kKeyTile * sizeof(Element));
    for (int64_t line = 0; line < count; ++line) {
      copy_query(query_ + line * stride_, line_of(args_.query, unit.first_token + unit.begin + line, unit.head),
                 head_dim);
      softmax_[line] = Softmax();
    }
  }

  // Adds `count` keys of the text from `at` on, and their values, to the sums, or begins these.
  void add(const TextUnit& unit, int64_t at, int64_t count, bool adds) {
    const int64_t head = unit.head * args_.num_kv_heads / args_.num_heads, columns = padded(count);
    Span<T, kKeyTile> keys, values;
    keys.count = values.count = static_cast<int>(count);
    for (int64_t i = 0; i < count; ++i) {
      keys.lines[i] = line_of(args_.key, unit.first_token + at + i, head);
      values.lines[i] = line_of(args_.value, unit.first_token + at + i, head);
    }
    const Matrix packed_keys{keys_, kKeyTile}, packed_values{values_, stride_};
    pack_keys(packed_keys, keys, columns, args_.head_dim);
    const int64_t words = padded(args_.head_dim, 16 * kPair) / kPair;
    multiply<T>({scores_, kKeyTile}, {reinterpret_cast<float*>(query_), stride_ / kPair}, packed_keys, lines_, columns,
                words, false);
    for (int64_t line = 0; line < unit.end - unit.begin; ++line) weigh_line(unit, line, at, count, columns);
    pack_values(packed_values, values, columns, args_.head_dim);
    multiply<T>({sums_, stride_}, {reinterpret_cast<float*>(weights_), kKeyTile / kPair}, packed_values, lines_,
                stride_, columns / kPair, adds);
  }

  // The products of a query with keys from `at` on become weights; its sums so far shrink where a score is larger.
  void weigh_line(const TextUnit& unit, int64_t line, int64_t at, int64_t count, int64_t columns) {
    const int64_t position = unit.begin + line;
    float* scores = scores_ + line * kKeyTile;
    const float* bias = args_.bias;
    if (bias != nullptr) bias += unit.head * args_.bias_stride + args_.bias_stride / 2 + at - position;
    const int64_t first = position - args_.window - at, last = position + args_.window + 1 - at;
    const int first_seen = static_cast<int>(first < 0 ? 0 : first);
    const int last_seen = static_cast<int>(last < count ? last : count);
    const Vec hidden = set1(-kInfinity), scale = set1(static_cast<float>(args_.scale));
    Vec largest = hidden;
    const bool is_plain = bias == nullptr && first_seen <= 0 && last_seen >= columns;
    for (int i = 0; i < columns; i += kWidth) {
      Vec score = load(scores + i) * scale;
      if (!is_plain) {
        const int left = static_cast<int>(count) - i;
        if (bias != nullptr && left > 0) score = score + (left >= kWidth ? load(bias + i) : load(bias + i, left));
        score = keep(score, first_seen - i, last_seen - i, hidden);
      }
      store(scores + i, score);
      largest = max(largest, score);
    }
    Softmax& softmax = softmax_[line];
    const bool begins = softmax.max_score == -kInfinity;
    const float factor = softmax.raise(reduce_max(largest));
    softmax.sum += weigh(scores, weights_ + line * kKeyTile, static_cast<int>(columns), softmax.base());
    if (begins || factor == 1.0f) return;
    float* sums = sums_ + line * stride_;
    for (int64_t d = 0; d < stride_; d += kWidth) store(sums + d, load(sums + d) * set1(factor));
  }

  const TextAttentionArgs& args_;
  const int64_t stride_;  // D, padded
  int64_t lines_ = 0;     // tokens of the tile, padded
  Element* query_;        // [lines, stride]
  Element* weights_;      // [lines, kKeyTile]
  float* scores_;         // [lines, kKeyTile]
  float* sums_;           // [lines, stride]
  float* keys_;           // [stride words, kKeyTile]
  float* values_;         // [kKeyTile words, stride]
  Softmax* softmax_;      // [lines]
};

template <class T>
void attend_texts(const TextAttentionArgs& args, const TextUnit* begin, const TextUnit* end, std::byte* scratch) {
  const MatrixUnit matrix_unit;
  Arena arena(scratch);
  TextTile<T> tile(args, arena);
  for (; begin < end; ++begin) tile.attend(*begin);
}

template <class T>
int64_t scratch_of(const TextAttentionArgs& args) {
  Arena arena(nullptr);
  TextTile<T> tile(args, arena);
  return arena.used();
}

}  // namespace

extern const decltype(IsaKernels::attend_texts) attend_texts_kernels = {
    {attend_texts<float>, attend_texts<BF16>, attend_texts<F16>}};
extern const decltype(IsaKernels::texts_scratch) texts_scratch = {
    {scratch_of<float>, scratch_of<BF16>, scratch_of<F16>}};

}  // namespace quire::QUIRE_ISA
