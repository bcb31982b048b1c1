// vec.h for AVX-512. Included only by vec.h.
#pragma once

namespace quire::QUIRE_ISA {

struct Vec {
  __m512 v;
};

inline constexpr int kWidth = 16;
// Sums that a kernel keeps in registers in addition to its operands.
inline constexpr int kSums = 16;
// Vectors side by side in a tile of a matrix product.
inline constexpr int kTileVectors = 4;

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec lane_numbers() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

inline Vec widen(__m256i bf16) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16))}; }

// The first and the second elements of pairs of bfloat16.
inline Vec first_of_pairs(Vec x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), 16))}; }
inline Vec second_of_pairs(Vec x) {
  return {_mm512_and_ps(x.v, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

inline Vec exclusive_or(Vec x, int32_t bits) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(bits)))};
}

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const BF16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline Vec load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

inline Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline Vec load(const BF16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline Vec load(const F16* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))}; }

inline Vec load(const int8_t* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
}

// kWidth whole numbers of 32 bits, or words of four int8 values.
struct IntVec {
  // Not what intrinsics take: sums would be stored after each of them.
  using Words = int32_t __attribute__((vector_size(64)));
  Words v;
};

inline __m512i bits_of(IntVec x) { return reinterpret_cast<__m512i>(x.v); }
inline IntVec whole(__m512i bits) { return {reinterpret_cast<IntVec::Words>(bits)}; }

inline IntVec load_int(const void* p) { return whole(_mm512_loadu_si512(p)); }
// E4M3 numbers, except NaN: halves of 2^8 times less. Subnormal floats would take the processor long.
inline Vec load_e4m3(const void* p) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(words, 7), 15);
  const __m256i halves = _mm256_or_si256(sign, _mm256_srli_epi16(_mm256_slli_epi16(words, 9), 2));
  return {_mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f))};
}
inline IntVec load_bytes_as_int(const void* p) {
  return whole(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline IntVec set1_int(int32_t x) { return whole(_mm512_set1_epi32(x)); }
inline void store(int32_t* p, IntVec x) { _mm512_storeu_si512(p, bits_of(x)); }
inline Vec to_floats(IntVec x) { return {_mm512_cvtepi32_ps(bits_of(x))}; }
inline Vec load(const int32_t* p) { return to_floats(load_int(p)); }
// Adds to each byte whose bit in a word of 64 is set, for the bytes of kWidth lanes from `lane` on.
inline IntVec add_where_set(IntVec bytes, const void* word, int64_t, int8_t addend) {
  __mmask64 mask;
  std::memcpy(&mask, word, sizeof(mask));
  return whole(_mm512_mask_add_epi8(bits_of(bytes), mask, bits_of(bytes), _mm512_set1_epi8(addend)));
}
// The k-th byte of each word.
inline IntVec byte_of(IntVec words, int k) {
  const IntVec::Words of_words = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
  return whole(_mm512_shuffle_epi8(bits_of(words), bits_of({of_words + (k + kNoUpperBytes)})));
}
// 8 bytes, in all lanes.
inline IntVec repeat8(const void* p) {
  int64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return whole(_mm512_set1_epi64(bytes));
}
inline Vec as_floats(IntVec bits) { return {_mm512_castsi512_ps(bits_of(bits))}; }

// The lanes of `a`, then of `b`, with even and with odd numbers.
inline __m512i even_lane_numbers() {
  return _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline IntVec even_lanes(IntVec a, IntVec b) {
  return whole(_mm512_permutex2var_epi32(bits_of(a), even_lane_numbers(), bits_of(b)));
}
inline IntVec odd_lanes(IntVec a, IntVec b) {
  const __m512i odd = _mm512_add_epi32(even_lane_numbers(), _mm512_set1_epi32(1));
  return whole(_mm512_permutex2var_epi32(bits_of(a), odd, bits_of(b)));
}
// Adds the products of the four unsigned bytes of each word of `codes` with signed ones. kSmall: no code is above 127,
// so that sums of two products fit 16 bits.
template <bool kSmall>
inline IntVec add_code_products(IntVec sum, IntVec codes, IntVec x) {
#if defined(__AVX512VNNI__)
  return whole(_mm512_dpbusd_epi32(bits_of(sum), bits_of(codes), bits_of(x)));
#else
  if constexpr (kSmall) {
    const __m512i pairs = _mm512_maddubs_epi16(bits_of(codes), bits_of(x));
    return whole(_mm512_add_epi32(bits_of(sum), _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
  }
  const __m512i even = _mm512_and_si512(bits_of(codes), _mm512_set1_epi16(0xff)),
                odd = _mm512_srli_epi16(bits_of(codes), 8);
  const __m512i x_even = _mm512_srai_epi16(_mm512_slli_epi16(bits_of(x), 8), 8),
                x_odd = _mm512_srai_epi16(bits_of(x), 8);
  const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(even, x_even), _mm512_madd_epi16(odd, x_odd));
  return whole(_mm512_add_epi32(bits_of(sum), products));
#endif
}

// 16 floats, by the lower 4 bits of each place.
struct FloatTable {
  explicit FloatTable(const float (&floats)[16]) : floats_(_mm512_loadu_ps(floats)) {}
  Vec look_up(IntVec places) const { return {_mm512_permutexvar_ps(bits_of(places), floats_)}; }

 private:
  __m512 floats_;
};

// Each lane, and once more after it.
inline void store_twice(float* p, Vec x) {
  const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  _mm512_storeu_ps(p, _mm512_permutexvar_ps(first, x.v));
  _mm512_storeu_ps(p + kWidth, _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), x.v));
}

// Adds the products of the four int8 values of each word. The values of `b` are passed xor kInt8Offset.
#if defined(__AVX512VNNI__)
inline constexpr int32_t kInt8Offset =
    static_cast<int32_t>(0x80808080u);  // makes them unsigned, 128 more than they are
inline IntVec add_int8_products(IntVec sum, IntVec a, IntVec b) {
  return whole(_mm512_dpbusd_epi32(bits_of(sum), bits_of(b), bits_of(a)));
}
#else
inline constexpr int32_t kInt8Offset = 0;
inline __m512i even_int8(IntVec x) { return _mm512_srai_epi16(_mm512_slli_epi16(bits_of(x), 8), 8); }
inline __m512i odd_int8(IntVec x) { return _mm512_srai_epi16(bits_of(x), 8); }
inline IntVec add_int8_products(IntVec sum, IntVec a, IntVec b) {
  const __m512i even = _mm512_madd_epi16(even_int8(a), even_int8(b)), odd = _mm512_madd_epi16(odd_int8(a), odd_int8(b));
  return whole(_mm512_add_epi32(bits_of(sum), _mm512_add_epi32(even, odd)));
}
#endif

inline __m256i narrow_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // Rounding could carry a NaN into the sign.
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline __m256i narrow_f16(Vec x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(BF16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x)); }
inline void store(F16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x)); }

// Whole numbers from -128 to 127.
inline void store(int8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline void store(int8_t* p, Vec x, int n) {
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

inline void store(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline void store(BF16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x)); }
inline void store(F16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(x)); }

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n for whole n. Results that are no normal floats take the processor a hundred times longer.
inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

// `value`, but 0 where x is below the limit.
inline Vec zero_below(Vec value, Vec x, Vec limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
}

inline float first_lane(Vec x) { return _mm512_cvtss_f32(x.v); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x.v); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x.v); }

// x in lanes first to last - 1, `other` elsewhere; any first and last.
inline Vec keep(Vec x, int first, int last, Vec other) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 kept = _mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(first)) &
                         _mm512_cmplt_epi32_mask(lanes, _mm512_set1_epi32(last));
  return {_mm512_mask_blend_ps(kept, other.v, x.v)};
}

// Stores the lanes of both whose score is at least `low` and below `high`, and anything up to kWidth; returns how many.
inline int64_t store_between(float* scores, float* weights, Vec score, Vec weight, float low, float high) {
  const __mmask16 kept = _mm512_cmp_ps_mask(score.v, _mm512_set1_ps(low), _CMP_GE_OQ) &
                         _mm512_cmp_ps_mask(score.v, _mm512_set1_ps(high), _CMP_LT_OQ);
  if (kept == 0) return 0;
  // To a register first: some processors are slow at it in memory.
  _mm512_storeu_ps(scores, _mm512_maskz_compress_ps(kept, score.v));
  _mm512_storeu_ps(weights, _mm512_maskz_compress_ps(kept, weight.v));
  return __builtin_popcount(kept);
}

inline __m128 fold(Vec x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// The sums of four vectors, one after the other.
inline void reduce_add4(const Vec x[4], float* sums) {
  const __m512 low = _mm512_unpacklo_ps(x[0].v, x[1].v) + _mm512_unpackhi_ps(x[0].v, x[1].v);
  const __m512 high = _mm512_unpacklo_ps(x[2].v, x[3].v) + _mm512_unpackhi_ps(x[2].v, x[3].v);
  const __m512d even = _mm512_unpacklo_pd(_mm512_castps_pd(low), _mm512_castps_pd(high));
  const __m512d odd = _mm512_unpackhi_pd(_mm512_castps_pd(low), _mm512_castps_pd(high));
  // Every four lanes hold a part of each of the four sums.
  _mm_storeu_ps(sums, fold({_mm512_castpd_ps(even) + _mm512_castpd_ps(odd)}));
}

// Line i becomes column i.
inline void transpose(Vec x[kWidth]) {
  __m512d t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_castps_pd(_mm512_unpacklo_ps(x[i].v, x[i + 1].v));
    t[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(x[i].v, x[i + 1].v));
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_pd(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_pd(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_pd(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_pd(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = half; i < half + 4; ++i) {
      t[i] = _mm512_shuffle_f64x2(u[i], u[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f64x2(u[i], u[i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    x[i].v = _mm512_castpd_ps(_mm512_shuffle_f64x2(t[i], t[i + 8], 0x88));
    x[i + 8].v = _mm512_castpd_ps(_mm512_shuffle_f64x2(t[i], t[i + 8], 0xdd));
  }
}

// A vector of bytes.
using ByteVector = __m512i;
inline ByteVector load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, ByteVector x) { _mm512_storeu_si512(p, x); }
inline ByteVector in_all_lanes(__m128i x) { return _mm512_broadcast_i32x4(x); }
inline ByteVector upper_nibbles(ByteVector x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0f));
}
inline ByteVector lower_nibbles(ByteVector x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
inline ByteVector look_up(ByteVector table, ByteVector places) { return _mm512_shuffle_epi8(table, places); }
inline ByteVector first_pairs(ByteVector a, ByteVector b) { return _mm512_unpacklo_epi8(a, b); }
inline ByteVector last_pairs(ByteVector a, ByteVector b) { return _mm512_unpackhi_epi8(a, b); }

}  // namespace quire::QUIRE_ISA
