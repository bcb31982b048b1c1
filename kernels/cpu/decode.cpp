// Attention of one new token a row, straight from the pool: each key and value is read once for all query heads of its
// head, while those of the next span or head are on their way from memory. The tiles of one block lie side by side, so the
// heads of a unit take turns at every span: memory is read in long stretches, wherever the blocks are.
#include "group.h"
#include "short_span.h"

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

// One key/value head of the unit, number i of it, on one span; `distance` is that of its first token.
template <class Stored>
void attend(const AttentionArgs& args, const Unit& unit, const Group<Stored>& heads, int64_t i,
            const Place<Stored>& place, const Place<Stored>& next, int64_t distance) {
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  Group<Stored> group = heads.part(i * group_size, group_size);
  const Scales<Stored> scales(place, group.line);
  multiply_keys(group, place, next);
  scale_tokens(group, scales.keys);
  weigh_heads(args, group, (unit.head_begin + i) * group_size, place.count(), distance);
  scale_tokens(group, scales.values);
  add_weighted_values(group, place, next);
}

// All heads of the unit on one span.
template <class Stored>
void attend(const AttentionArgs& args, const Unit& unit, const Group<Stored>& heads, const Span<Stored, kSpan>& span,
            const Span<Stored, kSpan>& next_span, int64_t distance) {
  const int64_t tile = args.block_size * heads.line, values = value_offset<Stored>(args);
  const int64_t num_kv_heads = unit.head_end - unit.head_begin;
  for (int64_t i = 0; i < num_kv_heads; ++i) {
    const Place<Stored> place{&span, i * tile, values};
    const Place<Stored> next =
        i + 1 < num_kv_heads ? Place<Stored>{&span, (i + 1) * tile, values} : Place<Stored>{&next_span, 0, values};
    attend(args, unit, heads, i, place, next, distance);
  }
}

// Whether the unit has the first token that is seen: of all units of a row and head, one takes the sink in.
bool begins_row(const AttentionArgs& args, const Unit& unit, int64_t position) {
  return unit.begin == 0 || unit.begin == position + 1 - args.sliding_window;
}

// From a pool of Stored: T, or int8_t for codes.
template <class T, class Stored>
void decode_from(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  Arena arena(scratch);
  Group<Stored> heads(args, unit.head_end - unit.head_begin, arena);
  const int64_t token = args.query_start_loc[unit.row], position = args.seq_lens[unit.row] - 1;
  const int64_t first_head = unit.head_begin * (args.num_heads / args.num_kv_heads);
  heads.template start<T>(args, token, first_head, begins_row(args, unit, position));
  Span<Stored, kSpan> span, next;
  next.fill(args, unit.row, unit.head_begin, unit.begin, unit.end);
  for (int64_t at = unit.begin; at < unit.end; at += kSpan) {
    span = next;
    if (at + kSpan < unit.end) next.fill(args, unit.row, unit.head_begin, at + kSpan, unit.end);
    attend(args, unit, heads, span, next, at - position);
  }
  finish<T>(args, unit, heads, token, first_head);
}

using Pieces = ShortSpan<kSpan>;

// One key/value head of the unit on one span, through numbers made in `memory`; `next` is where its keys are to be asked for.
void attend_short(const AttentionArgs& args, const Unit& unit, const Group<BF16>& heads, const ShortPlace<kSpan>& place,
                  const ShortPlace<kSpan>& next, BF16* memory, int64_t distance) {
  const int64_t group_size = args.num_heads / args.num_kv_heads;
  Group<BF16> group = heads.part((place.head - unit.head_begin) * group_size, group_size);
  Span<BF16, kSpan> tokens;
  const Place<BF16> made{&tokens, 0, 0};
  LinesAhead next_keys(next), next_values(next.of_values());
  make_numbers(place, next_keys, memory, tokens);
  multiply_keys(group, made, next_keys);
  weigh_heads(args, group, place.head * group_size, tokens.count, distance);
  next_keys.fetch_all();
  make_numbers(place.of_values(), next_values, memory, tokens);
  add_weighted_values(group, made, next_values);
  next_values.fetch_all();
}

// From a pool that has short blocks.
void decode_short(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  Arena arena(scratch);
  Group<BF16> heads(args, unit.head_end - unit.head_begin, arena);
  BF16* memory = arena.take<BF16>(Pieces::room(args));
  const int64_t token = args.query_start_loc[unit.row], position = args.seq_lens[unit.row] - 1;
  const int64_t first_head = unit.head_begin * (args.num_heads / args.num_kv_heads);
  heads.template start<BF16>(args, token, first_head, begins_row(args, unit, position));
  Pieces spans[2];
  spans[0].fill(args, unit.row, unit.begin, unit.end);
  for (int64_t at = unit.begin, turn = 0; at < unit.end; at += kSpan, turn ^= 1) {
    Pieces &span = spans[turn], &next = spans[turn ^ 1];
    span.look(args);
    next.fill(args, unit.row, at + kSpan, unit.end);
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
      const ShortPlace<kSpan> place{&args, &span, head, false};
      const bool is_last = head + 1 == unit.head_end;
      attend_short(args, unit, heads, place, {&args, is_last ? &next : &span, is_last ? unit.head_begin : head + 1, false}, memory,
                   at - position);
    }
  }
  finish<BF16>(args, unit, heads, token, first_head);
}

template <class T>
void decode(const AttentionArgs& args, const Unit& unit, std::byte* scratch) {
  if (args.quantized_line > 0)
    decode_from<T, int8_t>(args, unit, scratch);
  else if (std::is_same_v<T, BF16> && args.short_blocks)
    decode_short(args, unit, scratch);
  else
    decode_from<T, T>(args, unit, scratch);
}

template <class Stored>
int64_t scratch_from(const AttentionArgs& args) {
  Arena arena(nullptr);
  Group<Stored> heads(args, args.num_kv_heads, arena);
  arena.take<BF16>(args.short_blocks ? Pieces::room(args) : 0);
  return arena.used();
}

template <class T>
int64_t scratch_of(const AttentionArgs& args) {
  return args.quantized_line > 0 ? scratch_from<int8_t>(args) : scratch_from<T>(args);
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
