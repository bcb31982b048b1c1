// A vector of kWidth floats in the instruction set that this file is compiled for, and what kernels need of it.
//
// Loads and stores convert from and to the element types. Those with a count touch only so many elements: the
// other lanes are 0. NaN goes through everything here but `max`, which may drop it.
#pragma once

#include <immintrin.h>

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

}  // namespace quire

#if defined(__AVX512F__)
#include "vec/vec_avx512.h"
#else
#include "vec/vec_avx2.h"
#endif

namespace quire::QUIRE_ISA {

// Caches, as the compiler counts them, nearest last.
inline constexpr int kSecondCache = 2, kFirstCache = 3;

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

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }

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

inline Vec tanh(Vec x) { return set1(1.0f) - set1(2.0f) / (exp(x + x) + set1(1.0f)); }

inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(zero() - x)); }

}  // namespace quire::QUIRE_ISA
