// vec.h for NEON: a vector is two registers of 128 bits, so its lanes, layouts and sums are in the order of AVX2.
// Included only by vec.h.
#pragma once

namespace quire::QUIRE_ISA {

// Two registers. Operators and functions work on both; scalars are the same for both.
template <class T>
struct Two {
  T low, high;

  friend Two operator+(Two a, Two b) { return {a.low + b.low, a.high + b.high}; }
  friend Two operator-(Two a, Two b) { return {a.low - b.low, a.high - b.high}; }
  friend Two operator*(Two a, Two b) { return {a.low * b.low, a.high * b.high}; }
  friend Two operator/(Two a, Two b) { return {a.low / b.low, a.high / b.high}; }
  friend Two operator&(Two a, uint32_t bits) {
    const auto b = static_cast<int32_t>(bits);
    return {a.low & b, a.high & b};
  }
  friend Two operator^(Two a, int32_t b) { return {a.low ^ b, a.high ^ b}; }
  friend Two operator<<(Two a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Two operator>>(Two a, int bits) { return {a.low >> bits, a.high >> bits}; }
};

template <class Function, class... T>
inline auto each(Function function, Two<T>... x) {
  return Two<decltype(function(x.low...))>{function(x.low...), function(x.high...)};
}

struct Vec {
  Two<float32x4_t> v;
};

// kWidth whole numbers of 32 bits, or words of four int8 values.
struct IntVec {
  Two<int32x4_t> v;
};

inline constexpr int kWidth = 8;
// Sums that a kernel keeps in registers in addition to its operands.
inline constexpr int kSums = 8;
// Vectors side by side in a tile of a matrix product.
inline constexpr int kTileVectors = 2;

inline Vec as_floats(IntVec x) { return {each(vreinterpretq_f32_s32, x.v)}; }
inline IntVec as_ints(Vec x) { return {each(vreinterpretq_s32_f32, x.v)}; }

inline Vec set1(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline Vec zero() { return set1(0.0f); }
inline Vec lane_numbers() { return {{float32x4_t{0, 1, 2, 3}, float32x4_t{4, 5, 6, 7}}}; }
inline IntVec set1_int(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x)}}; }

// The first and the second elements of pairs of bfloat16.
inline Vec first_of_pairs(Vec x) { return as_floats({as_ints(x).v << 16}); }
inline Vec second_of_pairs(Vec x) { return as_floats({as_ints(x).v & 0xffff0000u}); }

inline Vec exclusive_or(Vec x, int32_t bits) { return as_floats({as_ints(x).v ^ bits}); }

inline Two<int32x4_t> widen(uint16x8_t x) {
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))), vreinterpretq_s32_u32(vmovl_high_u16(x))};
}
inline Vec widen_f16(uint16x8_t halves) {
  const float16x8_t x = vreinterpretq_f16_u16(halves);
  return {{vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)}};
}

inline uint16x8_t load_words(const void* p) { return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline Vec load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
inline Vec load(const BF16* p) { return as_floats({widen(load_words(p)) << 16}); }
inline Vec load(const F16* p) { return widen_f16(load_words(p)); }

inline IntVec load_int(const void* p) {
  const auto* bytes = static_cast<const int8_t*>(p);
  return {{vreinterpretq_s32_s8(vld1q_s8(bytes)), vreinterpretq_s32_s8(vld1q_s8(bytes + 16))}};
}
inline Vec to_floats(IntVec x) { return {each(vcvtq_f32_s32, x.v)}; }
inline IntVec load_bytes_as_int(const void* p) { return {widen(vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p))))}; }
inline Vec load(const int8_t* p) { return to_floats({load_bytes_as_int(p).v << 24 >> 24}); }
inline Vec load(const int32_t* p) { return to_floats(load_int(p)); }

// There are no masked loads: the elements go through a buffer.
template <class T>
inline Vec load(const T* p, int n) {
  T buffer[kWidth] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

// E4M3 numbers, except NaN: halves of 2^8 times less.
inline Vec load_e4m3(const void* p) {
  const uint16x8_t words = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p)));
  return {widen_f16(words >> 7 << 15 | words << 9 >> 2).v * set1(256.0f).v};
}

inline void store(int32_t* p, IntVec x) {
  vst1q_s32(p, x.v.low);
  vst1q_s32(p + 4, x.v.high);
}

// Adds to each byte whose bit in a word of 64 is set, for the bytes of kWidth lanes from `lane` on.
inline IntVec add_where_set(IntVec to, const void* word, int64_t lane, int8_t addend) {
  const auto* bits = static_cast<const uint8_t*>(word) + lane / 2;
  const uint8x16_t bit_of = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
  auto added = [&](int32x4_t x, const uint8_t* of_half) {
    const uint8x16_t is_set = vtstq_u8(vcombine_u8(vdup_n_u8(of_half[0]), vdup_n_u8(of_half[1])), bit_of);
    return vreinterpretq_s32_u8(vreinterpretq_u8_s32(x) + (is_set & static_cast<uint8_t>(addend)));
  };
  return {{added(to.v.low, bits), added(to.v.high, bits + 2)}};
}
// The k-th byte of each word.
inline IntVec byte_of(IntVec words, int k) { return {words.v >> 8 * k & 0xffu}; }
// 8 bytes, in all lanes.
inline IntVec repeat8(const void* p) {
  int64_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  const int32x4_t both = vreinterpretq_s32_s64(vdupq_n_s64(bytes));
  return {{both, both}};
}

// The lanes of `a`, then of `b`, with even and with odd numbers.
inline IntVec even_lanes(IntVec a, IntVec b) {
  return {{vuzp1q_s32(a.v.low, a.v.high), vuzp1q_s32(b.v.low, b.v.high)}};
}
inline IntVec odd_lanes(IntVec a, IntVec b) {
  return {{vuzp2q_s32(a.v.low, a.v.high), vuzp2q_s32(b.v.low, b.v.high)}};
}
// Sums of lanes 2 i and 2 i + 1, of `a`, then of `b`.
inline IntVec sums_of_columns(IntVec a, IntVec b) {
  return {{vpaddq_s32(a.v.low, a.v.high), vpaddq_s32(b.v.low, b.v.high)}};
}

// 16 floats, by the lower 4 bits of each place.
struct FloatTable {
  explicit FloatTable(const float (&floats)[16]) : bytes_(vld1q_u8_x4(reinterpret_cast<const uint8_t*>(floats))) {}
  Vec look_up(IntVec places) const {
    auto look_up = [this](int32x4_t x) {
      const int32x4_t bytes = (x & 0x0f) * 0x04040404 + 0x03020100;
      return vreinterpretq_f32_u8(vqtbl4q_u8(bytes_, vreinterpretq_u8_s32(bytes)));
    };
    return {each(look_up, places.v)};
  }

 private:
  uint8x16x4_t bytes_;
};

// Adds the products of the four int8 values of each word. The values of `b` are passed xor kInt8Offset.
inline constexpr int32_t kInt8Offset = 0;
inline IntVec add_int8_products(IntVec sum, IntVec a, IntVec b) {
  auto added = [](int32x4_t to, int32x4_t words, int32x4_t with) {
    const int8x16_t x = vreinterpretq_s8_s32(words), y = vreinterpretq_s8_s32(with);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(to, x, y);
#else
    const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
    return to + vpaddq_s32(first, vpaddlq_s16(vmull_high_s8(x, y)));
#endif
  };
  return {each(added, sum.v, a.v, b.v)};
}

// Sums of products of the four bytes of words of codes with int8 values. All codes are at most 127, or signed.
template <int>
class CodeSums {
 public:
  void add(int, IntVec codes, IntVec x) { sums_ = add_int8_products(sums_, codes, x); }
  template <int>
  IntVec whole() {
    return sums_;
  }

 private:
  IntVec sums_ = set1_int(0);
};

inline void store(float* p, Vec x) {
  vst1q_f32(p, x.v.low);
  vst1q_f32(p + 4, x.v.high);
}
inline void store(BF16* p, Vec x) {
  auto narrow = [](float32x4_t of_half) {
    const uint32x4_t bits = vreinterpretq_u32_f32(of_half), rounded = bits + (bits >> 16 & 1) + 0x7fff;
    // Rounding could carry a NaN into the sign.
    return vshrn_n_u32(vbslq_u32(vceqq_f32(of_half, of_half), rounded, vdupq_n_u32(0x7fc00000)), 16);
  };
  vst1q_u16(&p->bits, vcombine_u16(narrow(x.v.low), narrow(x.v.high)));
}
inline void store(F16* p, Vec x) {
  vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.v.low), x.v.high)));
}
// Whole numbers from -128 to 127.
inline void store(int8_t* p, Vec x) {
  const Two<int32x4_t> words = each(vcvtnq_s32_f32, x.v);
  vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(words.low), vqmovn_s32(words.high))));
}

template <class T>
inline void store(T* p, Vec x, int n) {
  T buffer[kWidth];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Each lane, and once more after it.
inline void store_twice(float* p, Vec x) {
  vst2q_f32(p, {{x.v.low, x.v.low}});
  vst2q_f32(p + kWidth, {{x.v.high, x.v.high}});
}

inline Vec fma(Vec a, Vec b, Vec c) { return {each(vfmaq_f32, c.v, a.v, b.v)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {each(vfmsq_f32, c.v, a.v, b.v)}; }
// As the instructions of x86: where one is NaN, the second.
inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t smaller(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return {each(larger, a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {each(smaller, a.v, b.v)}; }
inline Vec round(Vec x) { return {each(vrndnq_f32, x.v)}; }

// x * 2^n for whole n from -126 to 128.
inline Vec scale_by_power(Vec x, Vec n) {
  const IntVec exponent = {each(vcvtnq_s32_f32, n.v) + set1_int(127).v};
  return {x.v * as_floats({exponent.v << 23}).v};
}

// `value`, but 0 where x is below the limit.
inline Vec zero_below(Vec value, Vec x, Vec limit) {
  auto kept = [](float32x4_t of_half, float32x4_t compared, float32x4_t with) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(of_half), vcltq_f32(compared, with)));
  };
  return {each(kept, value.v, x.v, limit.v)};
}

// Stores the lanes of both whose score is at least `low` and below `high`, and anything up to kWidth; returns how many.
inline int64_t store_between(float* scores, float* weights, Vec score, Vec weight, float low, float high) {
  float score_lanes[kWidth], weight_lanes[kWidth];
  store(score_lanes, score);
  store(weight_lanes, weight);
  int64_t count = 0;
  for (int lane = 0; lane < kWidth; ++lane) {
    scores[count] = score_lanes[lane];
    weights[count] = weight_lanes[lane];
    count += score_lanes[lane] >= low && score_lanes[lane] < high;
  }
  return count;
}

inline float first_lane(Vec x) { return vgetq_lane_f32(x.v.low, 0); }
inline float reduce_add(Vec x) { return vaddvq_f32(x.v.low + x.v.high); }
inline float reduce_max(Vec x) {
  float32x4_t largest = larger(x.v.low, x.v.high);
  largest = larger(largest, vextq_f32(largest, largest, 2));
  return vgetq_lane_f32(larger(largest, vextq_f32(largest, largest, 1)), 0);
}

// x in lanes first to last - 1, `other` elsewhere; any first and last.
inline Vec keep(Vec x, int first, int last, Vec other) {
  auto kept = [=](float32x4_t inside, float32x4_t outside, int32x4_t lanes) {
    return vbslq_f32(vcgeq_s32(lanes, vdupq_n_s32(first)) & vcltq_s32(lanes, vdupq_n_s32(last)), inside, outside);
  };
  return {each(kept, x.v, other.v, Two<int32x4_t>{{0, 1, 2, 3}, {4, 5, 6, 7}})};
}

// The sums of four vectors, one after the other: lanes in the order of `reduce_add`.
inline void reduce_add4(const Vec x[4], float* sums) {
  auto folded = [&](int i) { return x[i].v.low + x[i].v.high; };
  vst1q_f32(sums, vpaddq_f32(vpaddq_f32(folded(0), folded(1)), vpaddq_f32(folded(2), folded(3))));
}

// Line i becomes column i.
inline void transpose(Vec x[kWidth]) {
  float lines[kWidth][kWidth];
  for (int i = 0; i < kWidth; ++i) store(lines[i], x[i]);
  // Lines i to i + 3 of four columns each.
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < kWidth; ++i) {
      float column[4];
      for (int k = 0; k < 4; ++k) column[k] = lines[4 * half + k][i];
      (half == 0 ? x[i].v.low : x[i].v.high) = vld1q_f32(column);
    }
  }
}

// A vector of bytes; `look_up`, `first_pairs` and `last_pairs` work on each 16 of them.
using ByteVector = Two<uint8x16_t>;
inline ByteVector load_bytes(const void* p) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  return {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
}
inline void store_bytes(void* p, ByteVector x) {
  auto* bytes = static_cast<uint8_t*>(p);
  vst1q_u8(bytes, x.low);
  vst1q_u8(bytes + 16, x.high);
}
inline ByteVector bits_of(IntVec x) { return each(vreinterpretq_u8_s32, x.v); }
inline IntVec whole(ByteVector bits) { return {each(vreinterpretq_s32_u8, bits)}; }
// 16 bytes, in all lanes.
inline ByteVector repeat16(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p)}; }
inline ByteVector upper_nibbles(ByteVector x) { return {x.low >> 4, x.high >> 4}; }
inline ByteVector lower_nibbles(ByteVector x) { return {x.low & 0x0f, x.high & 0x0f}; }
inline ByteVector look_up(ByteVector table, ByteVector places) { return each(vqtbl1q_u8, table, places); }
inline ByteVector first_pairs(ByteVector a, ByteVector b) { return each(vzip1q_u8, a, b); }
inline ByteVector last_pairs(ByteVector a, ByteVector b) { return each(vzip2q_u8, a, b); }

// Stores 16 values, the even places of each 8 first, and returns their sum.
inline int32_t store_evens_first(int8_t* to, const int8_t* x) {
  const int8x16_t values = vld1q_s8(x);
  vst1q_s8(to, vqtbl1q_s8(values, uint8x16_t{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15}));
  return vaddlvq_s8(values);
}

}  // namespace quire::QUIRE_ISA
