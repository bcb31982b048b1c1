// vec.h for AVX2 with FMA and F16C. Included only by vec.h.
#pragma once

namespace quire::QUIRE_ISA {

struct Vec {
  __m256 v;
};

inline constexpr int kWidth = 8;
// Sums that a kernel keeps in registers in addition to its operands.
inline constexpr int kSums = 8;
// Vectors side by side in a tile of a matrix product.
inline constexpr int kTileVectors = 2;

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec lane_numbers() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }

inline Vec widen(__m128i bf16) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16))}; }

// The first and the second elements of pairs of bfloat16.
inline Vec first_of_pairs(Vec x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.v), 16))}; }
inline Vec second_of_pairs(Vec x) {
  return {_mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}

inline Vec exclusive_or(Vec x, int32_t bits) {
  return {_mm256_xor_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(bits)))};
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BF16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const F16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline Vec load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

// There are no masked loads of 16 bits: the elements go through a buffer.
template <class T>
inline Vec load(const T* p, int n) {
  T buffer[kWidth] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

// kWidth whole numbers of 32 bits, or words of four int8 values.
struct IntVec {
  // Not what intrinsics take: sums would be stored after each of them.
  using Words = int32_t __attribute__((vector_size(32)));
  Words v;
};

inline __m256i bits_of(IntVec x) { return reinterpret_cast<__m256i>(x.v); }
inline IntVec whole(__m256i bits) { return {reinterpret_cast<IntVec::Words>(bits)}; }

inline IntVec load_int(const void* p) { return whole(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// E4M3 numbers, except NaN: halves of 2^8 times less. Subnormal floats would take the processor long.
inline Vec load_e4m3(const void* p) {
  const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  const __m128i sign = _mm_slli_epi16(_mm_srli_epi16(words, 7), 15);
  const __m128i halves = _mm_or_si128(sign, _mm_srli_epi16(_mm_slli_epi16(words, 9), 2));
  return {_mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f))};
}
inline IntVec load_bytes_as_int(const void* p) {
  return whole(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline IntVec set1_int(int32_t x) { return whole(_mm256_set1_epi32(x)); }
inline void store(int32_t* p, IntVec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits_of(x)); }
inline Vec to_floats(IntVec x) { return {_mm256_cvtepi32_ps(bits_of(x))}; }
inline Vec load(const int32_t* p) { return to_floats(load_int(p)); }
// Adds to each byte whose bit in a word of 64 is set, for the bytes of kWidth lanes from `lane` on.
inline IntVec add_where_set(IntVec to, const void* word, int64_t lane, int8_t addend) {
  int32_t bits;
  std::memcpy(&bits, static_cast<const char*>(word) + lane / 2, sizeof(bits));
  const __m256i byte_of =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
  return whole(_mm256_add_epi8(bits_of(to), _mm256_and_si256(is_set, _mm256_set1_epi8(addend))));
}
// The k-th byte of each word.
inline IntVec byte_of(IntVec words, int k) {
  const IntVec::Words of_words = {0, 4, 8, 12, 0, 4, 8, 12};
  return whole(_mm256_shuffle_epi8(bits_of(words), bits_of({of_words + (k + kNoUpperBytes)})));
}
// 8 bytes, in all lanes.
inline IntVec repeat8(const void* p) {
  int64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return whole(_mm256_set1_epi64x(bytes));
}
inline Vec as_floats(IntVec bits) { return {_mm256_castsi256_ps(bits_of(bits))}; }

// The lanes of `a`, then of `b`, with even and with odd numbers.
template <int kOdd>
inline IntVec every_other_lane(IntVec a, IntVec b) {
  const __m256 of_halves = _mm256_shuffle_ps(as_floats(a).v, as_floats(b).v, kOdd ? 0xdd : 0x88);
  return whole(_mm256_permute4x64_epi64(_mm256_castps_si256(of_halves), 0xd8));
}
inline IntVec even_lanes(IntVec a, IntVec b) { return every_other_lane<0>(a, b); }
inline IntVec odd_lanes(IntVec a, IntVec b) { return every_other_lane<1>(a, b); }
// Sums of lanes 2 i and 2 i + 1, of `a`, then of `b`.
inline IntVec sums_of_columns(IntVec a, IntVec b) { return {even_lanes(a, b).v + odd_lanes(a, b).v}; }

// 16 floats, by the lower 4 bits of each place.
struct FloatTable {
  explicit FloatTable(const float (&floats)[16])
      : first_(_mm256_loadu_ps(floats)), rest_(_mm256_loadu_ps(floats + 8)) {}
  Vec look_up(IntVec places) const {
    const __m256 is_rest = _mm256_castsi256_ps(_mm256_slli_epi32(bits_of(places), 28));
    return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(first_, bits_of(places)),
                             _mm256_permutevar8x32_ps(rest_, bits_of(places)), is_rest)};
  }

 private:
  __m256 first_, rest_;
};

// Each lane, and once more after it.
inline void store_twice(float* p, Vec x) {
  const __m256 low = _mm256_unpacklo_ps(x.v, x.v), high = _mm256_unpackhi_ps(x.v, x.v);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + kWidth, _mm256_permute2f128_ps(low, high, 0x31));
}

// Adds the products of the four int8 values of each word. The values of `b` are passed xor kInt8Offset.
inline constexpr int32_t kInt8Offset = 0;
inline __m256i even_int8(IntVec x) { return _mm256_srai_epi16(_mm256_slli_epi16(bits_of(x), 8), 8); }
inline __m256i odd_int8(IntVec x) { return _mm256_srai_epi16(bits_of(x), 8); }
inline IntVec add_int8_products(IntVec sum, IntVec a, IntVec b) {
  const __m256i even = _mm256_madd_epi16(even_int8(a), even_int8(b)), odd = _mm256_madd_epi16(odd_int8(a), odd_int8(b));
  return whole(_mm256_add_epi32(bits_of(sum), _mm256_add_epi32(even, odd)));
}

// Sums of products of the four bytes of words of codes with int8 values, except -128. Codes are unsigned, and kAtOnce
// words' products of pairs fit 16 bits; where kAtOnce is 0, codes are signed. The empty instructions fix the order of
// sums: the compiler chooses one for which it stores all products first.
template <int kAtOnce>
class CodeSums {
 public:
  // Adds the i-th products; i is a constant after unrolling.
  void add(int i, IntVec codes, IntVec x) {
    if constexpr (kAtOnce == 0)
      return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(bits_of(codes)), _mm256_sign_epi8(bits_of(x), bits_of(codes))));
    const __m256i products = _mm256_maddubs_epi16(bits_of(codes), bits_of(x));
    pairs_ = i % kMost == 0 ? products : _mm256_add_epi16(pairs_, products);
    asm("" : "+x"(pairs_));
    if (i % kMost == kMost - 1) widen(pairs_);
  }

  // After kCount products.
  template <int kCount>
  IntVec whole() {
    if constexpr (kCount % kMost != 0) widen(pairs_);
    return quire::QUIRE_ISA::whole(sums_);
  }

 private:
  static constexpr int kMost = kAtOnce > 0 ? kAtOnce : 1;

  void widen(__m256i pairs) {
    sums_ = _mm256_add_epi32(sums_, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(sums_));
  }

  __m256i pairs_, sums_ = _mm256_setzero_si256();
};

inline __m128i narrow_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // Rounding could carry a NaN into the sign.
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}

inline __m128i narrow_f16(Vec x) { return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(BF16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(x)); }
inline void store(F16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16(x)); }
// Whole numbers from -128 to 127.
inline void store(int8_t* p, Vec x) {
  const __m256i words = _mm256_cvtps_epi32(x.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

template <class T>
inline void store(T* p, Vec x, int n) {
  T buffer[kWidth];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n for whole n from -126 to 128.
inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

// `value`, but 0 where x is below the limit.
inline Vec zero_below(Vec value, Vec x, Vec limit) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), value.v)};
}

// Stores the lanes of both whose score is at least `low` and below `high`, and anything up to kWidth; returns how many.
inline int64_t store_between(float* scores, float* weights, Vec score, Vec weight, float low, float high) {
  unsigned kept = _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(score.v, _mm256_set1_ps(low), _CMP_GE_OQ),
                                                   _mm256_cmp_ps(score.v, _mm256_set1_ps(high), _CMP_LT_OQ)));
  alignas(32) float score_lanes[kWidth], weight_lanes[kWidth];
  _mm256_store_ps(score_lanes, score.v);
  _mm256_store_ps(weight_lanes, weight.v);
  int64_t count = 0;
  for (; kept != 0; kept &= kept - 1, ++count) {
    const int lane = __builtin_ctz(kept);
    scores[count] = score_lanes[lane];
    weights[count] = weight_lanes[lane];
  }
  return count;
}

inline __m128 fold(Vec x) { return _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1)); }

inline float first_lane(Vec x) { return _mm256_cvtss_f32(x.v); }
inline float reduce_add(Vec x) {
  __m128 sum = fold(x);
  sum = _mm_hadd_ps(sum, sum);
  return _mm_cvtss_f32(_mm_hadd_ps(sum, sum));
}

inline float reduce_max(Vec x) {
  __m128 largest = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
  return _mm_cvtss_f32(_mm_max_ss(largest, _mm_movehdup_ps(largest)));
}

// x in lanes first to last - 1, `other` elsewhere; any first and last.
inline Vec keep(Vec x, int first, int last, Vec other) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lanes);
  const __m256i inside = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lanes));
  return {_mm256_blendv_ps(other.v, x.v, _mm256_castsi256_ps(inside))};
}

// The sums of four vectors, one after the other.
inline void reduce_add4(const Vec x[4], float* sums) {
  const __m256 low = _mm256_unpacklo_ps(x[0].v, x[1].v) + _mm256_unpackhi_ps(x[0].v, x[1].v);
  const __m256 high = _mm256_unpacklo_ps(x[2].v, x[3].v) + _mm256_unpackhi_ps(x[2].v, x[3].v);
  const __m256d even = _mm256_unpacklo_pd(_mm256_castps_pd(low), _mm256_castps_pd(high));
  const __m256d odd = _mm256_unpackhi_pd(_mm256_castps_pd(low), _mm256_castps_pd(high));
  // Every four lanes hold a part of each of the four sums.
  _mm_storeu_ps(sums, fold({_mm256_castpd_ps(even) + _mm256_castpd_ps(odd)}));
}

// Line i becomes column i.
inline void transpose(Vec x[kWidth]) {
  __m256d t[8];
  __m256 u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_castps_pd(_mm256_unpacklo_ps(x[i].v, x[i + 1].v));
    t[i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(x[i].v, x[i + 1].v));
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(t[i], t[i + 2]));
    u[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(t[i], t[i + 2]));
    u[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(t[i + 1], t[i + 3]));
    u[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(t[i + 1], t[i + 3]));
  }
  for (int i = 0; i < 4; ++i) {
    x[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    x[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// A vector of bytes.
using ByteVector = __m256i;
inline ByteVector load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bytes(void* p, ByteVector x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline ByteVector in_all_lanes(__m128i x) { return _mm256_broadcastsi128_si256(x); }
inline ByteVector upper_nibbles(ByteVector x) {
  return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(0x0f));
}
inline ByteVector lower_nibbles(ByteVector x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
inline ByteVector look_up(ByteVector table, ByteVector places) { return _mm256_shuffle_epi8(table, places); }
inline ByteVector first_pairs(ByteVector a, ByteVector b) { return _mm256_unpacklo_epi8(a, b); }
inline ByteVector last_pairs(ByteVector a, ByteVector b) { return _mm256_unpackhi_epi8(a, b); }

}  // namespace quire::QUIRE_ISA
