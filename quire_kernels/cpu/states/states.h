// Operations on states of a fixed size per sequence, as work for threads.
#pragma once

#include <memory>
#include <vector>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

// The rows of a batch. All layers of a model share them.
class StatePlan {
 public:
  // Requires that check is kOk. Throws std::bad_alloc.
  StatePlan(const StatePages& pages, int64_t num_tokens);

  static Status check(const StatePages& pages, int64_t num_tokens);
  bool fits(const StatePages& pages, int64_t num_tokens) const;

  std::vector<StateRow> rows;  // that have tokens, the longest first

 private:
  const StatePages pages_;
  const int64_t num_tokens_;
};

class StatePlans {
 public:
  // Check the arguments and copy them. Throw std::bad_alloc.
  Status add_recurrence(const IsaKernels& kernels, const RecurrenceArgs& args, Works& works);
  Status add_conv(const IsaKernels& kernels, const ConvArgs& args, Works& works);
  Status add_scan(const IsaKernels& kernels, const ScanArgs& args, Works& works);

 private:
  Status find(const StatePages& pages, int64_t num_tokens, std::shared_ptr<const StatePlan>& plan);

  std::vector<std::shared_ptr<const StatePlan>> plans_;
};

}  // namespace quire
