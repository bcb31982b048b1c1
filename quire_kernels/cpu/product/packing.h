// Helpers of pack_weight.cpp and pack_coded.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/api.h"
#include "runtime/isa.h"
#include "runtime/work.h"

namespace quire {

inline constexpr int64_t kColumnsOfTile = kPanel / 2;

// The row of the weight that a column of a panel holds; none if the column is padding.
inline std::optional<int64_t> row_of(const PackArgs& args, int64_t panel, int64_t column) {
  if (!args.gated) {
    const int64_t row = panel * kPanel + column;
    return row < args.out_features ? std::optional(row) : std::nullopt;
  }
  const int64_t half = args.out_features / 2, row = panel * kColumnsOfTile + column % kColumnsOfTile;
  if (row >= half) return std::nullopt;
  return column < kColumnsOfTile ? row : half + row;
}

// A thread writes, and so places, the panels that are its own when they are multiplied.
template <class Function>
void for_each_panel(const OpenMp& openmp, int64_t threads, int64_t panels, Function function) {
  std::vector<Shares::OfThread> of_threads(threads);
  Shares shares(of_threads);
  shares.assign(panels, 1);
  run_on_threads(openmp, threads, [&] {
    int64_t thread = threads > 1 && openmp.num_threads() > 1 ? openmp.thread_num() : 0, distance = 0;
    for (Units units; shares.take(thread, distance, 1, units);) function(units.begin);
  });
}

void pack_coded(const OpenMp& openmp, const PackArgs& args);

}  // namespace quire
