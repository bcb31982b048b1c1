// A vector of kWidth floats in the instruction set that this file is compiled for, and its operations for kernels.
//
// Loads and stores convert from and to the element types. Loads and stores with a count touch only `count` elements:
// the other lanes are 0. NaN goes through everything here but `max`, which may drop it.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <limits>

namespace quire {

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

// The control word of a byte shuffle that makes the upper three bytes of a word 0.
inline constexpr int32_t kNoUpperBytes = static_cast<int32_t>(0x80808000u);

}  // namespace quire

#if defined(__aarch64__)
#include "vec/vec_neon.h"
#elif defined(__AVX512F__)
#include "vec/vec_avx512.h"
#else
#include "vec/vec_avx2.h"
#endif

namespace quire::QUIRE_ISA {

// Caches, as the compiler counts them, nearest last. A line that no cache keeps is only in the first one, until it
// gives way: it displaces nothing from the others.
inline constexpr int kNoCache = 0, kSecondCache = 2, kFirstCache = 3;

// Starts to load a cache line before it is read.
template <int kCache>
inline void prefetch(const void* line) {
  __builtin_prefetch(line, 0, kCache);
}

// The cache that reads are prefetched into. More requests can be in flight to the second cache than to the first.
#if defined(__AMX_BF16__)
inline constexpr int kPrefetchCache = kFirstCache;
#else
inline constexpr int kPrefetchCache = kSecondCache;
#endif

// The same for data that is read soon, and once: 9% more a second on an AMD processor, for keys and values and for
// weights of one token. Not measured on others.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
inline constexpr int kOnceCache = kNoCache;
#else
inline constexpr int kOnceCache = kPrefetchCache;
#endif

#if !defined(__aarch64__)
// 16 bytes, in all lanes.
inline ByteVector repeat16(const uint8_t* p) {
  return in_all_lanes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Stores 16 values, the even places of each 8 first, and returns their sum.
inline int32_t store_evens_first(int8_t* to, const int8_t* x) {
  const __m128i evens_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(values, evens_first));
  // Eight sums of two, four of four, then one.
  __m128i sum = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), values), _mm_set1_epi16(1));
  sum = _mm_hadd_epi32(sum, sum);
  return _mm_cvtsi128_si32(_mm_hadd_epi32(sum, sum));
}
#endif

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline IntVec operator-(IntVec a, IntVec b) { return {a.v - b.v}; }

// 2 * kWidth elements, at once where the processor can.
template <class T>
inline void store_both(T* p, Vec first, Vec second) {
  store(p, first);
  store(p + kWidth, second);
}

#if defined(__AVX512BF16__)
inline void store_both(BF16* p, Vec first, Vec second) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v)));
}
#endif

// Calls function(index, lanes...) for all vectors of a line; the last one may have fewer lanes than kWidth.
template <class Function>
inline void for_vectors(int64_t n, Function function) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) function(i);
  if (i < n) function(i, static_cast<int>(n - i));
}

// e^x to the last bit or two; 0 where that is no normal float, infinity from about 88.4 on.
inline Vec exp(Vec x) {
  const Vec lowest = set1(-87.33f);
  // The order of operands matters: where one is NaN, the instruction gives the second.
  const Vec within = max(lowest, min(set1(89.0f), x));
  const Vec n = round(within * set1(1.44269504f));
  // ln 2 in two parts, so that x - n ln 2 is exact enough.
  const Vec r = fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0.693359375f), within));
  Vec p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return zero_below(scale_by_power(p, n), x, lowest);
}

// The same to 13 bits, for results that are rounded to 8.
inline Vec exp_to_bfloat16(Vec x) {
  const Vec lowest = set1(-87.33f);
  const Vec t = max(lowest, min(set1(89.0f), x)) * set1(1.44269504f), n = round(t), f = t - n;
  Vec p = fma(set1(0.05517149f), f, set1(0.24261094f));
  p = fma(p, f, set1(0.69326099f));
  p = fma(p, f, set1(0.99992808f));
  return zero_below(scale_by_power(p, n), x, lowest);
}

inline Vec tanh(Vec x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// ln(1 + e^x), to a few of the last bits of any result that is a normal float.
inline Vec softplus(Vec x) {
  const Vec y = exp(zero() - max(x, zero() - x));
  // ln(1 + y) = 2 artanh(s); s is at most 1/3.
  const Vec s = y / (y + set1(2.0f)), squared = s * s;
  Vec p = fma(squared, set1(2.0f / 15), set1(2.0f / 13));
  p = fma(p, squared, set1(2.0f / 11));
  p = fma(p, squared, set1(2.0f / 9));
  p = fma(p, squared, set1(2.0f / 7));
  p = fma(p, squared, set1(2.0f / 5));
  p = fma(p, squared, set1(2.0f / 3));
  p = fma(p, squared, set1(2.0f));
  return fma(p, s, max(zero(), x));
}

// x times the normal distribution's share below it, to 1e-7 |x|: the complement of the error function by the rational
// function 7.1.26 of Abramowitz and Stegun's handbook.
inline Vec gelu(Vec x) {
  const Vec size = max(zero() - x, x), t = set1(1.0f) / fma(size, set1(0.3275911f * 0.70710678f), set1(1.0f));
  Vec p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  return fnma(size, set1(0.5f) * p * t * exp(x * x * set1(-0.5f)), max(zero(), x));
}

inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(zero() - x)); }

// Rounding to int8 as quire_kernels/int8.py does it, and lines of a pool of int8: the values of one token and head,
// padded, then their scale, a float.
inline constexpr float kMaxInt8 = 127.0f;

inline float scale_of(const int8_t* line, int64_t line_bytes) {
  float scale;
  std::memcpy(&scale, line + line_bytes - sizeof(scale), sizeof(scale));
  return scale;
}

template <class T>
inline void dequantize_line(T* to, const int8_t* line, int64_t head_dim, int64_t line_bytes) {
  const Vec scale = set1(scale_of(line, line_bytes));
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(line + d) * scale);
  if (d < head_dim)
    store(to + d, load(line + d, static_cast<int>(head_dim - d)) * scale, static_cast<int>(head_dim - d));
}

// Rounds n numbers and returns their scale. Where it is 0, or NaN because a number is not finite, nothing is written.
template <class T>
inline float round_to_int8(int8_t* values, const T* from, int64_t n) {
  Vec largest = zero(), rest = zero();
  auto scan = [&](int64_t d, auto... lanes) {
    const Vec x = load(from + d, lanes...);
    largest = max(largest, max(x, zero() - x));
    rest = rest + (x - x);  // NaN where x is not finite
  };
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) scan(d);
  if (d < n) scan(d, static_cast<int>(n - d));
  if (reduce_add(rest) != 0.0f) return std::numeric_limits<float>::quiet_NaN();
  const float scale = reduce_max(largest) / kMaxInt8;
  if (scale == 0.0f) return scale;
  const Vec limit = set1(kMaxInt8);
  auto round_lanes = [&](int64_t at, auto... lanes) {
    const Vec value = round(load(from + at, lanes...) / set1(scale));
    store(values + at, max(zero() - limit, min(limit, value)), lanes...);
  };
  for (d = 0; d + kWidth <= n; d += kWidth) round_lanes(d);
  if (d < n) round_lanes(d, static_cast<int>(n - d));
  return scale;
}

// Writes a line of a pool. One that is not finite is not finite when it is read.
template <class T>
inline void quantize_line(int8_t* line, const T* from, int64_t head_dim, int64_t line_bytes) {
  std::memset(line, 0, line_bytes);
  const float scale = round_to_int8(line, from, head_dim);
  std::memcpy(line + line_bytes - sizeof(scale), &scale, sizeof(scale));
}

}  // namespace quire::QUIRE_ISA
