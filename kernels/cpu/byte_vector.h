// A vector of bytes, or of words of 16 bits, in the instruction set that this file is compiled for. & and | are its own.
#pragma once

#include <immintrin.h>

#include <cstdint>

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
inline ByteVector fill_bytes(int8_t x) { return _mm512_set1_epi8(x); }
inline ByteVector fill_words(int16_t x) { return _mm512_set1_epi16(x); }
inline ByteVector lesser_bytes(ByteVector a, ByteVector b) { return _mm512_min_epu8(a, b); }
inline ByteVector less_bytes(ByteVector a, ByteVector b) { return _mm512_subs_epu8(a, b); }
inline ByteVector greater_words(ByteVector a, ByteVector b) { return _mm512_max_epi16(a, b); }
inline ByteVector words_up_to(ByteVector x, ByteVector limit) { return _mm512_maskz_mov_epi16(_mm512_cmple_epi16_mask(x, limit), x); }
inline ByteVector upper_of_words(ByteVector x) { return _mm512_srli_epi16(x, 8); }
inline ByteVector nibbles_up(ByteVector x) { return _mm512_slli_epi16(x, 4); }
inline ByteVector pack_words(ByteVector a, ByteVector b) { return _mm512_packus_epi16(a, b); }
inline uint32_t lanes_outside(ByteVector words, int16_t least, int16_t most) {
  return _mm512_cmplt_epi16_mask(words, fill_words(least)) | _mm512_cmpgt_epi16_mask(words, fill_words(most));
}
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
inline ByteVector fill_bytes(int8_t x) { return _mm256_set1_epi8(x); }
inline ByteVector fill_words(int16_t x) { return _mm256_set1_epi16(x); }
inline ByteVector lesser_bytes(ByteVector a, ByteVector b) { return _mm256_min_epu8(a, b); }
inline ByteVector less_bytes(ByteVector a, ByteVector b) { return _mm256_subs_epu8(a, b); }
inline ByteVector greater_words(ByteVector a, ByteVector b) { return _mm256_max_epi16(a, b); }
inline ByteVector words_up_to(ByteVector x, ByteVector limit) { return _mm256_andnot_si256(_mm256_cmpgt_epi16(x, limit), x); }
inline ByteVector upper_of_words(ByteVector x) { return _mm256_srli_epi16(x, 8); }
inline ByteVector nibbles_up(ByteVector x) { return _mm256_slli_epi16(x, 4); }
inline ByteVector pack_words(ByteVector a, ByteVector b) { return _mm256_packus_epi16(a, b); }
inline uint32_t lanes_outside(ByteVector words, int16_t least, int16_t most) {
  const ByteVector outside = _mm256_cmpgt_epi16(fill_words(least), words) | _mm256_cmpgt_epi16(words, fill_words(most));
  return _mm_movemask_epi8(_mm_packs_epi16(_mm256_castsi256_si128(outside), _mm256_extracti128_si256(outside, 1)));
}
#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
