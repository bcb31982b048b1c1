#pragma once

#include "api.h"
#include "isa.h"

namespace quire {

// Throws std::bad_alloc.
Status paged_attention(const Context& context, const AttentionArgs& args);

}  // namespace quire
