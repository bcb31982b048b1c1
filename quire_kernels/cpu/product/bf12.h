// Groups of bfloat16 numbers, compressed without loss to 12 bits a number.
//
// The upper byte of a number is its sign and all but the last bit of its exponent, and neighbouring numbers have few
// exponents. So a number is stored as its lower byte and a 4-bit index of its upper byte in a table that some groups
// share. Numbers whose upper byte is not in the table, the exceptions, are stored elsewhere and put in afterwards.
//
// A panel of a weight is its head, then the numbers of its blocks (pack_weight.cpp) in groups of 128. All exceptions
// follow the last panel. About one in ten thousand of a model's weights is an exception.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Upper bytes in a table.
inline constexpr int64_t kBf12TableSize = 16;

// Numbers 64 h + 32 i + 8 l + b, b below 8, are in byte 16 l + 8 i + b of half h, which is how vectors interleave
// bytes.
struct Bf12Group {
  static constexpr int64_t kNumbers = 128;

  uint8_t places[64];  // indices of the upper bytes; the second half's are in the higher bits
  uint8_t lower[2][64];
};
static_assert(sizeof(Bf12Group) == 192);

struct Bf12Head {
  uint8_t upper[kBf12TableSize];
  int64_t first_exception;  // of the panel, among all
  int64_t num_exceptions;
  uint8_t unused[32];
};
static_assert(sizeof(Bf12Head) == 64);

struct Bf12Exception {
  uint32_t number;  // within its panel; they are in order
  uint16_t bits;
  uint16_t unused;
};
static_assert(sizeof(Bf12Exception) == 8);

inline constexpr int64_t bf12_panel_bytes(int64_t numbers) {
  return sizeof(Bf12Head) + numbers / Bf12Group::kNumbers * static_cast<int64_t>(sizeof(Bf12Group));
}

}  // namespace quire

// All instruction sets read this format, whichever of them packed the weight; not all pack it (bindings.py).
#if defined(QUIRE_ISA)
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// A table of upper bytes.
inline ByteVector load_table(const uint8_t* upper) { return repeat16(upper); }

// The bfloat16 numbers of a group; `table` holds its upper bytes.
inline void expand_group(BF16* to, const Bf12Group& group, ByteVector table) {
  constexpr int64_t kHalf = Bf12Group::kNumbers / 2, kBytes = sizeof(ByteVector);
  for (int64_t i = 0; i < kHalf; i += kBytes) {
    const ByteVector places = load_bytes(group.places + i);
    for (int half = 0; half < 2; ++half) {
      const ByteVector upper = look_up(table, half == 0 ? lower_nibbles(places) : upper_nibbles(places));
      const ByteVector lower = load_bytes(group.lower[half] + i);
      store_bytes(to + half * kHalf + i / 2, first_pairs(lower, upper));
      store_bytes(to + half * kHalf + kHalf / 2 + i / 2, last_pairs(lower, upper));
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
#endif
