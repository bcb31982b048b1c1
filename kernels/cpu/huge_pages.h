// Pages of 2 MB for weights.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace quire {

// Asks for pages of 2 MB while none is touched yet: a product jumps between threads' panels, and a page each 4 kB costs.
inline void want_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(kHuge - 1);
  // Where the system refuses, small pages do.
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

}  // namespace quire
