// Layers of experts (ExpertsArgs) as work for threads, and a router's choice of experts (ChooseArgs).
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

// The choice of tokens begin to end. `scratch` has choose_scratch(args) bytes.
void choose_experts(const ChooseArgs& args, int64_t begin, int64_t end, std::byte* scratch);
int64_t choose_scratch(const ChooseArgs& args);

// Adds the works of a layer: the tokens of one expert are multiplied together, and threads share each expert's panels.
// Which experts are chosen is read when the works run. Throws std::bad_alloc.
void add_experts_works(const IsaKernels& kernels, const ExpertsArgs& args, Works& works);

}  // namespace quire
