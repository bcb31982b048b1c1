// Groups of bfloat16 numbers in three quarters of their bytes, bit for bit the same numbers.
//
// The upper byte of a number is its sign and all but the last bit of its exponent, and numbers that belong together have few
// exponents. So a number is stored as its lower byte and the place of its upper one, 4 bits, in a table that some groups share.
// Those whose upper byte is not there, the exceptions, are kept elsewhere and put in afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Upper bytes in a table.
inline constexpr int64_t kShortPlaces = 16;

// Numbers 64 h + 32 i + 8 l + b, b below 8, are in byte 16 l + 8 i + b of half h, which is how vectors interleave bytes.
struct ShortGroup {
  static constexpr int64_t kNumbers = 128;

  uint8_t places[64];  // of the upper bytes; the second half's are in the higher bits
  uint8_t lower[2][64];
};
static_assert(sizeof(ShortGroup) == 192);

}  // namespace quire

// All instruction sets read what any of them packed, though not all pack so (products.py).
#if defined(QUIRE_ISA)
#include "byte_vector.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// A table of upper bytes.
inline ByteVector load_table(const uint8_t* upper) {
  return in_all_lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper)));
}

// A group as it was, with the table of its upper bytes.
inline void make_long(BF16* to, const ShortGroup& group, ByteVector table) {
  constexpr int64_t kHalf = ShortGroup::kNumbers / 2, kBytes = sizeof(ByteVector);
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
