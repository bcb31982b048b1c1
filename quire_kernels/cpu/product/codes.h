// Products of int8 tokens with coded weights (coded.h). Sums over the inputs of a scale are integers, so they do not
// depend on how they are made: with few tokens, vectors take the codes as they are stored; with many, vectors or matrix
// units take them from scratch memory, where each panel is put once in the order of multiplication. Matrix units gain
// nothing where the sums of 16 inputs have a scale. AVX2 has a multiplier of its own (code_tiles.h). Included only by
// product.cpp.
#pragma once

#include "product/vectors.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kWordsOfPiece = kPanel / 4;

template <class Format_>
struct Int8ByCoded {
  using Format = Format_;
  using X = int8_t;
  using Weight = std::byte;
  using Sum = float;
  using Expander = CodedExpander<Format>;
};

// A piece of a token: its 32 values, the even places of each 8 first, then the sum of each part.
struct TokenPiece {
  int8_t values[kPanel];
  float sums[2];
  int32_t excess;  // AVX2: kBias times the sum, which the sum of products lacks
  std::byte unused[20];
};
static_assert(sizeof(TokenPiece) == 64);

// Tokens `begin` to `end` - 1, which matrix units multiply in tiles of nearly the same number. Each tile has `lines`
// lines; its last lines may be unused. A piece of a tile is packed as its values, line by line, then the sums
// of all lines; that takes no more memory than a TokenPiece for each token.
struct TokenTiles {
  static constexpr int64_t kLinesOfTile = 16, kLineBytes = kPanel + sizeof(float);

  TokenTiles(int64_t begin, int64_t end)
      : begin(begin),
        end(end),
        count((end - begin + kLinesOfTile - 1) / kLinesOfTile),
        lines(padded((end - begin + count - 1) / count, 4)) {}

  int64_t first_of(int64_t tile) const { return begin + (end - begin) * tile / count; }
  int64_t piece_bytes() const { return lines * kLineBytes; }

  const int64_t begin, end, count, lines;
};

// A piece of a panel: the codes of all columns by word after word of a token's values, and for each part their scales,
// and minima that account for what codes stand for.
template <int kParts>
struct PanelPiece {
  uint8_t codes[kWordsOfPiece][kPanel][4];
  float scales[kParts][kPanel], minima[kParts][kPanel];
};

// The parts that all products with codes share: they pack a piece of a token, and expand pieces of panels.
class CodeProducts {
 public:
  static constexpr int64_t kBytesAtOnce = 3 << 18;  // stay in the second cache

 protected:
  static constexpr int kVectorsOfHalf = 16 / kWidth;

  static int64_t pieces(const ProductArgs& args) { return args.in_features / kPanel; }

  // Packs 32 values of a token, and their sums for each part.
  template <int kParts>
  static void pack_piece(const int8_t* x, int8_t* values, float* sums) {
    int of_parts[2] = {};
    for (int half = 0; half < 2; ++half)
      of_parts[half * kParts / 2] += store_evens_first(values + 16 * half, x + 16 * half);
    for (int part = 0; part < kParts; ++part) sums[part] = static_cast<float>(of_parts[part]);
  }

  // A few lines at a time, between the products: a processor stalls when its queue of requests is full.
  static void fetch_ahead(const std::byte* from, int64_t bytes) {
    constexpr int64_t kAhead = 1 << 13;
    for (int64_t line = 0; line < bytes; line += kCacheLine) prefetch<kOnceCache>(from + kAhead + line);
  }

  template <class Format, int kParts>
  static void expand(const Pass& args, CodedBlocks<Format, true, 1>& blocks, PanelPiece<kParts>* to, int64_t count) {
    for (PanelPiece<kParts>* const end = to + count; to < end; ++to) {
      const std::byte* chunk = blocks.next();
      if (args.addends != nullptr) args.addends->step();
      for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, chunk += Format::kCodeBytes) {
          IntVec codes[2][kVectorsOfHalf];
          for (int at = 0; at < kVectorsOfHalf; ++at) {
            IntVec halves[2];
            load_bytes_of<Format>(chunk, at * kWidth, halves);
            for (int half = 0; half < 2; ++half) codes[half][at] = halves[half];
          }
          // Columns one after the other, each with two words.
          const IntVec* pairs = codes[0];
          for (int column = tile * kTile; column < (tile + 1) * kTile; column += kWidth, pairs += 2) {
            store(reinterpret_cast<int32_t*>(to->codes[2 * i][column]), even_lanes(pairs[0], pairs[1]));
            store(reinterpret_cast<int32_t*>(to->codes[2 * i + 1][column]), odd_lanes(pairs[0], pairs[1]));
          }
        }
        for (int part = 0; part < kParts; ++part)
          for (int column = 0; column < kTile; column += kWidth) {
            const int chunk_of_part = part * 4 / kParts;
            store(to->scales[part] + tile * kTile + column, load(blocks.scales(tile, chunk_of_part) + column));
            store(to->minima[part] + tile * kTile + column, load(blocks.minima(tile, chunk_of_part) + column));
          }
      }
    }
  }

  template <class Format>
  static constexpr bool kAddsMinima = Format::kMinima || Format::kZeros || Format::kOffset != 0;

  // Codes of 4 bits that stand for other values than their own.
  template <class Format>
  static constexpr bool kHasTable = Format::kBits == 4 && (Format::kOffset == Iq4Xs::kOffset || Format::kIsFp4);

  // The largest byte that is multiplied, and whether sums of two of its products fit 16 bits. Where it matters and they
  // do not, all bytes are less by kBias, and signed.
  template <class Format>
  static constexpr int kLargest = !kHasTable<Format> ? (1 << Format::kBits) - 1 : Format::kIsFp4 ? 24 : 241;
  template <class Format>
  static constexpr bool kFitsPairs = kLargest<Format> <= 127;
#if defined(__AVX512F__)
  template <class Format>
  static constexpr int kBias = 0;
#else
  template <class Format>
  static constexpr int kBias = kFitsPairs<Format> ? 0 : 128;
#endif

  // Loads the multiplied bytes: codes as in `load_codes`, or their values.
  template <class Format>
  static void load_bytes_of(const std::byte* chunk, int64_t lane, IntVec (&codes)[2]) {
    load_codes<Format>(chunk, lane, codes);
    for (IntVec& half : codes) {
      if constexpr (kHasTable<Format>)
        half = table_of<Format>(half);
      else if constexpr (kBias<Format> != 0)
        half = {half.v ^ static_cast<int32_t>(0x80808080u)};
    }
  }

  template <class Format>
  static IntVec table_of(IntVec codes) {
    alignas(16) static constexpr auto kBytes = [] {
      std::array<uint8_t, 16> bytes{};
      for (int i = 0; i < 16; ++i)
        bytes[i] = static_cast<uint8_t>(static_cast<int>(Format::kValues[i]) + Format::kOffset - kBias<Format>);
      return bytes;
    }();
    return whole(look_up(repeat16(kBytes.data()), bits_of(codes)));
  }
};

#if defined(__AVX512F__)
class CodeMultiplier : public CodeProducts {
 public:
  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs& args) {
    if (kByMatrixUnits<typename Kind::Format>) return 0;
    using Piece = PanelPiece<CodedBlocks<typename Kind::Format, true>::kParts>;
    return args.num_tokens > kFewTokens ? pieces(args) * static_cast<int64_t>(sizeof(Piece)) : 0;
  }

  template <class Kind>
  static int64_t packed_bytes(const ProductArgs& args) {
    return args.num_tokens * pieces(args) * static_cast<int64_t>(sizeof(TokenPiece));
  }

  // Packs pieces begin to end of all tokens.
  template <class Kind>
  static void pack(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
    constexpr int kParts = CodedBlocks<typename Kind::Format, true>::kParts;
    for_passes<Kind, kBytesAtOnce>(args, 0, args.num_tokens, [&](int64_t first, int64_t last) {
      if (kByMatrixUnits<typename Kind::Format> && last - first > kFewTokens) {
        const TokenTiles tiles(first, last);
        for (int64_t tile = 0; tile < tiles.count; ++tile)
          for (int64_t i = begin; i < end; ++i)
            pack_tile<Kind>(args, tiles, tile, i, tile_piece(args, tiles, packed, tile, i));
        return;
      }
      for (int64_t token = first; token < last; ++token)
        for (int64_t i = begin; i < end; ++i) {
          TokenPiece& piece = reinterpret_cast<TokenPiece*>(packed)[token * pieces(args) + i];
          pack_piece<kParts>(x_of<Kind>(args, token) + i * kPanel, piece.values, piece.sums);
        }
    });
  }

  template <class Kind>
  void multiply(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end,
                std::byte* scratch, const std::byte* packed) {
    using Format = typename Kind::Format;
    if constexpr (kByMatrixUnits<Format>) {
      if (end - begin > kFewTokens) {
        const TokenTiles tiles(begin, end);
        return with_count<3>(tiles.lines / 4 - 1, [&]<int kMore>() {
          multiply_tiles<Format, 4 + 4 * kMore>(args, first_panel, last_panel, tiles, packed);
        });
      }
    }
    const auto* tokens = reinterpret_cast<const TokenPiece*>(packed);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) args.addends->start(panel, panel == first_panel, pieces(args));
      if (!kByMatrixUnits<Format> && args.num_tokens > kFewTokens) {
        multiply_expanded<Format>(args, panel, panel + 1 < last_panel, begin, end, scratch, tokens);
        continue;
      }
      for (int64_t token = begin; token < end; token += kTokensAtOnce)
        with_count<kTokensAtOnce>(end - token, [&]<int kTokens>() {
          multiply_panel<Format, kTokens>(args, panel, token, tokens + token * pieces(args), token == begin);
        });
    }
  }

 private:
  // Tokens whose sums all fit into registers, with codes as stored and with expanded ones.
  static constexpr int64_t kTokensAtOnce = 4, kExpandedTokens = 6;
  static constexpr int64_t kFewTokens = 4;

#if defined(__AMX_BF16__)
  template <class Format>
  static constexpr bool kByMatrixUnits = CodedBlocks<Format, true>::kParts == 1;
#else
  template <class Format>
  static constexpr bool kByMatrixUnits = false;
#endif

  template <class AnyByte>
  static AnyByte* tile_piece(const ProductArgs& args, const TokenTiles& tiles, AnyByte* packed, int64_t tile,
                             int64_t piece) {
    return packed + tiles.begin * pieces(args) * static_cast<int64_t>(sizeof(TokenPiece)) +
           (tile * pieces(args) + piece) * tiles.piece_bytes();
  }

  // Packs a piece of a tile; unused lines are zeros.
  template <class Kind>
  static void pack_tile(const ProductArgs& args, const TokenTiles& tiles, int64_t tile, int64_t piece, std::byte* to) {
    const int64_t first = tiles.first_of(tile), count = tiles.first_of(tile + 1) - first;
    auto* values = reinterpret_cast<int8_t*>(to);
    auto* sums = reinterpret_cast<float*>(values + tiles.lines * kPanel);
    for (int64_t line = 0; line < count; ++line)
      pack_piece<1>(x_of<Kind>(args, first + line) + piece * kPanel, values + line * kPanel, sums + line);
    std::memset(values + count * kPanel, 0, (tiles.lines - count) * kPanel);
    std::memset(sums + count, 0, (tiles.lines - count) * sizeof(float));
  }

  template <class Format, int kTokens>
  static void multiply_panel(const Pass& args, int64_t panel, int64_t token, const TokenPiece* tokens, bool is_first) {
    using Blocks = CodedBlocks<Format, true, 1>;
    constexpr int kChunks = 4 / Blocks::kParts;
    const int64_t pieces = args.in_features / kPanel;
    Blocks blocks(args, panel);
    Vec sums[kTokens][2] = {};
    for (int64_t piece = 0; piece < pieces; ++piece, ++tokens) {
      const std::byte* chunk = blocks.next();
      if (is_first && args.addends != nullptr) args.addends->step();
      if (is_first) fetch_ahead(chunk - Format::kScaleBytes, Format::kScaleBytes);
#pragma GCC unroll 2
      for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 2
        for (int part = 0; part < Blocks::kParts; ++part) {
          IntVec pairs[kTokens][2] = {};
#pragma GCC unroll 4
          for (int i = part * kChunks; i < (part + 1) * kChunks; ++i, chunk += Format::kCodeBytes) {
            if (is_first) fetch_ahead(chunk, Format::kCodeBytes);
            IntVec codes[2];
            load_bytes_of<Format>(chunk, 0, codes);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
              const IntVec x = repeat8(tokens[t * pieces].values + 8 * i);
              for (int half = 0; half < 2; ++half)
                pairs[t][half] = add_code_products<kSmall<Format>>(pairs[t][half], codes[half], x);
            }
          }
          const Vec scale = load(blocks.scales(tile, part * kChunks)),
                    minimum = load(blocks.minima(tile, part * kChunks));
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            Vec& sum = sums[t][tile];
            const IntVec evens = even_lanes(pairs[t][0], pairs[t][1]), odds = odd_lanes(pairs[t][0], pairs[t][1]);
            sum = fma(to_floats({evens.v + odds.v}), scale, sum);
            if constexpr (kAddsMinima<Format>) sum = fma(minimum, set1(tokens[t * pieces].sums[part]), sum);
          }
        }
      }
    }
    alignas(64) float lines[kTokens][kPanel];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t)
      for (int tile = 0; tile < 2; ++tile) store(lines[t] + tile * kTile, sums[t][tile]);
    finish(args, panel, token, kTokens, lines[0]);
  }

  template <class Format>
  static void multiply_expanded(const Pass& args, int64_t panel, bool has_next, int64_t begin, int64_t end,
                                std::byte* scratch, const TokenPiece* tokens) {
    constexpr int kParts = CodedBlocks<Format, true>::kParts;
    auto* expanded = reinterpret_cast<PanelPiece<kParts>*>(scratch);
    CodedBlocks<Format, true, 1> blocks(args, panel);
    expand<Format>(args, blocks, expanded, pieces(args));
    const int64_t count = (end - begin + kExpandedTokens - 1) / kExpandedTokens;
    // The next panel is prefetched meanwhile, by each group a share of it.
    const int64_t bytes = Format::panel_bytes(args.in_features, args.grouping), steps = count * pieces(args);
    const int64_t share = has_next ? (bytes / kCacheLine + steps) / steps : 0;
    const char* next = static_cast<const char*>(args.weight) + (panel + 1) * bytes;
    for (int64_t group = 0; group < count; ++group, next += share * pieces(args) * kCacheLine) {
      const int64_t first = begin + (end - begin) * group / count, last = begin + (end - begin) * (group + 1) / count;
      with_count<kExpandedTokens>(last - first, [&]<int kTokens>() {
        multiply_pieces<kParts, kAddsMinima<Format>, kSmall<Format>, kTokens>(
            args, panel, first, tokens + first * pieces(args), expanded, {{next, share}});
      });
    }
  }

  template <int kParts, bool kWithMinima, bool kIsSmall, int kTokens>
  static void multiply_pieces(const Pass& args, int64_t panel, int64_t token, const TokenPiece* tokens,
                              const PanelPiece<kParts>* of_panel, MovingPrefetch<kPrefetchCache, int64_t> ahead) {
    constexpr int kVectorsAtOnce = 2, kWords = kWordsOfPiece / kParts;
    const int64_t pieces = args.in_features / kPanel;
    alignas(64) float lines[kTokens][kPanel];
    for (int64_t column = 0; column < kPanel; column += kVectorsAtOnce * kWidth) {
      Vec sums[kTokens][kVectorsAtOnce] = {};
      const TokenPiece* of_tokens = tokens;
      for (const auto *piece = of_panel, *end = of_panel + pieces; piece < end; ++piece, ++of_tokens) {
        if (column == 0) {
          ahead.fetch_all();
          ahead.go_on();
        }
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          IntVec whole[kTokens][kVectorsAtOnce] = {};
#pragma GCC unroll 8
          for (int i = part * kWords; i < (part + 1) * kWords; ++i) {
            IntVec codes[kVectorsAtOnce];
            for (int at = 0; at < kVectorsAtOnce; ++at) codes[at] = load_int(piece->codes[i][column + at * kWidth]);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
              const IntVec x = set1_int(word(of_tokens[t * pieces].values, i));
              for (int at = 0; at < kVectorsAtOnce; ++at)
                whole[t][at] = add_code_products<kIsSmall>(whole[t][at], codes[at], x);
            }
          }
          for (int at = 0; at < kVectorsAtOnce; ++at) {
            const int64_t first = column + at * kWidth;
            const Vec scale = load(piece->scales[part] + first), minimum = load(piece->minima[part] + first);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
              Vec& sum = sums[t][at];
              sum = fma(to_floats(whole[t][at]), scale, sum);
              if constexpr (kWithMinima) sum = fma(minimum, set1(of_tokens[t * pieces].sums[part]), sum);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t)
        for (int at = 0; at < kVectorsAtOnce; ++at) store(lines[t] + column + at * kWidth, sums[t][at]);
    }
    finish(args, panel, token, kTokens, lines[0]);
  }

#if defined(__AMX_BF16__)
  // Pieces of a panel that are expanded at once and stay in the first cache.
  static constexpr int64_t kPiecesAtOnce = 8;

  template <class Format, int kLines>
  static void multiply_tiles(const Pass& args, int64_t first_panel, int64_t last_panel, const TokenTiles& tiles,
                             const std::byte* packed) {
    alignas(64) PanelPiece<1> expanded[kPiecesAtOnce];
    alignas(64) float sums[kMaxTokens * kPanel];
    const MatrixUnit unit(kLines, kWordsOfPiece);
    const int64_t all = pieces(args), panel_bytes = Format::panel_bytes(args.in_features, args.grouping);
    CodedBlocks<Format, true, 1> blocks(args, first_panel);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) args.addends->start(panel, panel == first_panel, all);
      for (int64_t first = 0; first < all; first += kPiecesAtOnce) {
        const int64_t count = all - first < kPiecesAtOnce ? all - first : kPiecesAtOnce, last = first + count;
        expand<Format>(args, blocks, expanded, count);
        // As many bytes as the stretch has are prefetched, the next ones, of this panel or of the next one.
        const char* weight = static_cast<const char*>(args.weight) + panel * panel_bytes;
        const int64_t begin = panel_bytes * last / all, bytes = begin - panel_bytes * first / all;
        Ahead ahead{weight + begin, weight + begin + bytes, 1 + bytes / kCacheLine / (tiles.count * 2 * count)};
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
          float* to = sums + tile * kLines * kPanel;
          for (int64_t half = 0; half < 2; ++half)
            multiply_tile<kAddsMinima<Format>, kLines>(tile_piece(args, tiles, packed, tile, first), expanded, count,
                                                       half * kTile, first == 0, to, ahead);
          const int64_t token = tiles.first_of(tile);
          if (last == all) finish(args, panel, token, tiles.first_of(tile + 1) - token, to);
        }
      }
    }
  }

  // Memory to prefetch, `lines` cache lines at a time.
  struct Ahead {
    const char *next, *end;
    int64_t lines;

    void fetch() {
      for (int64_t i = 0; i < lines && next < end; ++i, next += kCacheLine) prefetch<kPrefetchCache>(next);
    }
  };

  // A tile of tokens by 16 columns of `count` pieces. The matrix unit is a few pieces ahead of the vectors that scale
  // its sums.
  template <bool kWithMinima, int kLines>
  [[gnu::noinline]] static void multiply_tile(const std::byte* tokens, const PanelPiece<1>* of_panel, int64_t count,
                                              int64_t column, bool is_first, float* to, Ahead& ahead) {
    constexpr int64_t kTurns = 4, kPieceBytes = kLines * TokenTiles::kLineBytes;
    alignas(64) int32_t whole[kTurns][kLines][kTile];
    auto multiply = [&](int64_t piece) {
      _tile_zero(0);
      _tile_loadd(4, tokens + piece * kPieceBytes, kPanel);
      _tile_loadd(6, of_panel[piece].codes[0][column], kPanel * 4);
      _tile_dpbsud(0, 4, 6);
      _tile_stored(0, whole[piece % kTurns], kTile * 4);
    };
    Vec sums[kLines];
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) sums[line] = is_first ? zero() : load(to + line * kPanel + column);
    for (int64_t piece = 0; piece < kTurns - 1 && piece < count; ++piece) multiply(piece);
    for (int64_t piece = 0; piece < count; ++piece) {
      if (piece + kTurns - 1 < count) multiply(piece + kTurns - 1);
      ahead.fetch();
      const auto* of_lines = reinterpret_cast<const float*>(tokens + piece * kPieceBytes + kLines * kPanel);
      const Vec scale = load(of_panel[piece].scales[0] + column), minimum = load(of_panel[piece].minima[0] + column);
#pragma GCC unroll 16
      for (int line = 0; line < kLines; ++line) {
        sums[line] = fma(to_floats(load_int(whole[piece % kTurns][line])), scale, sums[line]);
        if constexpr (kWithMinima) sums[line] = fma(minimum, set1(of_lines[line]), sums[line]);
      }
    }
#pragma GCC unroll 16
    for (int line = 0; line < kLines; ++line) store(to + line * kPanel + column, sums[line]);
  }
#endif

  // No byte that is multiplied is above 127. Products of VNNI are the same for all.
#if defined(__AVX512VNNI__)
  template <class Format>
  static constexpr bool kSmall = false;
#else
  template <class Format>
  static constexpr bool kSmall = kFitsPairs<Format>;
#endif
};
#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
