// bfloat16 weights in three quarters of their bytes, bit for bit the same numbers.
//
// The upper byte of a number is its sign and all but the last bit of its exponent, and the numbers of a panel have few exponents:
// of those that are spread as a model's weights are, about one in ten thousand has an upper byte that is not among the 16 most
// frequent. So a number is stored as its lower byte and the place of its upper one, 4 bits, in a table of its panel. Those that
// are not there, the exceptions, are put in afterwards.
//
// A panel is its head, then the numbers of its blocks (pack_weight.cpp) in groups of 128. All exceptions follow the last panel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct ShortHead {
  static constexpr int64_t kPlaces = 16;

  uint8_t upper[kPlaces];
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

// Numbers 64 h + 32 i + 8 l + b, b below 8, are in byte 16 l + 8 i + b of half h, which is how vectors interleave bytes.
struct ShortGroup {
  static constexpr int64_t kNumbers = 128;

  uint8_t places[64];  // of the upper bytes; the second half's are in the higher bits
  uint8_t lower[2][64];
};
static_assert(sizeof(ShortGroup) == 192);

inline constexpr int64_t short_panel_bytes(int64_t numbers) {
  return sizeof(ShortHead) + numbers / ShortGroup::kNumbers * static_cast<int64_t>(sizeof(ShortGroup));
}

}  // namespace quire

// All instruction sets read what any of them packed, though not all pack weights so (products.py).
#if defined(QUIRE_ISA)
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

#if defined(__AVX512BW__)
using ByteVector = __m512i;
inline ByteVector load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, ByteVector x) { _mm512_storeu_si512(p, x); }
inline ByteVector in_all_lanes(__m128i x) { return _mm512_broadcast_i32x4(x); }
inline ByteVector upper_nibbles(ByteVector x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0f)); }
inline ByteVector lower_nibbles(ByteVector x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
inline ByteVector look_up(ByteVector table, ByteVector places) { return _mm512_shuffle_epi8(table, places); }
inline ByteVector first_pairs(ByteVector a, ByteVector b) { return _mm512_unpacklo_epi8(a, b); }
inline ByteVector last_pairs(ByteVector a, ByteVector b) { return _mm512_unpackhi_epi8(a, b); }
#else
using ByteVector = __m256i;
inline ByteVector load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bytes(void* p, ByteVector x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline ByteVector in_all_lanes(__m128i x) { return _mm256_broadcastsi128_si256(x); }
inline ByteVector upper_nibbles(ByteVector x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(0x0f)); }
inline ByteVector lower_nibbles(ByteVector x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
inline ByteVector look_up(ByteVector table, ByteVector places) { return _mm256_shuffle_epi8(table, places); }
inline ByteVector first_pairs(ByteVector a, ByteVector b) { return _mm256_unpacklo_epi8(a, b); }
inline ByteVector last_pairs(ByteVector a, ByteVector b) { return _mm256_unpackhi_epi8(a, b); }
#endif

inline ByteVector upper_bytes(const ShortHead& head) {
  return in_all_lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head.upper)));
}

// A group as it was, with the upper bytes of its panel.
inline void make_long(BF16* to, const ShortGroup& group, ByteVector upper_bytes) {
  constexpr int64_t kHalf = ShortGroup::kNumbers / 2, kBytes = sizeof(ByteVector);
  for (int64_t i = 0; i < kHalf; i += kBytes) {
    const ByteVector places = load_bytes(group.places + i);
    for (int half = 0; half < 2; ++half) {
      const ByteVector upper = look_up(upper_bytes, half == 0 ? lower_nibbles(places) : upper_nibbles(places));
      const ByteVector lower = load_bytes(group.lower[half] + i);
      store_bytes(to + half * kHalf + i / 2, first_pairs(lower, upper));
      store_bytes(to + half * kHalf + kHalf / 2 + i / 2, last_pairs(lower, upper));
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
#endif
