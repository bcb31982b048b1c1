// How attention over a batch is cut into units that threads can do in any order.
#pragma once

#include <memory>
#include <vector>

#include "api.h"
#include "isa.h"

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

// Requires that check_rows is kOk. Throws std::bad_alloc.
AttentionPlan plan_attention(const AttentionArgs& args);

}  // namespace quire
