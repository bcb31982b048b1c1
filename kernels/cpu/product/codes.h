// Products of int8 tokens with coded weights (coded.h), by vectors. Sums over the inputs of a scale are whole numbers,
// so that they do not depend on how they are made. Included by product.cpp alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

template <class Format_>
struct Int8ByCoded {
  using Format = Format_;
  using X = int8_t;
  using Weight = std::byte;
  using Sum = float;
  using Expander = CodedExpander<Format>;
};

// A piece of a token: its 32 values, of each 8 those with even places first, then for each part the sums of the values
// with even and with odd places.
struct TokenPiece {
  int8_t values[kPanel];
  float sums[2][2];
  std::byte unused[16];
};
static_assert(sizeof(TokenPiece) == 64);

class CodeMultiplier {
 public:
  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs&) {
    return 0;
  }

  template <class Kind>
  static int64_t packed_bytes(const ProductArgs& args) {
    return args.num_tokens * pieces(args) * static_cast<int64_t>(sizeof(TokenPiece));
  }

  // Packs pieces begin to end of all tokens.
  template <class Kind>
  static void pack(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
    constexpr int kParts = CodedBlocks<typename Kind::Format, true>::kParts;
    for (int64_t token = 0; token < args.num_tokens; ++token) {
      for (int64_t i = begin; i < end; ++i) {
        TokenPiece& piece = reinterpret_cast<TokenPiece*>(packed)[token * pieces(args) + i];
        const int8_t* x = x_of<Kind>(args, token) + i * kPanel;
        int sums[2][2] = {};
        for (int64_t at = 0; at < kPanel; ++at) {
          piece.values[at / 8 * 8 + at % 2 * 4 + at % 8 / 2] = x[at];
          sums[at * kParts / kPanel][at % 2] += x[at];
        }
        for (int part = 0; part < 2; ++part)
          for (int odd = 0; odd < 2; ++odd) piece.sums[part][odd] = static_cast<float>(sums[part][odd]);
      }
    }
  }

  template <class Kind>
  void multiply(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end, std::byte*,
                const std::byte* packed) {
    using Format = typename Kind::Format;
    const auto* tokens = reinterpret_cast<const TokenPiece*>(packed);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) args.addends->start(panel, panel == first_panel, pieces(args));
      for (int64_t token = begin; token < end; token += kTokensAtOnce)
        with_count<kTokensAtOnce>(end - token, [&]<int kTokens>() {
          multiply_panel<Format, kTokens>(args, panel, token, tokens + token * pieces(args), token == begin);
        });
    }
  }

 private:
  // As many as have all their sums in registers.
  static constexpr int64_t kTokensAtOnce = kWidth == 16 ? 4 : 1;
  static constexpr int kVectorsOfHalf = 16 / kWidth;
  static constexpr int64_t kAhead = 1 << 12;

  static int64_t pieces(const ProductArgs& args) { return args.in_features / kPanel; }

  template <class Format, int kTokens>
  static void multiply_panel(const Pass& args, int64_t panel, int64_t token, const TokenPiece* tokens, bool is_first) {
    using Blocks = CodedBlocks<Format, true>;
    constexpr int kChunks = 4 / Blocks::kParts;
    const int64_t pieces = args.in_features / kPanel;
    Blocks blocks(args, panel);
    Vec sums[kTokens][2][2][kVectorsOfHalf] = {};
    for (int64_t piece = 0; piece < pieces; ++piece, ++tokens) {
      const std::byte* chunk = blocks.next();
      if (is_first && args.addends != nullptr) args.addends->step();
      if (is_first)
        for (int64_t line = 0; line < Format::kBlockBytes; line += kCacheLine)
          prefetch<kPrefetchCache>(chunk + kAhead + line);
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 2
        for (int part = 0; part < Blocks::kParts; ++part) {
          IntVec whole[kTokens][2][kVectorsOfHalf] = {};
#pragma GCC unroll 4
          for (int i = part * kChunks; i < (part + 1) * kChunks; ++i, chunk += Format::kCodeBytes) {
            for (int at = 0; at < kVectorsOfHalf; ++at) {
              IntVec codes[2];
              load_codes<Format>(chunk, at * kWidth, codes);
              if constexpr (kHasTable<Format>)
                for (IntVec& half : codes) half = table_of<Format>(half);
#pragma GCC unroll 4
              for (int t = 0; t < kTokens; ++t) {
                const IntVec x = repeat8(tokens[t * pieces].values + 8 * i);
                for (int half = 0; half < 2; ++half)
                  whole[t][half][at] = add_code_products(whole[t][half][at], codes[half], x);
              }
            }
          }
          const float *scales = blocks.scales(tile, part * kChunks), *minima = blocks.minima(tile, part * kChunks);
          for (int half = 0; half < 2; ++half)
            for (int at = 0; at < kVectorsOfHalf; ++at) {
              const Vec scale = load(scales + 16 * half + at * kWidth),
                        minimum = load(minima + 16 * half + at * kWidth);
#pragma GCC unroll 4
              for (int t = 0; t < kTokens; ++t) {
                Vec& sum = sums[t][tile][half][at];
                sum = fma(to_floats(whole[t][half][at]), scale, sum);
                if constexpr (Format::kMinima || Format::kZeros || Format::kOffset != 0)
                  sum = fma(minimum, as_floats(repeat8(tokens[t * pieces].sums[part])), sum);
              }
            }
        }
      }
    }
    alignas(64) float lines[kTokens][kPanel];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t)
      for (int tile = 0; tile < 2; ++tile) {
        alignas(64) float pairs[kPanel];
        for (int half = 0; half < 2; ++half)
          for (int at = 0; at < kVectorsOfHalf; ++at) store(pairs + 16 * half + at * kWidth, sums[t][tile][half][at]);
        for (int column = 0; column < kTile; ++column)
          lines[t][tile * kTile + column] = pairs[2 * column] + pairs[2 * column + 1];
      }
    finish(args, panel, token, kTokens, lines[0]);
  }

  // Codes of 4 bits that stand for other values than their own.
  template <class Format>
  static constexpr bool kHasTable = Format::kBits == 4 && Format::kOffset == Iq4Xs::kOffset;

  template <class Format>
  static IntVec table_of(IntVec codes) {
    alignas(16) static constexpr auto kBytes = [] {
      std::array<uint8_t, 16> bytes{};
      for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(Format::kValues[i] + Format::kOffset);
      return bytes;
    }();
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.data()));
    return whole(look_up(in_all_lanes(table), bits_of(codes)));
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
