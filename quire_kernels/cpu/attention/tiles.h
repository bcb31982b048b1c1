// Shared by prefill and the attention of texts: tiles of keys and values, packed as matmul.h multiplies them.
#pragma once

#include "attention/context.h"
#include "product/matmul.h"

namespace quire::QUIRE_ISA {

// Keys and values of a span in the layout that matmul.h multiplies from. Tokens that are not there are zeros.

// kWidth words of one token, from word `at` on.
template <class T>
inline Vec load_words(const T* token, int64_t at, int64_t head_dim) {
  const int64_t left = head_dim - at;
  return left >= kWidth ? load(token + at) : left <= 0 ? zero() : load(token + at, static_cast<int>(left));
}

#if defined(__AVX512BF16__)
template <>
inline Vec load_words(const BF16* token, int64_t at, int64_t head_dim) {
  const int64_t left = head_dim - 2 * at;
  const __mmask32 lanes = left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1;
  return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, token + 2 * at))};
}
#endif

// packed [words of a head, columns]: column n holds token n. The number of columns is a multiple of kWidth.
template <class T>
inline void pack_keys(Matrix packed, const Span<T, kKeyTile>& tokens, int64_t columns, int64_t head_dim) {
  const int64_t words = (head_dim + Words<T>::kPair - 1) / Words<T>::kPair;
  for (int64_t n = 0; n < columns; n += kWidth) {
    for (int64_t at = 0; at < words; at += kWidth) {
      Vec lines[kWidth];
      for (int i = 0; i < kWidth; ++i)
        lines[i] = n + i < tokens.count ? load_words(tokens.lines[n + i], at, head_dim) : zero();
      transpose(lines);
      for (int i = 0; i < kWidth; ++i) store(packed.line(at + i) + n, lines[i]);
    }
  }
}

// kWidth words of line `n` of the packed values, in dimensions d to d + kWidth - 1.
template <class T>
inline Vec load_values(const Span<T, kKeyTile>& tokens, int64_t n, int64_t d, int lanes) {
  if (n >= tokens.count) return zero();
  const T* value = tokens.lines[n] + d;
  return lanes == kWidth ? load(value) : load(value, lanes);
}

template <class T>
inline Vec value_words(const Span<T, kKeyTile>& tokens, int64_t n, int64_t d, int lanes) {
  if constexpr (Words<T>::kPair == 1) {
    return load_values(tokens, n, d, lanes);
#if defined(__AVX512BF16__)
  } else {
    const __m512i even = _mm512_castps_si512(load_values(tokens, 2 * n, d, lanes).v);
    const __m512i odd = _mm512_castps_si512(load_values(tokens, 2 * n + 1, d, lanes).v);
    return {_mm512_castsi512_ps(_mm512_or_si512(odd, _mm512_srli_epi32(even, 16)))};
#endif
  }
}

// packed [words of `lines` tokens, D padded].
template <class T>
inline void pack_values(Matrix packed, const Span<T, kKeyTile>& tokens, int64_t lines, int64_t head_dim) {
  for (int64_t n = 0; n < lines / Words<T>::kPair; ++n) {
    for (int64_t d = 0; d < head_dim; d += kWidth) {
      const int lanes = static_cast<int>(head_dim - d < kWidth ? head_dim - d : kWidth);
      store(packed.line(n) + d, value_words(tokens, n, d, lanes));
    }
  }
}

}  // namespace quire::QUIRE_ISA
