// Attention of a batch as work for threads: units that can run in any order, and merges of partial results.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

// Heads of rows whose context is decoded in several chunks. The thread that decodes the last chunk merges them all.
struct Merge {
  int32_t chunks;
  float* states;  // of these heads, in the first chunk
};

struct AttentionPlan {
  std::vector<Unit> prefills;  // in descending order of context length
  std::vector<Unit> decodes;   // units that cover the whole context of their rows and heads
  std::vector<Unit> chunks;    // chunks[i] belongs to merges[merge_of[i]]
  std::vector<int32_t> merge_of;
  std::vector<Merge> merges;
  std::unique_ptr<float[]> states;
  int32_t max_decoded = 1;  // rows of a unit that decodes
  int64_t elements = 0;     // of keys and values that are multiplied, approximately

  int64_t num_units() const { return static_cast<int64_t>(prefills.size() + decodes.size() + chunks.size()); }
};

// Whether lengths and block ids fit the shapes.
Status check_rows(const AttentionArgs& args);

// The division of attention into units. All layers of a model share it: they differ only in their tensors.
class SharedPlan {
 public:
  // Requires that check_rows is kOk. Throws std::bad_alloc.
  explicit SharedPlan(const AttentionArgs& args);

  bool fits(const AttentionArgs& args) const;

  const AttentionPlan plan;

  // To be called after each chunk of a merge. Returns whether it was the last one, and then resets the count.
  bool is_last_chunk(int32_t merge) const;

 private:
  const AttentionArgs args_;
  const std::unique_ptr<std::atomic<int32_t>[]> left_;
};

// Throws std::bad_alloc.
std::unique_ptr<Work> attention_work(const IsaKernels& kernels, const AttentionArgs& args,
                                     std::shared_ptr<const SharedPlan> plan);

}  // namespace quire
