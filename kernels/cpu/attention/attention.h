// Attention of a batch as work for threads: units that can be done in any order, and merges of what several of them
// find.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

// Heads of a row whose context is decoded in several chunks. Whoever does the last one merges them all.
struct Merge {
  int32_t chunks;
  float* states;  // of these heads, in the first chunk
};

struct AttentionPlan {
  std::vector<Unit> prefills;  // those with the longest context first
  std::vector<Unit> decodes;   // units that are all of their row and heads
  std::vector<Unit> chunks;    // chunks[i] belongs to merges[merge_of[i]]
  std::vector<int32_t> merge_of;
  std::vector<Merge> merges;
  std::unique_ptr<float[]> states;
  int64_t elements = 0;  // of keys and values that are read, about

  int64_t num_units() const { return static_cast<int64_t>(prefills.size() + decodes.size() + chunks.size()); }
};

// Whether lengths and block ids fit the shapes.
Status check_rows(const AttentionArgs& args);

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
