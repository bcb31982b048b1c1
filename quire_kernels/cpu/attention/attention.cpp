// The division of attention of a flat batch into units, and the merges of chunks.
#include "attention/attention.h"

#include <algorithm>
#include <utility>

namespace quire {
namespace {

struct Row {
  int32_t index;
  int32_t num_queries;
  int32_t length;
  int32_t first_seen;  // by the row's first new token

  Row(const AttentionArgs& args, int64_t row)
      : index(static_cast<int32_t>(row)),
        num_queries(args.query_start_loc[row + 1] - args.query_start_loc[row]),
        length(args.seq_lens[row]),
        first_seen(static_cast<int32_t>(std::max<int64_t>(0, length - num_queries + 1 - args.sliding_window))) {}

  // Chunks begin at multiples of kChunk, wherever the window does.
  int64_t first_chunk() const { return first_seen / kChunk; }
  int64_t last_chunk() const { return (length - 1) / kChunk; }
  int64_t num_chunks() const { return last_chunk() - first_chunk() + 1; }
};

// Whether two rows of one token are a sequence: the first one, then a token more over the same blocks.
bool continues(const AttentionArgs& args, const Row& row, const Row& next) {
  if (next.num_queries != 1 || next.length != row.length + 1) return false;
  const int32_t* table = args.block_tables + row.index * args.table_stride;
  return std::equal(table, table + (row.length - 1) / args.block_size + 1, table + args.table_stride);
}

// Rows of one token each that are decoded together: a sequence, as where guesses are verified, in the same chunks.
struct Decode {
  Row first, last;

  Decode(const AttentionArgs& args, const Row& row) : first(row), last(row) {
    while (num_rows() < kMaxDecoded && last.index + 1 < args.num_rows) {
      const Row next(args, last.index + 1);
      if (next.first_chunk() != first.first_chunk() || next.last_chunk() != first.last_chunk()) return;
      if (!continues(args, last, next)) return;
      last = next;
    }
  }

  int32_t num_rows() const { return last.index - first.index + 1; }
  Unit unit(int64_t head_begin, int64_t head_end, int64_t begin, int64_t end, float* states) const {
    return {first.index, num_rows(), static_cast<int32_t>(head_begin), static_cast<int32_t>(head_end),
            static_cast<int32_t>(begin), static_cast<int32_t>(end), states};
  }
};

void plan_prefill(const AttentionArgs& args, const Row& row, AttentionPlan& plan) {
  const int32_t step = static_cast<int32_t>(query_tokens(args));
  for (int32_t begin = 0; begin < row.num_queries; begin += step) {
    const int32_t end = std::min(begin + step, row.num_queries);
    for (int32_t head = 0; head < args.num_kv_heads; ++head)
      plan.prefills.push_back({row.index, 1, head, head + 1, begin, end, nullptr});
  }
}

// Key/value heads that a unit decodes. With more heads a unit reads longer stretches of memory. But all threads need
// units, and several for each thread, because some threads are slower.
int64_t heads_of_unit(const AttentionArgs& args, int64_t num_chunks) {
  constexpr int64_t kUnitsOfThread = 8;
  const int64_t units = kUnitsOfThread * args.threads;
  return std::clamp<int64_t>(num_chunks * args.num_kv_heads / units, 1, args.num_kv_heads);
}

// A context of one chunk. If it has few tokens, a unit takes more heads.
void plan_short_decode(const AttentionArgs& args, const Decode& decode, int64_t heads, AttentionPlan& plan) {
  const int64_t begin = decode.first.first_seen, end = decode.last.length;
  const int64_t step = std::max<int64_t>(heads, kChunk / ((end - begin) * decode.num_rows()));
  for (int64_t head = 0; head < args.num_kv_heads; head += step)
    plan.decodes.push_back(decode.unit(head, std::min(head + step, args.num_kv_heads), begin, end, nullptr));
}

// States are [chunks, rows, Hq]. Returns the memory behind the rows' states.
float* plan_long_decode(const AttentionArgs& args, const Decode& decode, int64_t heads, float* states,
                        AttentionPlan& plan) {
  const int64_t states_of_head = args.num_heads / args.num_kv_heads * state_size(args);
  const int64_t states_of_chunk = decode.num_rows() * args.num_heads * state_size(args);
  const int64_t num_chunks = decode.first.num_chunks(), length = decode.last.length;
  for (int64_t head = 0; head < args.num_kv_heads; head += heads) {
    float* states_of_unit = states + head * states_of_head;
    plan.merges.push_back({static_cast<int32_t>(num_chunks), states_of_unit});
    for (int64_t begin = decode.first.first_seen; begin < length; begin = (begin / kChunk + 1) * kChunk) {
      const int64_t end = std::min<int64_t>((begin / kChunk + 1) * kChunk, length);
      plan.chunks.push_back(decode.unit(head, std::min(head + heads, args.num_kv_heads), begin, end, states_of_unit));
      plan.merge_of.push_back(static_cast<int32_t>(plan.merges.size()) - 1);
      states_of_unit += states_of_chunk;
    }
  }
  return states + num_chunks * states_of_chunk;
}

// Requires that check_rows is kOk. Throws std::bad_alloc.
AttentionPlan plan_attention(const AttentionArgs& args) {
  AttentionPlan plan;
  std::vector<Decode> decodes;
  int64_t num_states = 0, num_chunks = 0;
  for (int64_t index = 0; index < args.num_rows; ++index) {
    const Row row(args, index);
    plan.elements += int64_t{row.length - row.first_seen} * row.num_queries * args.num_kv_heads * args.head_dim * 2;
    if (row.num_queries > 1) plan_prefill(args, row, plan);
    if (row.num_queries != 1 || (!decodes.empty() && index <= decodes.back().last.index)) continue;
    const Decode& decode = decodes.emplace_back(args, row);
    plan.max_decoded = std::max(plan.max_decoded, decode.num_rows());
    num_chunks += row.num_chunks();
    if (row.num_chunks() > 1) num_states += row.num_chunks() * decode.num_rows() * args.num_heads;
  }
  const int64_t heads = heads_of_unit(args, num_chunks);
  plan.states.reset(new float[num_states * state_size(args)]);
  float* states = plan.states.get();
  for (const Decode& decode : decodes)
    if (decode.first.num_chunks() > 1)
      states = plan_long_decode(args, decode, heads, states, plan);
    else
      plan_short_decode(args, decode, heads, plan);
  auto context = [&](const Unit& unit) {
    return args.seq_lens[unit.row] - args.query_start_loc[unit.row + 1] + args.query_start_loc[unit.row] + unit.end;
  };
  std::stable_sort(plan.prefills.begin(), plan.prefills.end(),
                   [&](const Unit& a, const Unit& b) { return context(a) > context(b); });
  return plan;
}

// Below this many elements of keys and values, waking a second thread takes longer than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

int64_t scratch_of(const IsaKernels& kernels, const AttentionArgs& args, const AttentionPlan& plan) {
  const int64_t prefill = plan.prefills.empty() ? 0 : kernels.prefill_scratch.of[args.dtype](args);
  return std::max(prefill, kernels.decode_scratch.of[args.dtype](args, plan.max_decoded));
}

class AttentionWork : public Work {
 public:
  AttentionWork(const IsaKernels& kernels, const AttentionArgs& args, std::shared_ptr<const SharedPlan> shared)
      : Work(shared->plan.num_units(), shared->plan.elements < kWorthThreads ? shared->plan.num_units() : 1, 1,
             scratch_of(kernels, args, shared->plan), 0, !shared->plan.prefills.empty()),  // the longest first
        kernels_(kernels),
        args_(args),
        shared_(std::move(shared)) {}

 private:
  void run(int64_t begin, int64_t end, const Scratch& scratch) const override {
    for (int64_t index = begin; index < end; ++index) do_unit(index, scratch.own);
  }

  void do_unit(int64_t index, std::byte* scratch) const {
    const AttentionPlan& plan = shared_->plan;
    if (index < static_cast<int64_t>(plan.prefills.size())) {
      kernels_.prefill.of[args_.dtype](args_, plan.prefills[index], scratch);
      return;
    }
    index -= plan.prefills.size();
    if (index < static_cast<int64_t>(plan.chunks.size())) {
      do_chunk(index, scratch);
      return;
    }
    kernels_.decode.of[args_.dtype](args_, plan.decodes[index - plan.chunks.size()], scratch);
  }

  void do_chunk(int64_t index, std::byte* scratch) const {
    const Unit& unit = shared_->plan.chunks[index];
    kernels_.decode.of[args_.dtype](args_, unit, scratch);
    const int32_t merge = shared_->plan.merge_of[index];
    const Merge& merged = shared_->plan.merges[merge];
    if (shared_->is_last_chunk(merge)) kernels_.merge.of[args_.dtype](args_, unit, merged.states, merged.chunks);
  }

  const IsaKernels& kernels_;
  const AttentionArgs args_;
  const std::shared_ptr<const SharedPlan> shared_;
};

}  // namespace

Status check_rows(const AttentionArgs& args) {
  const int32_t* starts = args.query_start_loc;
  if (starts[0] != 0 || starts[args.num_rows] != args.num_tokens) return kBadLengths;
  for (int64_t row = 0; row < args.num_rows; ++row) {
    const int64_t queries = int64_t{starts[row + 1]} - starts[row], length = args.seq_lens[row];
    if (queries < 0 || length < queries || length > args.table_width * args.block_size) return kBadLengths;
    const int32_t* table = args.block_tables + row * args.table_stride;
    for (int64_t column = 0; column * args.block_size < length; ++column)
      if (table[column] < 0 || table[column] >= args.num_blocks) return kBadBlock;
  }
  return kOk;
}

SharedPlan::SharedPlan(const AttentionArgs& args)
    : plan(plan_attention(args)), args_(args), left_(new std::atomic<int32_t>[plan.merges.size()]) {
  for (size_t i = 0; i < plan.merges.size(); ++i) left_[i].store(plan.merges[i].chunks, std::memory_order_relaxed);
}

bool SharedPlan::fits(const AttentionArgs& args) const {
  return args.block_tables == args_.block_tables && args.query_start_loc == args_.query_start_loc &&
         args.seq_lens == args_.seq_lens && args.num_tokens == args_.num_tokens && args.num_rows == args_.num_rows &&
         args.num_heads == args_.num_heads && args.num_kv_heads == args_.num_kv_heads &&
         args.head_dim == args_.head_dim && args.block_size == args_.block_size &&
         args.num_blocks == args_.num_blocks &&
         args.table_stride == args_.table_stride && args.table_width == args_.table_width &&
         args.sliding_window == args_.sliding_window && args.threads == args_.threads;
}

bool SharedPlan::is_last_chunk(int32_t merge) const {
  if (left_[merge].fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
  left_[merge].store(plan.merges[merge].chunks, std::memory_order_relaxed);
  return true;
}

std::unique_ptr<Work> attention_work(const IsaKernels& kernels, const AttentionArgs& args,
                                     std::shared_ptr<const SharedPlan> plan) {
  return std::make_unique<AttentionWork>(kernels, args, std::move(plan));
}

}  // namespace quire
