// Weights as files store them: a code of a few bits for each number, and scales of groups of them.
//
// Of a column of a panel, 32 inputs are a piece, and kPiecesOfGroup pieces a group. A number is
//
//     scale of the group * scale of its part of the piece * value of its code - minimum of the group * that of the piece
//
// where the products are exact in float, so that the order in which they are made does not matter: the difference is
// rounded to float, and that to bfloat16, which are the bits of the weight that is dequantized first.
//
// A panel is its head, then its blocks, each of which is a piece of all columns. The head has the F16 scales of all
// columns, then their F16 minima, for group after group. A block has the int8 scales of all columns for each part, then
// their minima, then the codes of 128 numbers after 128 in the order of a block of bfloat16 (pack_weight.cpp). Of those
// 128, number 16 v + l has the v-th code of lane l.
#pragma once

#include <cstdint>

#include "runtime/isa.h"

namespace quire {

// kParts: scales of a piece; none where the group's is the only one.
template <int kBitsOfCode, int kPartsOfPiece, bool kHasMinima, int64_t kPiecesOfAGroup>
struct Coded {
  static constexpr int kBits = kBitsOfCode, kParts = kPartsOfPiece;
  static constexpr bool kMinima = kHasMinima;
  static constexpr int64_t kPiecesOfGroup = kPiecesOfAGroup;

  static constexpr int64_t kNumbersAtOnce = 128, kLanes = 16;
  static constexpr int64_t kHeadBytesOfGroup = kPanel * 2 * (kMinima ? 2 : 1);
  static constexpr int64_t kScaleBytes = kPanel * (kParts + (kMinima ? 1 : 0));
  static constexpr int64_t kCodeBytes = kNumbersAtOnce * kBits / 8;
  static constexpr int64_t kBlockBytes = kScaleBytes + kPanel * kPanel * kBits / 8;

  static constexpr int64_t head_bytes(int64_t in_features) {
    return in_features / (kPanel * kPiecesOfGroup) * kHeadBytesOfGroup;
  }
  static constexpr int64_t panel_bytes(int64_t in_features) {
    return head_bytes(in_features) + in_features / kPanel * kBlockBytes;
  }
};

// The formats of GGUF files. kValues are those of codes of 4 bits; of longer codes, kOffset is subtracted.
struct Q4K : Coded<4, 1, true, 8> {
  static constexpr float kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
struct Q5K : Coded<5, 1, true, 8> {
  static constexpr float kOffset = 0;
};
struct Q6K : Coded<6, 2, false, 8> {
  static constexpr float kOffset = 32;
};
struct Q80 : Coded<8, 0, false, 1> {};
struct Q40 : Coded<4, 0, false, 1> {
  static constexpr float kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
struct Iq4Xs : Coded<4, 1, false, 8> {
  static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};

// function.operator()<Format>() for the format of a coded weight.
template <class Function>
decltype(auto) with_format(int64_t multiplied, Function function) {
  switch (multiplied) {
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
    default:
      return function.template operator()<Iq4Xs>();
  }
}

}  // namespace quire

#if defined(QUIRE_ISA)
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// The values of kWidth of the 16 lanes of 128 codes, as floats: operator()(v) of the v-th codes.
template <class Format, int kBits = Format::kBits>
class Values {
 public:
  Values(const std::byte* codes, int64_t lane)
      : low_(load_int(codes + 4 * lane)),
        high_(kBits == 5 ? load_uint8(codes + 64 + lane) : load_uint16(codes + 64 + 2 * lane)) {}

  Vec operator()(int v) const {
    constexpr int kHigh = kBits - 4;
    const auto low = low_.v >> 4 * v & 15, high = high_.v >> kHigh * v & ((1 << kHigh) - 1);
    return to_floats({low | high << 4}) - set1(Format::kOffset);
  }

 private:
  const IntVec low_, high_;
};

template <class Format>
class Values<Format, 4> {
 public:
  Values(const std::byte* codes, int64_t lane) : low_(load_int(codes + 4 * lane)), table_(Format::kValues) {}

  Vec operator()(int v) const { return table_.look_up({low_.v >> 4 * v}); }

 private:
  const IntVec low_;
  const FloatTable table_;
};

template <class Format>
class Values<Format, 8> {
 public:
  Values(const std::byte* codes, int64_t lane) : codes_(reinterpret_cast<const int8_t*>(codes) + lane) {}

  Vec operator()(int v) const { return load(codes_ + Format::kLanes * v); }

 private:
  const int8_t* codes_;
};

// Expands coded panels to bfloat16, one after the other.
template <class Format>
class CodedExpander {
 public:
  static constexpr int64_t kBlockBytes = Format::kBlockBytes;
  static int64_t head_bytes(const ProductArgs& args) { return Format::head_bytes(args.in_features); }

  CodedExpander(const ProductArgs& args, int64_t panel)
      : blocks_(args.in_features / kPanel),
        head_bytes_(head_bytes(args)),
        at_(static_cast<const std::byte*>(args.weight) + panel * Format::panel_bytes(args.in_features)) {}

  void start_block() {
    if (left_ == 0) {
      group_ = at_;
      at_ += head_bytes_;
      left_ = blocks_;
    }
    if ((blocks_ - left_) % Format::kPiecesOfGroup == 0) start_group();
    --left_;
    for (int part = 0; part < kParts; ++part)
      for (int64_t i = 0; i < kPanel; i += kWidth) {
        const Vec scale = load(of_group_[0] + i);
        store_twice(scales_[part] + 2 * i, Format::kParts > 0 ? scale * of_piece(part * kPanel + i) : scale);
      }
    if constexpr (Format::kMinima) {
      for (int64_t i = 0; i < kPanel; i += kWidth) {
        const Vec minimum = load(of_group_[1] + i) * of_piece(Format::kParts * kPanel + i);
        store_twice(minima_ + 2 * i, exclusive_or(minimum, INT32_MIN));
      }
    }
    at_ += Format::kScaleBytes;
    chunk_ = 0;
  }

  // 128 numbers: four lines of words of a tile.
  void expand(BF16* to) {
    const int64_t tile = chunk_ / 4 * kPanel;
    const float *scales = scales_[chunk_ % 4 * kParts / 4] + tile, *minima = minima_ + tile;
    for (int64_t lane = 0; lane < Format::kLanes; lane += kWidth) {
      const Values<Format> values(at_, lane);
      const Vec scale[2] = {load(scales + lane), load(scales + Format::kLanes + lane)};
      Vec minimum[2];
      if constexpr (Format::kMinima) {
        minimum[0] = load(minima + lane);
        minimum[1] = load(minima + Format::kLanes + lane);
      }
      auto number = [&](int v) {
        if constexpr (Format::kMinima)
          return fma(values(v), scale[v % 2], minimum[v % 2]);
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
    at_ += Format::kCodeBytes;
    ++chunk_;
  }

  void end_block(BF16*) {}

 private:
  static constexpr int kParts = Format::kParts > 1 ? Format::kParts : 1;

  void start_group() {
    for (int what = 0; what < (Format::kMinima ? 2 : 1); ++what, group_ += kPanel * sizeof(F16))
      for (int64_t i = 0; i < kPanel; i += kWidth)
        store(of_group_[what] + i, load(reinterpret_cast<const F16*>(group_) + i));
  }

  Vec of_piece(int64_t at) const { return load(reinterpret_cast<const int8_t*>(at_) + at); }

  const int64_t blocks_, head_bytes_;  // of a panel
  const std::byte *at_, *group_ = nullptr;
  int64_t left_ = 0, chunk_ = 0;
  alignas(64) float of_group_[2][kPanel];  // scales and minima of the columns
  // The same of the block, where both inputs of a word have their column's.
  alignas(64) float scales_[kParts][2 * kPanel], minima_[2 * kPanel];
};

}  // namespace
}  // namespace quire::QUIRE_ISA
#endif
