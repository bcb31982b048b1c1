// What the operations of api.h are as work for threads, once their arguments are checked.
#pragma once

#include <memory>

#include "api.h"
#include "attention.h"
#include "isa.h"
#include "work.h"

namespace quire {

// Operations that are to run one after the other.
class Operations {
 public:
  explicit Operations(const Context& context) : context_(context) {}

  // Checks the arguments, and copies them; where they are wrong nothing is added. Throws std::bad_alloc.
  Status add_paged_attention(const AttentionArgs& args);
  Status add_rms_norm(const NormArgs& args);
  Status add_layer_norm(const NormArgs& args);
  Status add_silu_and_mul(const SiluArgs& args);
  Status add_rotary(const RotaryArgs& args);
  Status add_quantize(const QuantizeArgs& args);
  Status add_product(const ProductArgs& args);
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
  void add_round(const Group& group, int64_t units, int64_t bytes, Give give, Take take);

  const Context& context_;
  Works works_;
  std::shared_ptr<const SharedPlan> plan_;
};

}  // namespace quire
