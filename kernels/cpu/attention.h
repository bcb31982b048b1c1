// Attention of a batch as work for threads: units, and merges of what several of them find.
#pragma once

#include <atomic>
#include <memory>

#include "api.h"
#include "isa.h"
#include "plan.h"
#include "work.h"

namespace quire {

// How attention is cut into units, for all layers of a model: they differ in their tensors alone.
class SharedPlan {
 public:
  // Requires that check_rows is kOk. Throws std::bad_alloc.
  explicit SharedPlan(const AttentionArgs& args);

  bool fits(const AttentionArgs& args) const;

  const AttentionPlan plan;

  // Whether this was the last chunk of the merge that was left. If so, all of them count as left again.
  bool is_last_chunk(int32_t merge) const;

 private:
  const AttentionArgs args_;
  const std::unique_ptr<std::atomic<int32_t>[]> left_;
};

// Throws std::bad_alloc.
std::unique_ptr<Work> attention_work(const IsaKernels& kernels, const AttentionArgs& args,
                                     std::shared_ptr<const SharedPlan> plan);

}  // namespace quire
