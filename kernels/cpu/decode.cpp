// Attention of one new token a row, straight from the pool: each key and value is read once for all query heads of its head,
// while what comes next is on its way from memory. The tiles of one block lie side by side, so all heads of a unit take turns at
// every block: memory is read in long stretches, wherever the blocks are. Short blocks (short_block.h) are made numbers in the
// first cache.
#include "group.h"

namespace quire::QUIRE_ISA {
namespace {

// Leaves the result in the output or, where it is a part of the context only, as states.
template <class T, class Stored>
void finish(const AttentionArgs& args, const Unit& unit, const Group<Stored>& group, int64_t token, int64_t first_head) {
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
        heads_(args, unit.head_end - unit.head_begin, arena),
        memory_(arena.take<Stored>(args.short_blocks ? made_numbers<kSpan>(args) : 0)) {}

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
    UnitAhead<Stored> ahead(args_, unit_);
    for (int64_t at = unit_.begin; at < unit_.end; at += kSpan) {
      Pieces<Stored, kSpan> span;
      span.fill(args_, unit_.row, at, unit_.end);
      span.look(args_);
      for_parts(span, false, ahead, [&](Group<Stored>& group, const Stored* keys, int count, int column, LinesAhead& lines) {
        multiply_keys(group, keys, count, column, lines);
        scale_tokens(group, keys, count, column);
      });
      weigh_heads(args_, heads_, first_head, span.count, at - position);
      for_parts(span, true, ahead, [&](Group<Stored>& group, const Stored* values, int count, int column, LinesAhead& lines) {
        scale_tokens(group, values, count, column);
        add_weighted_values(group, values, count, column, lines);
      });
    }
    finish<Element>(args_, unit_, heads_, token, first_head);
  }

 private:
  // Calls function(group, tokens, count, column, ahead) for the keys or values of each block and head, as memory has them.
  template <class Function>
  void for_parts(const Pieces<Stored, kSpan>& span, bool values, UnitAhead<Stored>& ahead, Function function) {
    for (int i = 0, column = 0; i < span.num_pieces; column += span.pieces[i++].count) {
      for (int64_t head = unit_.head_begin; head < unit_.head_end; ++head) {
        const Part<Stored> part(args_, span.pieces[i], head, values);
        Group<Stored> group = heads_.part((head - unit_.head_begin) * group_size_, group_size_);
        LinesAhead lines = ahead.next();
        const Stored* tokens = tokens_of(part, lines);
        function(group, tokens, part.count(), column, lines);
        lines.fetch_all();
      }
    }
  }

  const Stored* tokens_of(const Part<Stored>& part, LinesAhead& ahead) {
    if constexpr (std::is_same_v<Stored, BF16>) {
      BF16* made = memory_;
      if (part.is_short()) return make_tokens(part, ahead, made);
    }
    return part.tokens();
  }

  const AttentionArgs& args_;
  const Unit& unit_;
  const int64_t group_size_;
  Group<Stored> heads_;
  Stored* memory_;
};

// The pool has T, or int8_t for codes.
template <class T>
void decode(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  Arena arena(scratch);
  if (args.quantized_line > 0)
    UnitHeads<int8_t>(args, unit, arena).template attend<T>();
  else
    UnitHeads<T>(args, unit, arena).template attend<T>();
}

template <class T>
int64_t scratch_of(const AttentionArgs& args) {
  return args.quantized_line > 0 ? UnitHeads<int8_t>::scratch_bytes(args) : UnitHeads<T>::scratch_bytes(args);
}

// The states of one head: that of the first chunk takes the others in, which lie `stride` floats apart. Returns the sum.
float merge_head(float* total, int64_t chunks, int64_t stride, int64_t head_dim) {
  Softmax softmax;
  softmax.most = total[0];
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
