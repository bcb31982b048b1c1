// Products of int8 tokens with coded weights by AVX2, which multiplies pairs of bytes: their products are summed in 16
// bits as long as no sum can overflow, and widened only then. Sums over the inputs of a scale are integers, and scaled
// in the order of codes.h: a token's results do not depend on the number of tokens, and have the bits of other
// instruction sets. Included only by product.cpp.
#pragma once

#include "product/codes.h"

namespace quire::QUIRE_ISA {
namespace {

class CodeTiles : public CodeProducts {
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
    using Format = typename Kind::Format;
    for_passes<Kind, kBytesAtOnce>(args, 0, args.num_tokens, [&](int64_t first, int64_t last) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t at = i % kPiecesAtOnce, step = pieces_from(args, i - at);
        TokenPiece* to = tokens_of(args, packed, first) + (i - at) * (last - first) + at;
        for (int64_t token = first; token < last; ++token, to += step) {
          pack_piece<CodedBlocks<Format, true>::kParts>(x_of<Kind>(args, token) + i * kPanel, to->values, to->sums);
          to->excess = kBias<Format> * static_cast<int32_t>(to->sums[0]);
        }
      }
    });
  }

  template <class Kind>
  void multiply(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end, std::byte*,
                const std::byte* packed) {
    using Format = typename Kind::Format;
    const TokenPiece* tokens = tokens_of(args, packed, begin);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) args.addends->start(panel, panel == first_panel, pieces(args));
      if (end - begin == 1)
        multiply_stored<Format>(args, panel, begin, tokens);
      else
        multiply_expanded<Format>(args, panel, begin, end, tokens);
    }
  }

 private:
  static constexpr int kVectorsOfTile = kTile / kWidth;
  // Pieces of a panel that are expanded at once and stay in the first cache. All tokens of a pass have their values for
  // them side by side, so that they are read in order.
  static constexpr int64_t kPiecesAtOnce = 8;

  // Pieces that are expanded together with piece `first`, which is the first one of them.
  static int64_t pieces_from(const ProductArgs& args, int64_t first) {
    return pieces(args) - first < kPiecesAtOnce ? pieces(args) - first : kPiecesAtOnce;
  }

  template <class AnyByte>
  static auto* tokens_of(const ProductArgs& args, AnyByte* packed, int64_t begin) {
    using Piece = std::conditional_t<std::is_const_v<AnyByte>, const TokenPiece, TokenPiece>;
    return reinterpret_cast<Piece*>(packed) + begin * pieces(args);
  }

  // Words whose products with codes are summed in 16 bits; 0: bytes of codes are signed.
  template <class Format>
  static constexpr int kWordsAtOnce = !kFitsPairs<Format>       ? 0
                                      : kLargest<Format> <= 15 ? 8
                                      : kLargest<Format> <= 31 ? 4
                                                               : 2;

  // One token, with codes as stored.
  template <class Format>
  static void multiply_stored(const Pass& args, int64_t panel, int64_t token, const TokenPiece* tokens) {
    using Blocks = CodedBlocks<Format, true, 1>;
    constexpr int kChunks = 4 / Blocks::kParts;
    Blocks blocks(args, panel);
    Vec sums[2][kVectorsOfTile] = {};
    for (const TokenPiece* const end = tokens + pieces(args); tokens < end; ++tokens) {
      const std::byte* chunk = blocks.next();
      if (args.addends != nullptr) args.addends->step();
      fetch_ahead(chunk - Format::kScaleBytes, Format::kScaleBytes);
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 2
        for (int part = 0; part < Blocks::kParts; ++part) {
          CodeSums<kWordsAtOnce<Format>> pairs[2][kVectorsOfHalf];
#pragma GCC unroll 4
          for (int i = 0; i < kChunks; ++i, chunk += Format::kCodeBytes) {
            fetch_ahead(chunk, Format::kCodeBytes);
            const IntVec x = repeat8(tokens->values + 8 * (part * kChunks + i));
            for (int at = 0; at < kVectorsOfHalf; ++at) {
              IntVec codes[2];
              load_bytes_of<Format>(chunk, at * kWidth, codes);
              for (int half = 0; half < 2; ++half) pairs[half][at].add(i, codes[half], x);
            }
          }
          const float *scales = blocks.scales(tile, part * kChunks), *minima = blocks.minima(tile, part * kChunks);
          for (int half = 0; half < 2; ++half) {
            const IntVec whole = sums_of_columns(pairs[half][0].template whole<kChunks>(),
                                                 pairs[half][1].template whole<kChunks>());
            add_scaled<Format>(sums[tile][half], whole, load(scales + half * kWidth), load(minima + half * kWidth),
                               *tokens, part);
          }
        }
      }
    }
    alignas(64) float line[kPanel];
    for (int tile = 0; tile < 2; ++tile)
      for (int at = 0; at < kVectorsOfTile; ++at) store(line + tile * kTile + at * kWidth, sums[tile][at]);
    finish(args, panel, token, 1, line);
  }

  template <class Format>
  static void add_scaled(Vec& sum, IntVec whole, Vec scale, Vec minimum, const TokenPiece& piece, int part) {
    add_scaled<kAddsMinima<Format>, kWordsAtOnce<Format>>(sum, whole, scale, minimum, piece, part);
  }
  template <bool kWithMinima, int kAtOnce>
  static void add_scaled(Vec& sum, IntVec whole, Vec scale, Vec minimum, const TokenPiece& piece, int part) {
    if constexpr (kAtOnce == 0) whole = {whole.v + set1_int(piece.excess).v};
    sum = fma(to_floats(whole), scale, sum);
    if constexpr (kWithMinima) sum = fma(minimum, set1(piece.sums[part]), sum);
  }

  // Several tokens, with codes that are expanded a few pieces at a time. Sums are in memory between them.
  template <class Format>
  static void multiply_expanded(const Pass& args, int64_t panel, int64_t begin, int64_t end, const TokenPiece* tokens) {
    constexpr int kParts = CodedBlocks<Format, true>::kParts, kAtOnce = kWordsAtOnce<Format>;
    constexpr int64_t kTokensAtOnce = kTokensOfTile<kParts, kAtOnce>;
    alignas(64) PanelPiece<kParts> expanded[kPiecesAtOnce];
    alignas(64) float sums[kMaxTokens * kPanel];
    std::memset(sums, 0, (end - begin) * kPanel * sizeof(float));
    const int64_t all = pieces(args), bytes = Format::panel_bytes(args.in_features, args.grouping);
    const int64_t groups = (end - begin + kTokensAtOnce - 1) / kTokensAtOnce;
    const auto* stored = static_cast<const std::byte*>(args.weight) + panel * bytes;
    CodedBlocks<Format, true, 1> blocks(args, panel);
    for (int64_t first = 0; first < all; first += kPiecesAtOnce) {
      const int64_t count = pieces_from(args, first);
      for (int64_t i = 0; i < count; ++i) {
        fetch_ahead(stored + bytes * (first + i) / all, Format::kBlockBytes);
        expand<Format>(args, blocks, expanded + i, 1);
      }
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t at = (end - begin) * group / groups, next = (end - begin) * (group + 1) / groups;
        with_count<kTokensAtOnce>(next - at, [&]<int kTokens>() {
          multiply_tile<kParts, kAddsMinima<Format>, kAtOnce, kTokens>(tokens + at * count, expanded, count,
                                                                       sums + at * kPanel);
        });
      }
      tokens += (end - begin) * count;
    }
    finish(args, panel, begin, end - begin, sums);
  }

  // Tokens whose sums fit into registers, twice where they are widened before the end of a part.
  template <int kParts, int kAtOnce>
  static constexpr int kTokensOfTile = kAtOnce == 0 || kAtOnce * kParts >= kWordsOfPiece ? 4 : 3;

  // Adds the products of `count` pieces to the sums of kTokens tokens.
  template <int kParts, bool kWithMinima, int kAtOnce, int kTokens>
  [[gnu::noinline]] static void multiply_tile(const TokenPiece* tokens, const PanelPiece<kParts>* of_panel,
                                              int64_t count, float* sums) {
    constexpr int kWords = kWordsOfPiece / kParts;
    for (int64_t column = 0; column < kPanel; column += kTile) {
      const TokenPiece* of_tokens = tokens;
      for (const auto *piece = of_panel, *end = of_panel + count; piece < end; ++piece, ++of_tokens) {
        // The next tokens, which may be in the third cache.
        for (int t = 0; t < kTokens && column == 0; ++t) prefetch<kFirstCache>(of_tokens + (kTokens + t) * count);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          CodeSums<kAtOnce> pairs[kTokens][kVectorsOfTile];
#pragma GCC unroll 8
          for (int i = 0; i < kWords; ++i) {
            IntVec codes[kVectorsOfTile];
            for (int at = 0; at < kVectorsOfTile; ++at)
              codes[at] = load_int(piece->codes[part * kWords + i][column + at * kWidth]);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
              const IntVec x = set1_int(word(of_tokens[t * count].values, part * kWords + i));
              for (int at = 0; at < kVectorsOfTile; ++at) pairs[t][at].add(i, codes[at], x);
            }
          }
#pragma GCC unroll 2
          for (int at = 0; at < kVectorsOfTile; ++at) {
            const int64_t first = column + at * kWidth;
            const Vec scale = load(piece->scales[part] + first), minimum = load(piece->minima[part] + first);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
              float* const to = sums + t * kPanel + first;
              Vec sum = load(to);
              add_scaled<kWithMinima, kAtOnce>(sum, pairs[t][at].template whole<kWords>(), scale, minimum,
                                               of_tokens[t * count], part);
              store(to, sum);
            }
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
