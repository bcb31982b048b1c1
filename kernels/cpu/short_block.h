// Blocks of a pool of bfloat16 in three quarters of their bytes (short_numbers.h): what a decode reads of memory is keys and values,
// and those of full blocks do not change.
//
// The keys of a block, or its values, are short or they are not. If so, the tiles of all heads follow each other from the start of
// the block's memory on, each a head, its groups, and exceptions that the head has no room for. What is left of the memory is not
// read: a processor that fetches ahead by itself would fetch gaps between the tiles too. The table of a tile has the greatest
// exponents of its numbers; a block of which a tile would have too many exceptions stays as it was.
//
// Who writes to a block makes it long first, but for its first token: that one overwrites the mark.
#pragma once

#include "short_numbers.h"

namespace quire {

struct TileException {
  uint16_t number;  // of the tile
  uint16_t bits;
};

struct ShortTile {
  static constexpr int64_t kExceptionsInHead = 8;

  uint8_t upper[kShortPlaces];
  uint16_t mark[4];
  int64_t num_exceptions;
  TileException exceptions[kExceptionsInHead];
};
static_assert(sizeof(ShortTile) == 64);

// NaNs that no arithmetic makes side by side, where numbers of the first token would be.
inline constexpr uint64_t kShortMark = 0xffb57f9a'7fd3ffe9;

namespace {

inline const ShortGroup* groups_of(const ShortTile& tile) { return reinterpret_cast<const ShortGroup*>(&tile + 1); }

// Exceptions of a tile beyond those in its head: a cache line of them for each 1,024 numbers but the first, three at most.
constexpr int64_t exceptions_behind(int64_t numbers) {
  const int64_t thousands = numbers / 1024;
  return 16 * (thousands > 4 ? 3 : thousands > 1 ? thousands - 1 : 0);
}
constexpr int64_t kMostExceptions = ShortTile::kExceptionsInHead + exceptions_behind(1 << 16);

// Of a tile's head and groups.
constexpr int64_t short_numbers_bytes(int64_t numbers) {
  return sizeof(ShortTile) + numbers / ShortGroup::kNumbers * static_cast<int64_t>(sizeof(ShortGroup));
}

constexpr int64_t short_tile_bytes(int64_t numbers) {
  return short_numbers_bytes(numbers) + exceptions_behind(numbers) * static_cast<int64_t>(sizeof(TileException));
}

inline bool is_short(const void* block) {
  uint64_t mark;
  __builtin_memcpy(&mark, static_cast<const ShortTile*>(block)->mark, sizeof(mark));
  return mark == kShortMark;
}

}  // namespace
}  // namespace quire

#if defined(QUIRE_ISA)
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Calls function(exception) for all exceptions of a tile of so many numbers.
template <class Function>
inline void for_exceptions(const ShortTile& tile, int64_t numbers, Function function) {
  const auto* behind =
      reinterpret_cast<const TileException*>(reinterpret_cast<const std::byte*>(&tile) + short_numbers_bytes(numbers));
  for (int64_t i = 0; i < tile.num_exceptions; ++i)
    function(i < ShortTile::kExceptionsInHead ? tile.exceptions[i] : behind[i - ShortTile::kExceptionsInHead]);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
#endif
