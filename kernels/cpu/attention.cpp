// Paged attention of a flat batch: its units, and who merges what was found in chunks.
#include "attention.h"

#include <algorithm>
#include <utility>

namespace quire {
namespace {

// Elements of keys and values below which a second thread takes longer to wake than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

int64_t scratch_of(const IsaKernels& kernels, const AttentionArgs& args, const AttentionPlan& plan) {
  const int64_t prefill = plan.prefills.empty() ? 0 : kernels.prefill_scratch.of[args.dtype](args);
  return std::max(prefill, kernels.decode_scratch.of[args.dtype](args));
}

class AttentionWork : public Work {
 public:
  AttentionWork(const IsaKernels& kernels, const AttentionArgs& args, std::shared_ptr<const SharedPlan> shared)
      : Work(shared->plan.num_units(), shared->plan.elements < kWorthThreads ? shared->plan.num_units() : 1, 1,
             scratch_of(kernels, args, shared->plan), 0),
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

SharedPlan::SharedPlan(const AttentionArgs& args)
    : plan(plan_attention(args)), args_(args), left_(new std::atomic<int32_t>[plan.merges.size()]) {
  for (size_t i = 0; i < plan.merges.size(); ++i) left_[i].store(plan.merges[i].chunks, std::memory_order_relaxed);
}

bool SharedPlan::fits(const AttentionArgs& args) const {
  return args.block_tables == args_.block_tables && args.query_start_loc == args_.query_start_loc &&
         args.seq_lens == args_.seq_lens && args.num_tokens == args_.num_tokens && args.num_rows == args_.num_rows &&
         args.num_heads == args_.num_heads && args.num_kv_heads == args_.num_kv_heads &&
         args.head_dim == args_.head_dim && args.block_size == args_.block_size &&
         args.num_blocks == args_.num_blocks && args.table_stride == args_.table_stride &&
         args.table_width == args_.table_width && args.sliding_window == args_.sliding_window &&
         args.threads == args_.threads;
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
