// The operations of api.h: checks of their arguments, their division into units of work, and the exported functions.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "product/experts.h"
#include "runtime/api.h"
#include "runtime/exchange.h"
#include "runtime/isa.h"
#include "runtime/work.h"
#include "states/states.h"

namespace quire {
namespace {

// Below this many bytes of a round through a group's slots, waking a second thread takes longer than it saves.
constexpr int64_t kWorthStripe = 1 << 14;
// The least number of elements that a thread sums: whole cache lines of any type.
constexpr int64_t kSumAtOnce = 64;

int64_t size_of(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// A round through the group's slots, in stripes that threads share: first they copy this process's part to its slot,
// then they read all slots.
template <class Give, class Take>
class RoundWork : public Work {
 public:
  RoundWork(const SharedGroup& group, int64_t units, int64_t stripes, Give give, Take take)
      : Work(2 * stripes, 2, std::numeric_limits<int64_t>::max(), 0, 0, true),
        group_(group),
        units_(units),
        stripes_(stripes),
        give_(std::move(give)),
        take_(std::move(take)) {}

  void begin() override { round_.emplace(group_); }

 private:
  // Threads take these in order, so a thread waits for a stripe of others only when all of this process's are signalled
  // or being copied: no two processes wait for each other.
  void run(int64_t begin, int64_t end, const Scratch&) const override {
    const int64_t width = (units_ + stripes_ - 1) / stripes_;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t stripe = i % stripes_, first = std::min(stripe * width, units_),
                    last = std::min(first + width, units_);
      if (i < stripes_) {
        give_(first, last, round_->slot(group_.rank));
        round_->signal(stripe);
        continue;
      }
      // This process's own too: another thread may still be copying it.
      for (int64_t rank = 0; rank < group_.size; ++rank) round_->wait(rank, stripe);
      take_(first, last, *round_);
    }
  }

  const SharedGroup group_;
  const int64_t units_, stripes_;
  const Give give_;
  const Take take_;
  std::optional<Round> round_;
};

Status check_tokens(const RotaryArgs& args) {
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.positions != nullptr && (args.positions[token] < 0 || args.positions[token] >= args.max_position))
      return kBadPosition;
    if (args.cache.kv_cache == nullptr) continue;
    if (args.cache.slot_mapping[token] < 0 || args.cache.slot_mapping[token] >= num_slots) return kBadSlot;
  }
  return kOk;
}

// The tokens of an operation that have adapters, slot by slot, so that they share the reads of an adapter.
class SortedTokens {
 public:
  template <class Args>
  Status sort(const Args& args) {
    std::vector<int64_t> ends(args.num_slots + 1);
    for (int64_t token = 0; token < args.num_tokens; ++token) {
      if (args.slots[token] < 0 || args.slots[token] >= args.num_slots) return kBadSlotOfAdapter;
      ++ends[args.slots[token] + 1];
    }
    ends[1] = 0;
    for (int64_t slot = 1; slot < args.num_slots; ++slot) {
      ends[slot + 1] += ends[slot];
      if (ends[slot] < ends[slot + 1]) slots_.push_back({slot, ends[slot], ends[slot + 1]});
    }
    tokens_.resize(ends.back());
    for (int64_t token = 0; token < args.num_tokens; ++token)
      if (args.slots[token] != 0) tokens_[ends[args.slots[token]]++] = token;
    return kOk;
  }

  bool is_empty() const { return tokens_.empty(); }
  TokensBySlot get(const ShrinkArgs* next) const {
    return {tokens_.data(), slots_.data(), static_cast<int64_t>(slots_.size()), next};
  }

  // The units of `shrink`; units that read the same lines are consecutive.
  std::vector<ShrinkUnit> units(const ShrinkArgs& args) const {
    std::vector<ShrinkUnit> units;
    for (const TokensOfSlot& of_slot : slots_)
      for (int64_t number = 0; number < args.num_parts; ++number) {
        const LowRankPart* part = args.parts + of_slot.slot * args.num_parts + number;
        for (int64_t line = 0; line < part->rank; line += kLinesOfUnit)
          for (int64_t begin = of_slot.begin; begin < of_slot.end; begin += kTokensOfUnit)
            units.push_back({part, line, begin, std::min(begin + kTokensOfUnit, of_slot.end)});
      }
    return units;
  }

 private:
  std::vector<int64_t> tokens_;
  std::vector<TokensOfSlot> slots_;
};

// A sequence of operations.
class Operations {
 public:
  explicit Operations(const Context& context) : context_(context) {}

  // Checks the arguments and copies them. Adds nothing where they are wrong. Throws std::bad_alloc.
  Status add_paged_attention(const AttentionArgs& args);
  Status add_text_attention(const TextAttentionArgs& args);
  Status add_rms_norm(const NormArgs& args);
  Status add_layer_norm(const NormArgs& args);
  Status add_silu_and_mul(const SiluArgs& args);
  Status add_multiply(const MultiplyArgs& args);
  Status add_rotary(const RotaryArgs& args);
  Status add_quantize(const QuantizeArgs& args);
  Status add_draw(const DrawArgs& args);
  Status add_shrink(const ShrinkArgs& args);
  Status add_product(ProductArgs args, const ShrinkArgs* next = nullptr);
  Status add_choose(const ChooseArgs& args);
  Status add_experts(const ExpertsArgs& args);
  Status add_causal_conv(const ConvArgs& args);
  Status add_linear_recurrence(const RecurrenceArgs& args);
  Status add_selective_scan(const ScanArgs& args);
  Status add_gates(const GatesArgs& args);
  Status add_gated_norm(const GatedNormArgs& args);
  Status add_all_reduce(const AllReduceArgs& args);
  Status add_all_gather(const AllGatherArgs& args);

  // Throws std::bad_alloc.
  void run(int64_t threads) const { run_in_turn(context_.openmp, works_, threads); }

 private:
  // Function(begin, end, scratch) does these units.
  template <class Function>
  Status add(int64_t units, int64_t grain, Function function, int64_t own_bytes = 0, int64_t shared_bytes = 0);

  // A round through the group's slots: give(begin, end, to) copies these units of this process's part to its slot, and
  // take(begin, end, round) reads them from the slots of all.
  template <class Give, class Take>
  void add_round(const SharedGroup& group, int64_t units, int64_t bytes, Give give, Take take);

  const Context& context_;
  Works works_;
  std::vector<std::shared_ptr<const SharedPlan>> plans_;  // one for each window and block table of the layers
  StatePlans state_plans_;
};

template <class Function>
Status Operations::add(int64_t units, int64_t grain, Function function, int64_t own_bytes, int64_t shared_bytes) {
  works_.push_back(
      std::make_unique<FunctionWork<Function>>(units, grain, own_bytes, shared_bytes, std::move(function)));
  return kOk;
}

template <class Give, class Take>
void Operations::add_round(const SharedGroup& group, int64_t units, int64_t bytes, Give give, Take take) {
  const int64_t stripes = std::clamp<int64_t>(std::min(bytes / kWorthStripe, units), 1, kMaxStripes);
  works_.push_back(std::make_unique<RoundWork<Give, Take>>(group, units, stripes, std::move(give), std::move(take)));
}

Status Operations::add_paged_attention(const AttentionArgs& args) {
  auto plan = std::find_if(plans_.begin(), plans_.end(), [&](const auto& each) { return each->fits(args); });
  if (plan == plans_.end()) {
    if (const Status status = check_rows(args); status != kOk) return status;
    plan = plans_.insert(plans_.end(), std::make_shared<const SharedPlan>(args));
  }
  works_.push_back(attention_work(context_.kernels, args, *plan));
  return kOk;
}

Status Operations::add_text_attention(const TextAttentionArgs& args) {
  std::vector<TextUnit> units;
  int64_t first = 0, pairs = 0;  // of queries and keys
  for (int64_t text = 0; text < args.num_texts; ++text) {
    const int32_t length = args.lengths[text];
    if (length < 1 || length > args.num_tokens - first) return kBadLengths;
    for (int32_t head = 0; head < args.num_heads; ++head)
      for (int32_t begin = 0; begin < length; begin += kQueryRows) {
        const int32_t end = std::min<int32_t>(begin + kQueryRows, length);
        units.push_back({static_cast<int32_t>(first), length, head, begin, end});
      }
    pairs += std::min<int64_t>(length, 2 * args.window + 1) * length;
    first += length;
  }
  if (first != args.num_tokens) return kBadLengths;
  const auto kernel = context_.kernels.attend_texts.of[args.dtype];
  const int64_t num_units = units.size(), of_unit = pairs * args.num_heads / std::max<int64_t>(num_units, 1);
  return add(
      num_units, grain(kWorthThreads, of_unit),
      [=, units = std::move(units)](int64_t begin, int64_t end, const Scratch& scratch) {
        kernel(args, units.data() + begin, units.data() + end, scratch.own);
      },
      context_.kernels.texts_scratch.of[args.dtype](args));
}

Status Operations::add_rms_norm(const NormArgs& args) {
  const auto kernel = context_.kernels.rms_norm.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.hidden),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_layer_norm(const NormArgs& args) {
  const auto kernel = context_.kernels.layer_norm.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.hidden),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_silu_and_mul(const SiluArgs& args) {
  const auto kernel = context_.kernels.silu_and_mul.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.n),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_multiply(const MultiplyArgs& args) {
  const auto kernel = context_.kernels.multiply.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.n),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_rotary(const RotaryArgs& args) {
  if (const Status status = check_tokens(args); status != kOk) return status;
  const auto kernel = context_.kernels.rotary.of[args.dtype];
  const int64_t elements = (args.query.count + 2 * args.key.count) * args.head_dim;
  return add(args.num_tokens, grain(kWorthThreads, elements),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_quantize(const QuantizeArgs& args) {
  const auto kernel = context_.kernels.quantize.of[args.dtype];
  return add(args.rows, grain(kWorthThreads, args.n),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_draw(const DrawArgs& args) {
  const auto kernel = context_.kernels.draw;
  return add(
      args.rows, grain(kWorthThreads, args.vocab_size),
      [=](int64_t begin, int64_t end, const Scratch& scratch) { kernel(args, begin, end, scratch.own); },
      context_.kernels.draw_scratch(args));
}

Status Operations::add_shrink(const ShrinkArgs& args) {
  auto tokens = std::make_shared<SortedTokens>();
  if (const Status status = tokens->sort(args); status != kOk || tokens->is_empty()) return status;
  const auto kernel = context_.kernels.shrink.of[args.dtype];
  auto units = tokens->units(args);
  const int64_t num_units = units.size();
  return add(num_units, grain(kWorthThreads, args.in_features * kLinesOfUnit),
             [=, units = std::move(units)](int64_t begin, int64_t end, const Scratch&) {
               kernel(args, tokens->get(nullptr).tokens, units.data() + begin, units.data() + end);
             });
}

Status Operations::add_product(ProductArgs args, const ShrinkArgs* next) {
  auto tokens = std::make_shared<SortedTokens>();
  if (args.parts != nullptr) {
    if (const Status status = tokens->sort(args); status != kOk) return status;
    if (tokens->is_empty()) args.parts = nullptr;
  }
  const auto kernel = context_.kernels.product;
  const int64_t elements = args.in_features * kPanel * (1 + std::min(args.num_tokens, kMaxTokens) / 16);
  const int64_t packed_bytes = context_.kernels.packed_bytes(args);
  if (packed_bytes > 0) {
    const auto pack = context_.kernels.pack_tokens;
    const int64_t words_of_block = args.num_tokens * kWordsOfBlock;
    add(
        packed_bytes / words_of_block / sizeof(int32_t), grain(kWorthThreads, words_of_block),
        [=](int64_t begin, int64_t end, const Scratch& scratch) { pack(args, begin, end, scratch.shared); }, 0,
        packed_bytes);
  }
  return add(
      num_units(args), grain(kWorthReading, elements),
      [=](int64_t begin, int64_t end, const Scratch& scratch) {
        kernel(args, tokens->get(next), begin, end, scratch.own, scratch.shared);
      },
      context_.kernels.product_scratch(args), packed_bytes);
}

Status Operations::add_choose(const ChooseArgs& args) {
  return add(
      args.num_tokens, grain(kWorthThreads, 16 * args.num_experts),
      [=](int64_t begin, int64_t end, const Scratch& scratch) { choose_experts(args, begin, end, scratch.own); },
      choose_scratch(args));
}

Status Operations::add_experts(const ExpertsArgs& args) {
  add_experts_works(context_.kernels, args, works_);
  return kOk;
}

Status Operations::add_causal_conv(const ConvArgs& args) {
  return state_plans_.add_conv(context_.kernels, args, works_);
}

Status Operations::add_linear_recurrence(const RecurrenceArgs& args) {
  return state_plans_.add_recurrence(context_.kernels, args, works_);
}

Status Operations::add_selective_scan(const ScanArgs& args) {
  return state_plans_.add_scan(context_.kernels, args, works_);
}

Status Operations::add_gates(const GatesArgs& args) {
  const auto kernel = context_.kernels.gates.of[args.dtype];
  return add(args.num_tokens, grain(kWorthThreads, 2 * args.num_heads * args.head_channels),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_gated_norm(const GatedNormArgs& args) {
  const auto kernel = context_.kernels.gated_norm.of[args.dtype];
  return add(args.num_tokens, grain(kWorthThreads, args.hidden),
             [=](int64_t begin, int64_t end, const Scratch&) { kernel(args, begin, end); });
}

Status Operations::add_all_reduce(const AllReduceArgs& args) {
  const auto kernel = context_.kernels.sum.of[args.dtype];
  const int64_t element = size_of(args.dtype), total = args.rows * args.n, at_once = args.group.slot_bytes / element;
  for (int64_t start = 0; start < total; start += at_once) {
    const int64_t count = std::min(at_once, total - start);
    std::byte* x = static_cast<std::byte*>(args.x) + start * element;
    auto bytes = [=](int64_t unit) { return std::min(unit * kSumAtOnce, count) * element; };
    auto give = [=](int64_t begin, int64_t end, std::byte* to) {
      std::memcpy(to + bytes(begin), x + bytes(begin), bytes(end) - bytes(begin));
    };
    auto take = [=, size = args.group.size](int64_t begin, int64_t end, const Round& round) {
      const void* parts[kMaxRanks];
      for (int64_t rank = 0; rank < size; ++rank) parts[rank] = round.slot(rank) + bytes(begin);
      kernel(x + bytes(begin), parts, size, (bytes(end) - bytes(begin)) / element);
    };
    add_round(args.group, (count + kSumAtOnce - 1) / kSumAtOnce, count * element, give, take);
  }
  return kOk;
}

Status Operations::add_all_gather(const AllGatherArgs& args) {
  const int64_t width = std::min(args.part, args.group.slot_bytes);
  const int64_t at_once = width > 0 ? args.group.slot_bytes / width : 0;
  for (int64_t column = 0; column < args.part; column += width) {
    // The elements of a rank's part in these columns.
    auto bytes = [=](int64_t rank) {
      const int64_t begin = rank * args.part + column, end = std::min(begin - column + args.part, args.total);
      return std::clamp<int64_t>(end - begin, 0, width);
    };
    for (int64_t row = 0; row < args.rows; row += at_once) {
      auto give = [=](int64_t begin, int64_t end, std::byte* to) {
        const int64_t count = bytes(args.group.rank);
        if (count == 0) return;  // x may be null then
        const std::byte* x = static_cast<const std::byte*>(args.x) + column;
        for (int64_t i = begin; i < end; ++i) std::memcpy(to + i * width, x + (row + i) * args.x_stride, count);
      };
      auto take = [=](int64_t begin, int64_t end, const Round& round) {
        std::byte* output = static_cast<std::byte*>(args.output) + column;
        for (int64_t i = begin; i < end; ++i)
          for (int64_t rank = 0; rank < args.group.size; ++rank)
            if (const int64_t count = bytes(rank); count > 0)
              std::memcpy(output + (row + i) * args.total + rank * args.part, round.slot(rank) + i * width, count);
      };
      const int64_t rows = std::min(at_once, args.rows - row);
      add_round(args.group, rows, rows * width, give, take);
    }
  }
  return kOk;
}

// Runs the operations that add(operations) adds.
template <class Add>
int32_t run_added(const Context& context, int64_t threads, const Add& add) {
  try {
    Operations operations(context);
    const Status status = add(operations);
    if (status == kOk) operations.run(threads);
    return status;
  } catch (...) {  // Only allocations throw.
    return kNoMemory;
  }
}

// The arguments of a recorded operation, for as many tokens or lines as a run has.
template <class Args>
Args args_of(const RecordedOperation& recorded, int64_t Args::* count, const RunArgs& run) {
  Args args = *static_cast<const Args*>(recorded.args);
  args.*count = run.num_tokens * recorded.lines_per_token;
  return args;
}

// The same of an operation on states.
template <class Args>
Args state_args_of(const RecordedOperation& recorded, const RunArgs& run) {
  Args args = args_of(recorded, &Args::num_tokens, run);
  args.pages.num_rows = run.num_rows;
  return args;
}

// The first `shrink` after an operation; null if there is none.
const ShrinkArgs* shrink_after(const RunArgs& run, int64_t i) {
  while (++i < run.num_operations)
    if (run.operations[i].operation == kShrink) return static_cast<const ShrinkArgs*>(run.operations[i].args);
  return nullptr;
}

Status add(Operations& operations, const RunArgs& run, int64_t i) {
  const RecordedOperation& recorded = run.operations[i];
  switch (recorded.operation) {
    case kPagedAttention: {
      AttentionArgs args = args_of(recorded, &AttentionArgs::num_tokens, run);
      args.num_rows = run.num_rows;
      return operations.add_paged_attention(args);
    }
    case kTextAttention: {
      TextAttentionArgs args = args_of(recorded, &TextAttentionArgs::num_tokens, run);
      args.num_texts = run.num_rows;
      return operations.add_text_attention(args);
    }
    case kRmsNorm:
      return operations.add_rms_norm(args_of(recorded, &NormArgs::rows, run));
    case kLayerNorm:
      return operations.add_layer_norm(args_of(recorded, &NormArgs::rows, run));
    case kGate:
      return operations.add_silu_and_mul(args_of(recorded, &SiluArgs::rows, run));
    case kMultiply:
      return operations.add_multiply(args_of(recorded, &MultiplyArgs::rows, run));
    case kRotary:
      return operations.add_rotary(args_of(recorded, &RotaryArgs::num_tokens, run));
    case kQuantize:
      return operations.add_quantize(args_of(recorded, &QuantizeArgs::rows, run));
    case kShrink:
      return operations.add_shrink(args_of(recorded, &ShrinkArgs::num_tokens, run));
    case kChoose:
      return operations.add_choose(args_of(recorded, &ChooseArgs::num_tokens, run));
    case kExperts:
      return operations.add_experts(args_of(recorded, &ExpertsArgs::num_tokens, run));
    case kCausalConv:
      return operations.add_causal_conv(state_args_of<ConvArgs>(recorded, run));
    case kLinearRecurrence:
      return operations.add_linear_recurrence(state_args_of<RecurrenceArgs>(recorded, run));
    case kSelectiveScan:
      return operations.add_selective_scan(state_args_of<ScanArgs>(recorded, run));
    case kGates:
      return operations.add_gates(args_of(recorded, &GatesArgs::num_tokens, run));
    case kGatedNorm:
      return operations.add_gated_norm(args_of(recorded, &GatedNormArgs::num_tokens, run));
    case kAllReduce:
      return operations.add_all_reduce(args_of(recorded, &AllReduceArgs::rows, run));
    case kAllGather:
      return operations.add_all_gather(args_of(recorded, &AllGatherArgs::rows, run));
    default:
      return operations.add_product(args_of(recorded, &ProductArgs::num_tokens, run), shrink_after(run, i));
  }
}

}  // namespace
}  // namespace quire

#define QUIRE_OPERATION(name, Args)                                                                                  \
  int32_t quire_##name(const quire::Context* context, const quire::Args* args) {                                     \
    return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_##name(*args); }); \
  }
QUIRE_OPERATION(paged_attention, AttentionArgs)
QUIRE_OPERATION(text_attention, TextAttentionArgs)
QUIRE_OPERATION(rms_norm, NormArgs)
QUIRE_OPERATION(layer_norm, NormArgs)
QUIRE_OPERATION(silu_and_mul, SiluArgs)
QUIRE_OPERATION(multiply, MultiplyArgs)
QUIRE_OPERATION(rotary, RotaryArgs)
QUIRE_OPERATION(quantize, QuantizeArgs)
QUIRE_OPERATION(shrink, ShrinkArgs)
QUIRE_OPERATION(product, ProductArgs)
QUIRE_OPERATION(draw, DrawArgs)
QUIRE_OPERATION(choose, ChooseArgs)
QUIRE_OPERATION(causal_conv, ConvArgs)
QUIRE_OPERATION(linear_recurrence, RecurrenceArgs)
QUIRE_OPERATION(selective_scan, ScanArgs)
QUIRE_OPERATION(gates, GatesArgs)
QUIRE_OPERATION(gated_norm, GatedNormArgs)
QUIRE_OPERATION(all_reduce, AllReduceArgs)
QUIRE_OPERATION(all_gather, AllGatherArgs)

int32_t quire_experts(const quire::Context* context, const quire::ExpertsArgs* args) {
  // In a recording, `choose` has made the numbers.
  for (int64_t i = 0; i < args->num_tokens * args->num_chosen; ++i)
    if (args->chosen[i] < 0 || args->chosen[i] >= args->num_experts) return quire::kBadExpert;
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_experts(*args); });
}

int32_t quire_run(const quire::Context* context, const quire::RunArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) {
    for (int64_t i = 0; i < args->num_operations; ++i)
      if (const quire::Status status = quire::add(all, *args, i); status != quire::kOk) return status;
    return quire::kOk;
  });
}
