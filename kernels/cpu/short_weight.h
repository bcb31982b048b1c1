// bfloat16 weights in three quarters of their bytes (short_numbers.h): of numbers that are spread as a model's weights are, about
// one in ten thousand has an upper byte that is not among the 16 most frequent of its panel.
//
// A panel is its head, then the numbers of its blocks (pack_weight.cpp) in groups of 128. All exceptions follow the last panel.
#pragma once

#include "short_numbers.h"

namespace quire {

struct ShortHead {
  uint8_t upper[kShortPlaces];
  int64_t first_exception;  // of the panel, among all
  int64_t num_exceptions;
  uint8_t unused[32];
};
static_assert(sizeof(ShortHead) == 64);

struct ShortException {
  uint32_t number;  // within its panel; they are in order
  uint16_t bits;
  uint16_t unused;
};
static_assert(sizeof(ShortException) == 8);

inline constexpr int64_t short_panel_bytes(int64_t numbers) {
  return sizeof(ShortHead) + numbers / ShortGroup::kNumbers * static_cast<int64_t>(sizeof(ShortGroup));
}

}  // namespace quire
