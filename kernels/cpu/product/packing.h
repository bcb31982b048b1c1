// What packing weights (pack_weight.cpp, pack_coded.cpp) takes.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

inline constexpr int64_t kColumnsOfTile = kPanel / 2;

// Requests pages of 2 MB before any is touched: threads read panels that are far apart, and small pages cost lookups.
inline void advise_huge_pages(void* memory, int64_t bytes) {
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) & ~(kHuge - 1);
  // If the system refuses, small pages are used.
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

// The row of the weight that a column of a panel holds; none where the column is padding.
inline std::optional<int64_t> row_of(const PackArgs& args, int64_t panel, int64_t column) {
  if (!args.gated) {
    const int64_t row = panel * kPanel + column;
    return row < args.out_features ? std::optional(row) : std::nullopt;
  }
  const int64_t half = args.out_features / 2, row = panel * kColumnsOfTile + column % kColumnsOfTile;
  if (row >= half) return std::nullopt;
  return column < kColumnsOfTile ? row : half + row;
}

template <class Function>
void for_each_panel(const OpenMp& openmp, int64_t threads, int64_t panels, Function function) {
  std::atomic<int64_t> next = 0;
  run_on_threads(openmp, threads, [&] {
    for (int64_t panel; (panel = next.fetch_add(1, std::memory_order_relaxed)) < panels;) function(panel);
  });
}

void pack_coded(const OpenMp& openmp, const PackArgs& args);

}  // namespace quire
