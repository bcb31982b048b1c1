// Weights as files store them: a code of a few bits for each number, and scales of groups of them.
//
// In a column of a panel, 32 inputs are a piece, and kPiecesOfGroup pieces a group. A number is
//
//     scale of the group * scale of its part of the piece * value of its code -
//     minimum of the group * minimum of the piece
//
// where the products are exact in float, so that their order does not matter. The difference is rounded to float and
// then to bfloat16, which gives the same bits as a weight that is dequantized first.
//
// In safetensors files, codes and scales are separate, and groups have any number of pieces (Grouping). A number is
//
//     (code - code of 0) * scale of the group
//
// rounded to float and then to bfloat16; the difference is exact. Codes of 4 bits may stand for entries of a table. FP4
// has one group in a row, and a scale of a byte for each part of a piece, as MXFP4 (E8M0, of 32 inputs) and NVFP4
// (E4M3, of 16 inputs) have them.
//
// A panel is its head, then its blocks, one for each piece of all columns. The head has, group after group, the F16
// scales of all columns and their F16 minima; in safetensors files, the scales in their own type and the codes of 0, a
// byte each; a table of numbers comes before them. A block has the scales of all columns for each part, int8 or as FP4
// has them, then their minima, then the codes in chunks of 128 numbers in the order of a bfloat16 block
// (pack_weight.cpp). Number 16 v + l of a chunk is the v-th code of lane
// l. Half h = v % 2 of a chunk has byte v / 2 of lane l. Codes of 4 and more bits have their lower 4 bits in the h-th
// nibble of byte 4 l + v / 2 of the chunk; the further bits follow, and the bits of one significance and half are a
// 64-bit word. Thus a byte of four codes lies where a product of int8 values takes it: lane l has the numbers of inputs
// l % 2, l % 2 + 2, ... of column 8 h + l / 2.
#pragma once

#include <cstdint>

#include "runtime/isa.h"

namespace quire {

// kParts: scales of a piece; 0 if only the group has a scale and a minimum. kPiecesOfGroup is 0 if Grouping has the
// number.
template <int kBitsOfCode, int kPartsOfPiece, bool kHasMinima, int64_t kPiecesOfAGroup, bool kHasTable = false>
struct Coded {
  static constexpr int kBits = kBitsOfCode, kParts = kPartsOfPiece;
  static constexpr bool kMinima = kHasMinima, kZeros = false, kFloats = false, kIsFp4 = false;
  static constexpr int64_t kPiecesOfGroup = kPiecesOfAGroup;

  static constexpr int64_t kNumbersAtOnce = 128, kLanes = 16;
  static constexpr int64_t kTableBytes = kHasTable ? 16 * sizeof(float) : 0;
  static constexpr int64_t kHeadBytesOfGroup = kPanel * 2 * (kMinima ? 2 : 1);
  static constexpr int64_t kScaleBytes = kParts > 0 ? kPanel * (kParts + (kMinima ? 1 : 0)) : 0;
  static constexpr int64_t kCodeBytes = kNumbersAtOnce * kBits / 8;
  static constexpr int64_t kBlockBytes = kScaleBytes + kPanel * kPanel * kBits / 8;

  static constexpr int64_t pieces_of_group(const Grouping& grouping) {
    return kPiecesOfGroup > 0 ? kPiecesOfGroup : grouping.pieces;
  }
  static constexpr int64_t scale_bytes(const Grouping& grouping) { return grouping.scale_dtype == kFloat32 ? 4 : 2; }
  static constexpr int64_t head_bytes_of_group(const Grouping& grouping) {
    return kPiecesOfGroup > 0 ? kHeadBytesOfGroup : kPanel * (scale_bytes(grouping) + grouping.has_zeros);
  }
  static constexpr int64_t head_bytes(int64_t in_features, const Grouping& grouping) {
    const int64_t inputs = kPanel * pieces_of_group(grouping);
    return kTableBytes + (in_features + inputs - 1) / inputs * head_bytes_of_group(grouping);
  }
  static constexpr int64_t panel_bytes(int64_t in_features, const Grouping& grouping) {
    return head_bytes(in_features, grouping) + in_features / kPanel * kBlockBytes;
  }
};

// The formats of GGUF files. A code is a byte from 0 on, and stands for the byte less kOffset, or, with 4 bits, for an
// entry of kValues.
struct Q4K : Coded<4, 1, true, 8> {
  static constexpr int kOffset = 0;
  static constexpr float kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
struct Q5K : Coded<5, 1, true, 8> {
  static constexpr int kOffset = 0;
};
struct Q6K : Coded<6, 2, false, 8> {
  static constexpr int kOffset = 32;
};
struct Q80 : Coded<8, 0, false, 1> {
  static constexpr int kOffset = 128;
};
struct Q40 : Coded<4, 0, false, 1> {
  static constexpr int kOffset = 8;
  static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
struct Q41 : Coded<4, 0, true, 1> {
  static constexpr int kOffset = 0;
  static constexpr const float (&kValues)[16] = Q4K::kValues;
};
struct Q50 : Coded<5, 0, false, 1> {
  static constexpr int kOffset = 16;
};
struct Q51 : Coded<5, 0, true, 1> {
  static constexpr int kOffset = 0;
};
struct Iq4Xs : Coded<4, 1, false, 8> {
  static constexpr int kOffset = 128;
  static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct Iq4Nl : Coded<4, 0, false, 1> {
  static constexpr int kOffset = Iq4Xs::kOffset;
  static constexpr const float (&kValues)[16] = Iq4Xs::kValues;
};

// The formats of safetensors files: integers with a code of 0 for each group, and FP8 (E4M3).
template <int kBitsOfCode>
struct ScaledInt : Coded<kBitsOfCode, 0, false, 0> {
  static constexpr bool kZeros = true;
  static constexpr int kOffset = 0;
  static constexpr int kMiddle = 1 << (kBitsOfCode - 1);
  static constexpr const float (&kValues)[16] = Q4K::kValues;
};
struct ScaledFp8 : Coded<8, 0, false, 0> {
  static constexpr bool kFloats = true;
  static constexpr int kOffset = 0;
};

// Numbers of a table in the file.
struct Table4 : Coded<4, 0, false, 0, true> {
  static constexpr bool kFloats = true;
  static constexpr int kOffset = 0;
};

// E2M1: the table has twice the numbers, so scales of rows are halves.
template <int kPartsOfPiece>
struct Fp4 : Coded<4, kPartsOfPiece, false, 0> {
  static constexpr bool kIsFp4 = true;
  static constexpr int kOffset = 12;
  static constexpr float kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
};
using Mxfp4 = Fp4<1>;
using Nvfp4 = Fp4<2>;

template <class Format>
constexpr float value_of(int code) {
  if constexpr (Format::kBits == 4)
    return Format::kValues[code];
  else
    return static_cast<float>(code - Format::kOffset);
}

// function.operator()<Format>() for the format of a coded weight.
template <class Function>
decltype(auto) with_format(int64_t stored, Function function) {
  switch (stored) {
    case kQ4K:
      return function.template operator()<Q4K>();
    case kQ5K:
      return function.template operator()<Q5K>();
    case kQ6K:
      return function.template operator()<Q6K>();
    case kQ80:
      return function.template operator()<Q80>();
    case kQ40:
      return function.template operator()<Q40>();
    case kQ41:
      return function.template operator()<Q41>();
    case kQ50:
      return function.template operator()<Q50>();
    case kQ51:
      return function.template operator()<Q51>();
    case kIq4Xs:
      return function.template operator()<Iq4Xs>();
    case kScaledInt4:
      return function.template operator()<ScaledInt<4>>();
    case kScaledInt8:
      return function.template operator()<ScaledInt<8>>();
    case kScaledFp8:
      return function.template operator()<ScaledFp8>();
    case kMxfp4:
      return function.template operator()<Mxfp4>();
    case kNvfp4:
      return function.template operator()<Nvfp4>();
    case kTable4:
      return function.template operator()<Table4>();
    default:
      return function.template operator()<Iq4Nl>();
  }
}

}  // namespace quire

#if defined(QUIRE_ISA)
#include <array>

#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// The bytes of both halves of a chunk of codes, for kWidth lanes from `lane` on.
template <class Format>
inline void load_codes(const std::byte* chunk, int64_t lane, IntVec (&codes)[2]) {
  if constexpr (Format::kBits == 8) {
    for (int half = 0; half < 2; ++half) codes[half] = load_int(chunk + 64 * half + 4 * lane);
    return;
  }
  const IntVec nibbles = load_int(chunk + 4 * lane);
  codes[0] = {nibbles.v & 0x0f0f0f0f};
  codes[1] = {nibbles.v >> 4 & 0x0f0f0f0f};
  for (int bit = 4; bit < Format::kBits; ++bit)
    for (int half = 0; half < 2; ++half)
      codes[half] = add_where_set(codes[half], chunk + 64 + 16 * (bit - 4) + 8 * half, lane, 1 << bit);
}

// The values of kWidth of the 16 lanes of 128 codes, as floats, without the offset of codes of more than 4 bits:
// operator()(v) of the v-th codes.
template <class Format, bool = Format::kBits == 4>
class Values {
 public:
  Values(const std::byte* chunk, int64_t lane) { load_codes<Format>(chunk, lane, codes_); }

  Vec operator()(int v) const { return to_floats(byte_of(codes_[v % 2], v / 2)); }

 private:
  IntVec codes_[2];
};

template <class Format>
class Values<Format, true> {
 public:
  Values(const std::byte* chunk, int64_t lane, const float (&table)[16])
      : nibbles_(load_int(chunk + 4 * lane)), table_(table) {}

  Vec operator()(int v) const { return table_.look_up({nibbles_.v >> 4 * v}); }

 private:
  const IntVec nibbles_;
  const FloatTable table_;
};

// Sign, four bits of exponent and three of mantissa, as a float that is 2^120 times smaller: subnormal codes are
// subnormal floats. Codes are not NaN.
template <>
class Values<ScaledFp8, false> {
 public:
  Values(const std::byte* chunk, int64_t lane) { load_codes<ScaledFp8>(chunk, lane, codes_); }

  Vec operator()(int v) const {
    return as_floats({(codes_[v % 2].v << (24 - 8 * (v / 2)) >> 4) & 0x87f00000}) * set1(0x1p120f);
  }

 private:
  IntVec codes_[2];
};

// Walks through the blocks of coded panels, one after the other. With kFolded, minima are there for all formats, and
// account for the offsets of codes. Scales and minima are there kTimes for each column, once or twice.
template <class Format, bool kFolded, int kTimes = 2>
class CodedBlocks {
 public:
  static constexpr int kParts = Format::kParts > 1 ? Format::kParts : 1;
  static constexpr bool kMinima = Format::kMinima || kFolded;

  CodedBlocks(const ProductArgs& args, int64_t panel)
      : blocks_(args.in_features / kPanel),
        grouping_(args.grouping),
        at_(static_cast<const std::byte*>(args.weight) + panel * Format::panel_bytes(args.in_features, args.grouping)) {
  }

  // Returns the codes of the next block, which follow the scales of its parts. wants(scales): whether `scales` and
  // `minima` are needed.
  template <class Wants>
  const std::byte* next(Wants wants) {
    if (left_ == 0) {
      table_ = at_;
      group_ = at_ + Format::kTableBytes;
      at_ += Format::head_bytes(blocks_ * kPanel, grouping_);
      left_ = blocks_;
      left_of_group_ = 0;
    }
    const bool starts_group = left_of_group_ == 0;
    if (starts_group) {
      start_group();
      left_of_group_ = Format::pieces_of_group(grouping_);
    }
    --left_;
    --left_of_group_;
    const bool changes = Format::kParts > 0 ? wants(at_) : starts_group;
    for (int64_t i = 0; changes && i < kPanel; i += kWidth) {
      for (int part = 0; part < kParts; ++part) {
        const Vec scale =
            Format::kParts > 0 ? load(of_group_[0] + i) * of_piece(part * kPanel + i) : load(of_group_[0] + i);
        put(scales_[part], i, scale);
        if constexpr (kFolded) {
          Vec minimum = scale * (Format::kZeros ? load(of_group_[1] + i) : set1(-Format::kOffset));
          if constexpr (Format::kMinima) minimum = minimum - minimum_of_piece(i);
          put(minima_[part], i, minimum);
        }
      }
      if constexpr (Format::kMinima && !kFolded) put(minima_[0], i, exclusive_or(minimum_of_piece(i), INT32_MIN));
      if constexpr (Format::kZeros && !kFolded) put(minima_[0], i, load(of_group_[1] + i));
    }
    const std::byte* codes = at_ + Format::kScaleBytes;
    at_ += Format::kBlockBytes;
    return codes;
  }
  const std::byte* next() {
    return next([](const std::byte*) { return true; });
  }

  // Scales and negative minima, or negative codes that stand for 0, of the columns of a tile, for a chunk of its codes.
  const float* scales(int64_t tile, int64_t chunk) const {
    return scales_[chunk * kParts / 4] + tile * kTimes * kTileColumns;
  }
  const float* minima(int64_t tile, int64_t chunk) const {
    return minima_[kFolded ? chunk * kParts / 4 : 0] + tile * kTimes * kTileColumns;
  }

  // The numbers of codes of 4 bits.
  const float (&table() const)[16] {
    if constexpr (Format::kTableBytes > 0)
      return *reinterpret_cast<const float(*)[16]>(table_);
    else
      return Format::kValues;
  }

 private:
  static constexpr int64_t kTileColumns = kPanel / 2;

  static void put(float* to, int64_t i, Vec x) {
    if constexpr (kTimes == 2)
      store_twice(to + 2 * i, x);
    else
      store(to + i, x);
  }

  void start_group() {
    if constexpr (Format::kPiecesOfGroup == 0) return start_scaled_group();
    for (int what = 0; what < (Format::kMinima ? 2 : 1); ++what, group_ += kPanel * sizeof(F16))
      for (int64_t i = 0; i < kPanel; i += kWidth)
        store(of_group_[what] + i, load(reinterpret_cast<const F16*>(group_) + i));
  }

  // Scales in their own type, and the negated codes of 0.
  void start_scaled_group() {
    const int64_t bytes = Format::scale_bytes(grouping_);
    for (int64_t i = 0; i < kPanel; i += kWidth) {
      const std::byte* scales = group_ + i * bytes;
      store(of_group_[0] + i, grouping_.scale_dtype == kFloat32   ? load(reinterpret_cast<const float*>(scales))
                              : grouping_.scale_dtype == kFloat16 ? load(reinterpret_cast<const F16*>(scales))
                                                                  : load(reinterpret_cast<const BF16*>(scales)));
    }
    group_ += kPanel * bytes;
    if constexpr (Format::kZeros) {
      for (int64_t i = 0; i < kPanel; ++i)
        of_group_[1][i] = -static_cast<float>(grouping_.has_zeros ? static_cast<int>(group_[i]) : Format::kMiddle);
    }
    group_ += kPanel * grouping_.has_zeros;
  }

  Vec of_piece(int64_t at) const {
    if constexpr (!Format::kIsFp4) return load(reinterpret_cast<const int8_t*>(at_) + at);
    if constexpr (Format::kParts > 1) return load_e4m3(at_ + at);
    // An exponent; 0 is 2^-127, which has no bits of an exponent.
    return max(as_floats({load_bytes_as_int(at_ + at).v << 23}), set1(0x1p-127f));
  }
  Vec minimum_of_piece(int64_t i) const {
    const Vec of_group = load(of_group_[1] + i);
    return Format::kParts > 0 ? of_group * of_piece(Format::kParts * kPanel + i) : of_group;
  }

  const int64_t blocks_;  // of a panel
  const Grouping grouping_;
  const std::byte *at_, *group_ = nullptr, *table_ = nullptr;
  int64_t left_ = 0, left_of_group_ = 0;
  alignas(64) float of_group_[2][kPanel];  // scales and minima of the columns
  alignas(64) float scales_[kParts][kTimes * kPanel], minima_[kFolded ? kParts : 1][kTimes * kPanel];
};

// Expands blocks whose scales are powers of two, without floats.
template <class Format>
struct PowerScales {
  // Takes the scales of a block; false where it must be expanded with floats.
  bool load(const std::byte*) { return false; }
  // Expands 128 codes of a tile; false where it does not.
  bool expand(const std::byte*, int64_t, BF16*) const { return false; }
};

#if defined(__AVX512BW__)
// A bfloat16 number is that of the code with the exponent of the scale added, in lanes of 16 bits, if all results are
// normal: 32 numbers take four instructions.
template <>
class PowerScales<Mxfp4> {
 public:
  bool load(const std::byte* scales) {
    const __m256i exponents = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
    const __m256i from_lowest = _mm256_sub_epi8(exponents, _mm256_set1_epi8(kLowest));
    is_normal_ = _mm256_cmpgt_epu8_mask(from_lowest, _mm256_set1_epi8(kHighest - kLowest)) == 0;
    for (int tile = 0; is_normal_ && tile < 2; ++tile) {
      const __m128i bytes = tile == 0 ? _mm256_castsi256_si128(exponents) : _mm256_extracti128_si256(exponents, 1);
      // Both numbers of a pair are of one column.
      const __m512i words = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(127)), 7);
      added_[tile] = _mm512_mask_blend_epi16(0xaaaaaaaa, words, _mm512_slli_epi32(words, 16));
    }
    return is_normal_;
  }

  bool expand(const std::byte* codes, int64_t tile, BF16* to) const {
    if (!is_normal_) return false;
    const __m512i nibbles = _mm512_loadu_si512(codes);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      // The words of all lanes with codes 0 to 3, then 4 to 7, twice each: line after line, the even ones first.
      const __m512i words = _mm512_permutexvar_epi16(_mm512_add_epi16(evens(), _mm512_set1_epi16(half)), nibbles);
#pragma GCC unroll 2
      for (int line = 0; line < 2; ++line) {
        const __m512i shifts = _mm512_inserti64x4(_mm512_set1_epi16(8 * line + 4), _mm256_set1_epi16(8 * line), 0);
        const __m512i places = _mm512_srlv_epi16(words, shifts);
        const __m512i numbers = _mm512_permutexvar_epi16(places, table());
        // 0 stays 0.
        const __mmask32 has_exponent = _mm512_test_epi16_mask(places, _mm512_set1_epi16(7));
        _mm512_storeu_si512(to + (2 * half + line) * 32,
                            _mm512_mask_add_epi16(numbers, has_exponent, numbers, added_[tile]));
      }
    }
    return true;
  }

 private:
  // Exponents of scales with which numbers from 0.5 to 6 are normal.
  static constexpr char kLowest = 2, kHighest = static_cast<char>(252);

  static __m512i evens() {
    alignas(64) static constexpr auto kEvens = [] {
      std::array<uint16_t, 32> lanes{};
      for (int i = 0; i < 32; ++i) lanes[i] = static_cast<uint16_t>(i % 16 * 2);
      return lanes;
    }();
    return _mm512_load_si512(kEvens.data());
  }
  // E2M1 in bfloat16, twice: the fifth bit of a place is another code's.
  static __m512i table() {
    alignas(64) static constexpr std::array<uint16_t, 32> kTable = {
        0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
        0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
        0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    return _mm512_load_si512(kTable.data());
  }

  __m512i added_[2];
  bool is_normal_ = false;
};
#endif

// Expands coded panels to bfloat16, one after the other.
template <class Format>
class CodedExpander {
 public:
  // (code - offset) * scale, with one operation less: the minimum, scale * offset, is exact, so the sum has the same
  // bits.
  static constexpr bool kFolded = Format::kBits > 4 && Format::kOffset != 0;
  static constexpr bool kMinima = Format::kMinima || kFolded;

  static constexpr int64_t kBlockBytes = Format::kBlockBytes;
  static int64_t head_bytes(const ProductArgs& args) { return Format::head_bytes(args.in_features, args.grouping); }

  CodedExpander(const ProductArgs& args, int64_t panel) : blocks_(args, panel) {}

  void start_block() {
    codes_ = blocks_.next([this](const std::byte* scales) { return !powers_.load(scales); });
    chunk_ = 0;
  }

  // 128 numbers: four lines of words of a tile.
  void expand(BF16* to) {
    if (powers_.expand(codes_, chunk_ / 4, to)) {
      codes_ += Format::kCodeBytes;
      ++chunk_;
      return;
    }
    const float *scales = blocks_.scales(chunk_ / 4, chunk_ % 4), *minima = blocks_.minima(chunk_ / 4, chunk_ % 4);
    for (int64_t lane = 0; lane < Format::kLanes; lane += kWidth) {
      const auto values = values_at(lane);
      Vec scale[2], minimum[2];
      for (int half = 0; half < 2; ++half) {
        scale[half] = load(scales + half * Format::kLanes + lane);
        if constexpr (kMinima || Format::kZeros) minimum[half] = load(minima + half * Format::kLanes + lane);
      }
      auto number = [&](int v) {
        if constexpr (kMinima)
          return fma(values(v), scale[v % 2], minimum[v % 2]);
        else if constexpr (Format::kZeros)
          return (values(v) + minimum[v % 2]) * scale[v % 2];
        else
          return values(v) * scale[v % 2];
      };
#pragma GCC unroll 4
      for (int v = 0; v < 8; v += 2) {
        BF16* line = to + v * Format::kLanes + lane;
        if constexpr (kWidth == Format::kLanes) {
          store_both(line, number(v), number(v + 1));
        } else {
          store(line, number(v));
          store(line + Format::kLanes, number(v + 1));
        }
      }
    }
    codes_ += Format::kCodeBytes;
    ++chunk_;
  }

  void skip(int64_t parts) {
    codes_ += parts * Format::kCodeBytes;
    chunk_ += parts;
  }

  void end_block(BF16*) {}

 private:
  Values<Format> values_at(int64_t lane) const {
    if constexpr (Format::kBits == 4)
      return Values<Format>(codes_, lane, blocks_.table());
    else
      return Values<Format>(codes_, lane);
  }

  CodedBlocks<Format, kFolded> blocks_;
  PowerScales<Format> powers_;
  const std::byte* codes_ = nullptr;
  int64_t chunk_ = 0;
};

}  // namespace
}  // namespace quire::QUIRE_ISA
#endif
