// Checks of the pages of states, and the division of operations on them into units.
#include "states/states.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "states/pages.h"
#include "states/sizes.h"

namespace quire {
namespace {

// The fields that rows depend on; all layers of a model have the same.
StatePages without_layer(StatePages pages) {
  pages.first_unit = 0;
  return pages;
}

bool are_blocks(const StatePages& pages, const int32_t* table) {
  return std::all_of(table, table + pages.table_width,
                     [&](int32_t block) { return block >= 0 && block < pages.num_blocks; });
}

// Threads take units one by one, the longest rows first.
template <class Function>
class StateWork : public Work {
 public:
  StateWork(int64_t units, int64_t elements, bool is_in_order, int64_t own_bytes, Function function)
      : Work(units, elements < kWorthThreads ? units : 1, 1, own_bytes, 0, is_in_order),
        function_(std::move(function)) {}

 private:
  void run(int64_t begin, int64_t end, const Scratch& scratch) const override { function_(begin, end, scratch); }

  const Function function_;
};

// Adds work on groups of channels: kernel(begin, end, memory) does these groups of all rows.
template <class Kernel>
void add_groups(int64_t channels, int64_t elements_of_group, int64_t own_bytes, Works& works, Kernel kernel) {
  auto function = [=](int64_t begin, int64_t end, const Scratch& scratch) { kernel(begin, end, scratch.own); };
  // Some groups at once: their lines of memory are read together.
  constexpr int64_t kGroups = 4;
  works.push_back(std::make_unique<FunctionWork<decltype(function)>>(
      num_groups(channels), std::max(kGroups, grain(kWorthThreads, elements_of_group)), own_bytes, 0,
      std::move(function)));
}

template <class Pieces, class... Args>
int64_t scratch_bytes(const Args&... args) {
  Arena arena(nullptr);
  Pieces(args..., arena);
  return arena.used();
}

}  // namespace

Status StatePlan::check(const StatePages& pages, int64_t num_tokens) {
  const int32_t* starts = pages.query_start_loc;
  if (starts[0] != 0 || starts[pages.num_rows] != num_tokens) return kBadLengths;
  for (int64_t row = 0; row < pages.num_rows; ++row) {
    const int64_t tokens = int64_t{starts[row + 1]} - starts[row];
    if (tokens < 0 || pages.seq_lens[row] < tokens) return kBadLengths;
    if (pages.num_kept != nullptr && pages.num_kept[row] < 0) return kBadLengths;
    if (tokens > 0 && !are_blocks(pages, pages.tables + row * pages.table_stride)) return kBadBlock;
  }
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t line = pages.checkpoints[token];
    if (line < -1 || line >= pages.num_checkpoints) return kBadCheckpoint;
    if (line >= 0 && !are_blocks(pages, pages.checkpoint_tables + line * pages.checkpoint_stride)) return kBadBlock;
  }
  return kOk;
}

StatePlan::StatePlan(const StatePages& pages, int64_t num_tokens)
    : pages_(without_layer(pages)), num_tokens_(num_tokens) {
  auto first_block = [&](int64_t row) { return pages.tables[row * pages.table_stride]; };
  for (int64_t row = 0; row < pages.num_rows; ++row) {
    const int32_t first = pages.query_start_loc[row], tokens = pages.query_start_loc[row + 1] - first;
    if (tokens == 0) continue;
    const int32_t kept = pages.num_kept == nullptr ? tokens : std::min(tokens, pages.num_kept[row]);
    if (!rows.empty() && first_block(rows.back().row) == first_block(row)) {
      StateRow& before = rows.back();
      if (before.num_kept == before.num_tokens) before.num_kept += kept;
      before.num_tokens += tokens;
    } else {
      rows.push_back({static_cast<int32_t>(row), first, tokens, kept, pages.seq_lens[row] == tokens});
    }
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const StateRow& a, const StateRow& b) { return a.num_tokens > b.num_tokens; });
}

bool StatePlan::fits(const StatePages& pages, int64_t num_tokens) const {
  const StatePages others = without_layer(pages);
  return num_tokens == num_tokens_ && std::memcmp(&others, &pages_, sizeof(others)) == 0;
}

Status StatePlans::find(const StatePages& pages, int64_t num_tokens, std::shared_ptr<const StatePlan>& plan) {
  for (const auto& each : plans_) {
    if (!each->fits(pages, num_tokens)) continue;
    plan = each;
    return kOk;
  }
  if (const Status status = StatePlan::check(pages, num_tokens); status != kOk) return status;
  plan = plans_.emplace_back(std::make_shared<const StatePlan>(pages, num_tokens));
  return kOk;
}

Status StatePlans::add_recurrence(const IsaKernels& kernels, const RecurrenceArgs& args, Works& works) {
  std::shared_ptr<const StatePlan> plan;
  if (const Status status = find(args.pages, args.num_tokens, plan); status != kOk) return status;
  const auto kernel = kernels.recurrence.of[args.dtype];
  // Units of whole heads convert a token once; but all threads need some.
  constexpr int64_t kUnitsOfThread = 4;
  const int64_t groups = num_groups(args.value_dim);
  const int64_t heads = static_cast<int64_t>(plan->rows.size()) * args.num_heads;
  const int64_t spans = std::clamp<int64_t>(kUnitsOfThread * args.threads / std::max<int64_t>(heads, 1), 1, groups);
  const int64_t groups_of_unit = std::min(groups, padded((groups + spans - 1) / spans, 2));
  const int64_t units = heads * ((groups + groups_of_unit - 1) / groups_of_unit);
  auto function = [=](int64_t begin, int64_t end, const Scratch& scratch) {
    kernel(args, plan->rows.data(), groups_of_unit, begin, end, scratch.own);
  };
  const bool is_in_order = !plan->rows.empty() && plan->rows[0].num_tokens > 1;
  works.push_back(std::make_unique<StateWork<decltype(function)>>(
      units, args.num_tokens * args.num_heads * args.key_dim * args.value_dim, is_in_order,
      scratch_bytes<RecurrenceScratch>(args, groups_of_unit), std::move(function)));
  return kOk;
}

Status StatePlans::add_conv(const IsaKernels& kernels, const ConvArgs& args, Works& works) {
  std::shared_ptr<const StatePlan> plan;
  if (const Status status = find(args.pages, args.num_tokens, plan); status != kOk) return status;
  const auto kernel = kernels.conv.of[args.dtype];
  add_groups(args.channels, args.num_tokens * kColumns * args.taps, scratch_bytes<ConvScratch>(args), works,
             [=](int64_t begin, int64_t end, std::byte* scratch) {
               kernel(args, plan->rows.data(), plan->rows.size(), begin, end, scratch);
             });
  return kOk;
}

Status StatePlans::add_scan(const IsaKernels& kernels, const ScanArgs& args, Works& works) {
  std::shared_ptr<const StatePlan> plan;
  if (const Status status = find(args.pages, args.num_tokens, plan); status != kOk) return status;
  const auto kernel = kernels.scan.of[args.dtype];
  add_groups(args.channels, args.num_tokens * kColumns * args.num_states, scratch_bytes<ScanScratch>(args), works,
             [=](int64_t begin, int64_t end, std::byte* scratch) {
               kernel(args, plan->rows.data(), plan->rows.size(), begin, end, scratch);
             });
  return kOk;
}

}  // namespace quire
