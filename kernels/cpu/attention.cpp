// Paged attention of a flat batch: checks, plans, and runs the units on all threads, whoever is free taking the next.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "plan.h"
#include "threads.h"

namespace quire {
namespace {

// Elements of keys and values below which a second thread takes longer to wake than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

class Run {
 public:
  Run(const IsaKernels& kernels, const AttentionArgs& args, const AttentionPlan& plan)
      : kernels_(kernels), args_(args), plan_(plan), left_(new std::atomic<int32_t>[plan.merges.size()]) {
    for (size_t i = 0; i < plan.merges.size(); ++i) left_[i].store(plan.merges[i].chunks, std::memory_order_relaxed);
  }

  int64_t scratch_bytes() const {
    const int64_t prefill = plan_.prefills.empty() ? 0 : kernels_.prefill_scratch.of[args_.dtype](args_);
    return padded(std::max(prefill, kernels_.decode_scratch.of[args_.dtype](args_)), 64);
  }

  // Does units until none is left. To be called by every thread, with memory of its own.
  void work(std::byte* scratch) {
    const int64_t num_units = plan_.num_units();
    for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < num_units;) do_unit(index, scratch);
  }

 private:
  void do_unit(int64_t index, std::byte* scratch) {
    if (index < static_cast<int64_t>(plan_.prefills.size())) {
      kernels_.prefill.of[args_.dtype](args_, plan_.prefills[index], scratch);
      return;
    }
    index -= plan_.prefills.size();
    if (index < static_cast<int64_t>(plan_.chunks.size())) {
      do_chunk(index, scratch);
      return;
    }
    kernels_.decode.of[args_.dtype](args_, plan_.decodes[index - plan_.chunks.size()], scratch);
  }

  void do_chunk(int64_t index, std::byte* scratch) {
    const Unit& unit = plan_.chunks[index];
    kernels_.decode.of[args_.dtype](args_, unit, scratch);
    const int32_t merge = plan_.merge_of[index];
    if (left_[merge].fetch_sub(1, std::memory_order_acq_rel) == 1)
      kernels_.merge.of[args_.dtype](args_, unit, plan_.merges[merge].states, plan_.merges[merge].chunks);
  }

  const IsaKernels& kernels_;
  const AttentionArgs& args_;
  const AttentionPlan& plan_;
  std::unique_ptr<std::atomic<int32_t>[]> left_;
  alignas(64) std::atomic<int64_t> next_{0};
};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

}  // namespace

Status paged_attention(const Context& context, const AttentionArgs& args) {
  if (const Status status = check_rows(args); status != kOk) return status;
  const AttentionPlan plan = plan_attention(args);
  if (plan.num_units() == 0) return kOk;
  Run run(context.kernels, args, plan);
  const bool alone = plan.num_units() == 1 || plan.elements < kWorthThreads;
  const int64_t threads = alone ? 1 : args.threads, bytes = run.scratch_bytes();
  const std::unique_ptr<std::byte, Free> scratch(static_cast<std::byte*>(std::aligned_alloc(64, bytes * threads)));
  if (scratch == nullptr) return kNoMemory;
  std::atomic<int64_t> arrived{0};
  run_on_threads(context.openmp, threads, [&] { run.work(scratch.get() + bytes * arrived.fetch_add(1)); });
  return kOk;
}

}  // namespace quire
