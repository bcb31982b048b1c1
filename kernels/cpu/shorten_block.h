// Makes blocks of a pool short, and long again (short_block.h). Included by rotary.cpp alone.
#pragma once

#include "short_block.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Calls function(number, numbers from there on) with as many numbers as a ByteVector holds.
template <class Function>
inline void for_words(const BF16* numbers, int64_t count, Function function) {
  constexpr int64_t kStep = sizeof(ByteVector) / sizeof(BF16);
  for (int64_t i = 0; i < count; i += kStep) function(i, load_bytes(numbers + i));
}

// The greatest upper byte below `end` without its sign, 0 where there is none.
inline int greatest_upper(const BF16* numbers, int64_t count, int end) {
  ByteVector most = fill_words(0);
  const ByteVector limit = fill_words(static_cast<int16_t>((end << 8) - 1));
  for_words(numbers, count, [&](int64_t, ByteVector words) {
    const ByteVector sizes = words & fill_words(0x7fff);
    most = greater_words(most, words_up_to(sizes, limit));
  });
  uint16_t lanes[sizeof(ByteVector) / sizeof(uint16_t)];
  store_bytes(lanes, most);
  uint16_t greatest = 0;
  for (const uint16_t lane : lanes) greatest = lane > greatest ? lane : greatest;
  return greatest >> 8;
}

// Writes down the exceptions to a table from `greatest` down, at most kMostExceptions. Returns how many there are.
inline int64_t find_exceptions(const BF16* numbers, int64_t count, int greatest, TileException* exceptions) {
  const int least = greatest < 7 ? 0 : greatest - 7;
  int64_t found = 0;
  for_words(numbers, count, [&](int64_t i, ByteVector words) {
    const ByteVector sizes = words & fill_words(0x7fff);
    uint32_t lanes = lanes_outside(sizes, static_cast<int16_t>(least << 8), static_cast<int16_t>(greatest << 8 | 0xff));
    for (; lanes != 0 && found < kMostExceptions; lanes &= lanes - 1, ++found) {
      const int64_t number = i + __builtin_ctz(lanes);
      exceptions[found] = {static_cast<uint16_t>(number), numbers[number].bits};
    }
    found += __builtin_popcount(lanes);
  });
  return found;
}

// How a tile is to be short.
struct Description {
  int greatest;  // upper byte of the table
  int64_t num_exceptions;
  TileException exceptions[kMostExceptions];
};

// The table begins with the greatest upper byte; or with a smaller one, if there are too many exceptions and a few numbers are far
// greater than all others. False where there is no room for all exceptions.
inline bool describe(Description& tile, const BF16* numbers, int64_t count) {
  constexpr int kTries = 4;
  tile.greatest = 0x80;
  for (int i = 0; i < kTries; ++i) {
    tile.greatest = greatest_upper(numbers, count, tile.greatest);
    tile.num_exceptions = find_exceptions(numbers, count, tile.greatest, tile.exceptions);
    if (tile.num_exceptions <= ShortTile::kExceptionsInHead + exceptions_behind(count)) return true;
  }
  return false;
}

inline void write_head(ShortTile& head, const Description& tile, TileException* behind) {
  for (int i = 0; i < kShortPlaces / 2; ++i) {
    head.upper[i] = static_cast<uint8_t>(tile.greatest < i ? 0 : tile.greatest - i);
    head.upper[i + kShortPlaces / 2] = head.upper[i] | 0x80;
  }
  std::memcpy(head.mark, &kShortMark, sizeof(head.mark));
  head.num_exceptions = tile.num_exceptions;
  for (int64_t i = 0; i < tile.num_exceptions; ++i)
    (i < ShortTile::kExceptionsInHead ? head.exceptions[i] : behind[i - ShortTile::kExceptionsInHead]) = tile.exceptions[i];
}

// Places in the table of numbers i / 2 on and i / 2 + 32 on, and their lower bytes.
inline ByteVector shorten_words(uint8_t* lower, const BF16* numbers, ByteVector greatest) {
  const ByteVector first = load_bytes(numbers), second = load_bytes(numbers + ShortGroup::kNumbers / 4);
  store_bytes(lower, pack_words(first & fill_words(0xff), second & fill_words(0xff)));
  const ByteVector upper = pack_words(upper_of_words(first), upper_of_words(second));
  const ByteVector below = less_bytes(greatest, upper & fill_bytes(0x7f));
  return lesser_bytes(below, fill_bytes(7)) | (upper_nibbles(upper) & fill_bytes(8));
}

// The numbers may lie where the group is to be, or behind.
inline void shorten_group(ShortGroup* to, const BF16* numbers, ByteVector greatest) {
  constexpr int64_t kHalf = ShortGroup::kNumbers / 2;
  ShortGroup group;
  for (int64_t i = 0; i < kHalf; i += sizeof(ByteVector)) {
    const ByteVector first = shorten_words(group.lower[0] + i, numbers + i / 2, greatest);
    const ByteVector second = shorten_words(group.lower[1] + i, numbers + kHalf + i / 2, greatest);
    store_bytes(group.places + i, first | nibbles_up(second));
  }
  *to = group;
}

// Makes a block's keys or values short, in place, unless they have too many exceptions. Each group ends up before the next one's
// numbers, and each tile before the next tile.
inline void shorten(BF16* block, int64_t heads, int64_t numbers) {
  Description tile;
  for (int64_t h = 0; h < heads; ++h)
    if (!describe(tile, block + h * numbers, numbers)) return;
  auto* to = reinterpret_cast<std::byte*>(block);
  for (int64_t h = 0; h < heads; ++h, to += short_tile_bytes(numbers)) {
    const BF16* from = block + h * numbers;
    describe(tile, from, numbers);
    const ByteVector greatest = fill_bytes(static_cast<int8_t>(tile.greatest));
    auto* groups = reinterpret_cast<ShortGroup*>(to + sizeof(ShortTile));
    for (int64_t i = 0; i < numbers / ShortGroup::kNumbers; ++i)
      shorten_group(groups + i, from + i * ShortGroup::kNumbers, greatest);
    // Last, since they are where numbers were.
    write_head(*reinterpret_cast<ShortTile*>(to), tile, reinterpret_cast<TileException*>(to + short_numbers_bytes(numbers)));
  }
}

// Makes them long again, in place; the last comes first, since each lies before where it belongs.
inline void lengthen(BF16* block, int64_t heads, int64_t numbers) {
  if (!is_short(block)) return;
  for (int64_t h = heads - 1; h >= 0; --h) {
    const std::byte* from = reinterpret_cast<const std::byte*>(block) + h * short_tile_bytes(numbers);
    const auto& head = *reinterpret_cast<const ShortTile*>(from);
    const ByteVector table = load_table(head.upper);
    TileException exceptions[kMostExceptions];
    int64_t num_exceptions = 0;
    for_exceptions(head, numbers, [&](TileException exception) { exceptions[num_exceptions++] = exception; });
    BF16* to = block + h * numbers;
    for (int64_t i = numbers / ShortGroup::kNumbers - 1; i >= 0; --i) {
      ShortGroup group;
      std::memcpy(&group, from + sizeof(ShortTile) + i * sizeof(group), sizeof(group));
      make_long(to + i * ShortGroup::kNumbers, group, table);
    }
    for (int64_t i = 0; i < num_exceptions; ++i) to[exceptions[i].number].bits = exceptions[i].bits;
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
