// Products by vectors: each vector of weights is multiplied with several tokens while it is in a register. Processors
// with matrix units use this only for floats. Included only by product.cpp.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

constexpr int kVectors = kPanel / kWidth;

// Vectors of words of a block, the word of a token that they are multiplied with, and the sums of these products.
template <class Kind>
struct Lanes;

template <class Stored>
struct Lanes<Floats<Stored>> {
  using Words = Vec;

  static Vec load(const Stored* numbers) { return quire::QUIRE_ISA::load(numbers); }
  static Vec of_token(int32_t word) { return set1(std::bit_cast<float>(word)); }
  static Vec add(Vec sum, Vec weights, Vec of_token) { return fma(weights, of_token, sum); }
};

template <>
struct Lanes<Pairs<BF16>> {
  using Words = Vec;

  static Vec load(const void* words) { return quire::QUIRE_ISA::load(static_cast<const float*>(words)); }
  static Vec of_token(int32_t word) { return set1(std::bit_cast<float>(word)); }
  static Vec add(Vec sum, Vec weights, Vec of_token) {
#if defined(__AVX512BF16__)
    const auto pairs = reinterpret_cast<__m512bh>(weights.v), with = reinterpret_cast<__m512bh>(of_token.v);
    return {_mm512_dpbf16_ps(sum.v, pairs, with)};
#else
    sum = fma(first_of_pairs(weights), first_of_pairs(of_token), sum);
    return fma(second_of_pairs(weights), second_of_pairs(of_token), sum);
#endif
  }
};

template <>
struct Lanes<PairsByInt8<BF16>> : Lanes<Pairs<BF16>> {};
template <>
struct Lanes<PairsOfBf12> : Lanes<Pairs<BF16>> {};
template <class Format>
struct Lanes<PairsOfCoded<Format>> : Lanes<Pairs<BF16>> {};

template <>
struct Lanes<Int8ByInt8> {
  using Words = IntVec;

  static IntVec load(const void* words) { return load_int(words); }
  static IntVec of_token(int32_t word) { return set1_int(word); }
  static IntVec add(IntVec sum, IntVec weights, IntVec of_token) { return add_int8_products(sum, weights, of_token); }
};

// Some processors multiply only unsigned with signed values. There the values of tokens are offset, and the sums are
// too large by the product of the weights and the offset.
template <class Kind>
constexpr int32_t kOffset = std::is_same_v<typename Kind::Sum, int32_t> ? kInt8Offset : 0;
template <class Kind>
constexpr bool kHasOffset = kOffset<Kind> != 0;

inline int32_t word(const void* words, int64_t at) {
  int32_t bits;
  std::memcpy(&bits, static_cast<const char*>(words) + at * sizeof(bits), sizeof(bits));
  return bits;
}

// The largest number of tokens whose sums fit in registers while a panel is read. Where it is more than a few, the
// words of a group of tokens are packed side by side, so that the speed does not depend on the length of their lines.
constexpr int64_t kMaxGroup = kWidth == 16 ? 12 : kSums / kVectors;
constexpr bool kPacksTokens = kMaxGroup > 4;

// Tokens of the first of several groups that coded weights are multiplied with, which is when they are expanded. It is
// always the same number, since that is a function for each format; 0: they are expanded before.
constexpr int64_t kCodedGroup = kPacksTokens ? 8 : 0;

// Tokens begin to end in groups of nearly the same size, but for the first one where its size is given.
struct TokenGroups {
  int64_t begin, end, size_of_first;

  template <class Kind>
  static TokenGroups of(int64_t begin, int64_t end) {
    return {begin, end, kIsCoded<Kind> && end - begin > kMaxGroup ? kCodedGroup : 0};
  }

  int64_t count() const { return has_first() + num_equal(); }
  int64_t first_of(int64_t group) const {
    if (has_first() && group == 0) return begin;
    const int64_t start = begin + size_of_first;
    return start + (end - start) * (group - has_first()) / num_equal();
  }

 private:
  int64_t has_first() const { return size_of_first > 0; }
  int64_t num_equal() const { return (end - begin - size_of_first + kMaxGroup - 1) / kMaxGroup; }
};

constexpr int64_t kBytesOfWord = 4;

// Words of a line of x.
template <class Kind>
inline int64_t num_words(const ProductArgs& args) {
  return args.in_features / kLines<Kind> * kWordsOfBlock;
}

// kWidth words of a token, offset where they are multiplied so.
template <class Kind>
inline Vec words_of(const ProductArgs& args, int64_t token, int64_t first) {
  const Vec words = load(reinterpret_cast<const float*>(x_of<Kind>(args, token)) + first);
  return kHasOffset<Kind> ? exclusive_or(words, kOffset<Kind>) : words;
}

// The packed words of a group, word by word for all its tokens.
template <int kTokens>
struct PackedWords {
  const void* words;

  int32_t operator()(int64_t k, int t) const { return word(words, k * kTokens + t); }
};

// The same for tokens that are not packed.
template <class Kind>
class LinesOfWords {
 public:
  LinesOfWords(const ProductArgs& args, int64_t token)
      : lines_(reinterpret_cast<const char*>(x_of<Kind>(args, token))),
        bytes_(args.x_stride * static_cast<int64_t>(sizeof(typename Kind::X))) {}

  int32_t operator()(int64_t k, int t) const { return word(lines_ + t * bytes_, k) ^ kOffset<Kind>; }

 private:
  const char* lines_;
  int64_t bytes_;  // from one to the next
};

// One panel, the next of `blocks`, by kTokens tokens from `token` on; `ahead` is prefetched meanwhile. The first group
// computes the correction of the offset, `excess`, for all groups.
template <class Kind, int kTokens, bool kIsFirst, class AnyBlocks, class AnyWords, class AnyPrefetch>
void multiply_panel(const Pass& args, int64_t panel, AnyBlocks& blocks, AnyWords words, AnyPrefetch ahead,
                    int64_t token, typename Lanes<Kind>::Words (&excess)[kVectors]) {
  using Sum = typename Kind::Sum;
  using Words = typename Lanes<Kind>::Words;
  // A word of the block: an element of the weight where a token's word is a float, else 32 bits.
  using Word = std::conditional_t<std::is_same_v<typename Kind::X, float>, typename Kind::Weight, int32_t>;
  Words sums[kTokens][kVectors] = {}, found[kVectors] = {};
  for (int64_t k = 0, end = num_words<Kind>(args); k < end; k += kWordsOfBlock) {
    // Expanded blocks prefetch as they are expanded, others a few lines at a time as they are multiplied.
    const Word* block;
    if constexpr (kIsExpanded<Kind>)
      block = static_cast<const Word*>(blocks.next(ahead));
    else
      block = static_cast<const Word*>(blocks.next(kNoPrefetch));
    const AnyPrefetch of_block = ahead;
    ahead.go_on();
    if (args.addends != nullptr) args.addends->step();
    for (int64_t at = 0; at < kWordsOfBlock; ++at) {
      if constexpr (kIsCoded<Kind> || !kIsExpanded<Kind>) blocks.go_on(at, of_block);
      Words weights[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const int64_t column = i * kWidth, tile = column / kTile * kTile * kWordsOfBlock;
        weights[i] = Lanes<Kind>::load(block + tile + at * kTile + column % kTile);
        if constexpr (kHasOffset<Kind> && kIsFirst)
          found[i] = add_int8_products(found[i], weights[i], set1_int(kInt8Offset));
      }
      for (int t = 0; t < kTokens; ++t) {
        const Words of_token = Lanes<Kind>::of_token(words(k + at, t));
        for (int i = 0; i < kVectors; ++i) sums[t][i] = Lanes<Kind>::add(sums[t][i], weights[i], of_token);
      }
    }
  }
  if constexpr (kHasOffset<Kind> && kIsFirst) {
    for (int i = 0; i < kVectors; ++i) excess[i] = found[i];
  }
  alignas(64) Sum lines[kTokens][kPanel];
#pragma GCC unroll 16  // completely, so that all sums stay in registers
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kHasOffset<Kind>) sums[t][i] = sums[t][i] - excess[i];
      store(lines[t] + i * kWidth, sums[t][i]);
    }
  }
  finish(args, panel, token, kTokens, lines[0]);
}

// function.operator()<count>() for a count of 1 to kMax.
template <int kMax, class Function>
inline void with_count(int64_t count, Function function) {
  if constexpr (kMax > 1) {
    if (count < kMax) return with_count<kMax - 1>(count, function);
  }
  function.template operator()<kMax>();
}

// The products of one panel with all groups of tokens.
template <class Kind>
class Passes {
 public:
  Passes(const Pass& args, int64_t panel, const TokenGroups& groups, const std::byte* packed)
      : args_(args), panel_(panel), groups_(groups), packed_(packed), blocks_(args.in_features / kLines<Kind>) {}

  // The first group reads the panel from memory. If the panel has to be expanded, its numbers are kept in `scratch` for
  // the other groups, which prefetch the next panel meanwhile.
  void multiply(bool has_next, std::byte* scratch) {
    const int64_t others = groups_.count() - 1;
    if constexpr (kIsCoded<Kind>) {
      auto* numbers = reinterpret_cast<typename Kind::X*>(scratch);
      if (groups_.end - groups_.begin == 1) {
        KeptBlocks<Kind, 2> blocks(args_, panel_, blocks_, numbers);
        return multiply_tokens<Kind, true, 1>(groups_.begin, blocks, first_ahead());
      }
      if constexpr (kCodedGroup > 0) {
        if (others > 0) {
          KeptBlocks<Kind> blocks(args_, panel_, blocks_, numbers);
          multiply_tokens<Kind, true, kCodedGroup>(groups_.begin, blocks, first_ahead());
          return multiply_others(StoredBlocks<Pairs<typename Kind::X>>(numbers), 1, has_next);
        }
      }
      BlockExpander<Kind> expander(args_, panel_, blocks_);
      const char* ahead = bytes_of<Kind>(args_, panel_) + (1 << 12);
      for (int64_t block = 0; block < blocks_; ++block, ahead += block_bytes<Kind>())
        expander.expand(numbers + block * kNumbersOfBlock, Prefetch<kOnceCache>{ahead, kLinesOfBlock});
      multiply_others(StoredBlocks<Pairs<typename Kind::X>>(numbers), 0, has_next);
    } else if (others == 0) {
      Blocks<Kind> blocks(args_, panel_, blocks_);
      multiply_first(blocks);
    } else if constexpr (kIsExpanded<Kind>) {
      auto* numbers = reinterpret_cast<typename Kind::X*>(scratch);
      KeptBlocks<Kind> blocks(args_, panel_, blocks_, numbers);
      multiply_first(blocks);
      multiply_others(StoredBlocks<Pairs<typename Kind::X>>(numbers), 1, has_next);
    } else {
      const StoredBlocks<Kind> all(args_, panel_, blocks_);
      StoredBlocks<Kind> blocks = all;
      multiply_first<kPrefetchCache>(blocks);
      multiply_others(all, 1, has_next);
    }
  }

 private:
  static constexpr int64_t kLinesOfBlock = block_bytes<Kind>() / kCacheLine;

  template <int kCache = kOnceCache>
  MovingPrefetch<kCache, Constant<kLinesOfBlock>> first_ahead() const {
    constexpr int64_t kPrefetchDistance = 1 << 13;
    return {{bytes_of<Kind>(args_, panel_) + kPrefetchDistance, {}}};
  }

  template <int kCache = kOnceCache, class AnyBlocks>
  void multiply_first(AnyBlocks& blocks) {
    multiply_group<Kind, true>(0, blocks, first_ahead<kCache>());
  }

  template <class Multiplied>
  void multiply_others(const StoredBlocks<Multiplied>& blocks, int64_t first, bool has_next) {
    const int64_t count = groups_.count(), others = count - first;
    const int64_t share = has_next ? (kLinesOfBlock + others - 1) / others : 0;
    const char* next = bytes_of<Kind>(args_, panel_ + 1);
    for (int64_t group = first; group < count; ++group, next += share * blocks_ * kCacheLine) {
      StoredBlocks<Multiplied> again = blocks;
      multiply_group<Multiplied, false>(group, again, MovingPrefetch<kPrefetchCache, int64_t>{{next, share}});
    }
  }

  template <class Multiplied, bool kIsFirst, class AnyBlocks, class AnyPrefetch>
  void multiply_group(int64_t group, AnyBlocks& blocks, const AnyPrefetch& ahead) {
    const int64_t first = groups_.first_of(group);
    with_count<kMaxGroup>(groups_.first_of(group + 1) - first, [&]<int kTokens>() {
      multiply_tokens<Multiplied, kIsFirst, kTokens>(first, blocks, ahead);
    });
  }

  template <class Multiplied, bool kIsFirst, int kTokens, class AnyBlocks, class AnyPrefetch>
  void multiply_tokens(int64_t first, AnyBlocks& blocks, const AnyPrefetch& ahead) {
    auto multiply = [&](const auto& words) {
      multiply_panel<Multiplied, kTokens, kIsFirst || !kHasOffset<Kind>>(args_, panel_, blocks, words, ahead, first,
                                                                         excess_);
    };
    if constexpr (kPacksTokens && kTokens > 1)
      multiply(PackedWords<kTokens>{packed_ + first * num_words<Kind>(args_) * kBytesOfWord});
    else
      multiply(LinesOfWords<Kind>(args_, first));
  }

  const Pass& args_;
  const int64_t panel_;
  const TokenGroups groups_;
  const std::byte* packed_;
  const int64_t blocks_;
  typename Lanes<Kind>::Words excess_[kVectors];
};

// Products of many tokens without AVX-512: AVX2 has few registers and no products of pairs, so all numbers become
// floats once, a panel in scratch memory, and tokens as they are packed. Sums are rounded as with few tokens.
template <class Kind>
class FloatTiles {
 public:
  static bool are_for(const ProductArgs& args) { return args.parts == nullptr && args.num_tokens >= 2 * kGroup; }
  static int64_t scratch_bytes(const ProductArgs& args) { return args.in_features * kPanel * sizeof(float); }
  static int64_t packed_bytes(const ProductArgs& args) { return args.num_tokens * args.in_features * sizeof(float); }

  // Packs tokens first to last - 1, in blocks begin to end of kWordsOfBlock numbers. A group's tokens are side by side.
  static void pack(const ProductArgs& args, int64_t first, int64_t last, int64_t begin, int64_t end, float* packed) {
    for_groups(first, last, [&](int64_t token, int64_t count) {
      float* to = packed + token * args.in_features + begin * kWordsOfBlock * count;
      for (int64_t k = begin * kWordsOfBlock; k < end * kWordsOfBlock; k += kWidth) {
        Vec lines[kWidth];
        for (int t = 0; t < kWidth; ++t) lines[t] = t < count ? load(x_of<Kind>(args, token + t) + k) : zero();
        transpose(lines);
        for (int i = 0; i < kWidth; ++i, to += count) store(to, lines[i], static_cast<int>(count));
      }
    });
  }

  // One panel by tokens begin to end - 1.
  static void multiply(const Pass& args, int64_t panel, int64_t begin, int64_t end, std::byte* scratch,
                       const std::byte* packed) {
    auto* numbers = reinterpret_cast<float*>(scratch);
    expand(args, panel, numbers);
    for_groups(begin, end, [&](int64_t token, int64_t count) {
      const float* of_group = reinterpret_cast<const float*>(packed) + token * args.in_features;
      with_count<kGroup>(
          count, [&]<int kTokens>() { multiply_group<kTokens>(args, panel, token, numbers, of_group); });
    });
  }

 private:
  static constexpr int64_t kGroup = 6;

  // Calls function(first token, tokens) for each group.
  template <class Function>
  static void for_groups(int64_t begin, int64_t end, Function function) {
    for (int64_t at = begin; at < end; at += kGroup) function(at, end - at < kGroup ? end - at : kGroup);
  }

  // A panel to [tiles, in_features, kTile].
  static void expand(const ProductArgs& args, int64_t panel, float* numbers) {
    const auto* words = reinterpret_cast<const float*>(bytes_of<Kind>(args, panel));
    for (int64_t k = 0, end = num_words<Kind>(args); k < end; k += kWordsOfBlock)
      for (int64_t tile = 0; tile < kPanel / kTile; ++tile)
        for (int64_t at = k; at < k + kWordsOfBlock; ++at)
          for (int64_t column = 0; column < kTile; column += kWidth, words += kWidth) {
            float* to = numbers + tile * args.in_features * kTile + column;
            if constexpr (std::is_same_v<Kind, Pairs<BF16>>) {
              store(to + 2 * at * kTile, first_of_pairs(load(words)));
              store(to + (2 * at + 1) * kTile, second_of_pairs(load(words)));
            } else {
              store(to + at * kTile, load(words));
            }
          }
  }

  template <int kTokens>
  static void multiply_group(const Pass& args, int64_t panel, int64_t token, const float* numbers,
                             const float* packed) {
    constexpr int kVectorsOfTile = kTile / kWidth;
    alignas(64) float lines[kTokens][kPanel];
    for (int64_t tile = 0; tile < kPanel / kTile; ++tile, numbers += args.in_features * kTile) {
      Vec sums[kTokens][kVectorsOfTile] = {};
      for (int64_t k = 0; k < args.in_features; ++k) {
        Vec weights[kVectorsOfTile];
        for (int i = 0; i < kVectorsOfTile; ++i) weights[i] = load(numbers + k * kTile + i * kWidth);
        for (int t = 0; t < kTokens; ++t) {
          const Vec of_token = set1(packed[k * kTokens + t]);
          for (int i = 0; i < kVectorsOfTile; ++i) sums[t][i] = fma(weights[i], of_token, sums[t][i]);
        }
      }
      for (int t = 0; t < kTokens; ++t)
        for (int i = 0; i < kVectorsOfTile; ++i) store(lines[t] + tile * kTile + i * kWidth, sums[t][i]);
    }
    finish(args, panel, token, kTokens, lines[0]);
  }
};

// Function<FloatTiles<Kind>>() if a product is computed so; returns whether it is.
template <class Kind, class Function>
inline bool with_float_tiles(const ProductArgs& args, Function function) {
  if constexpr (kWidth == 8 && (std::is_same_v<Kind, Pairs<BF16>> || std::is_same_v<Kind, Floats<float>>)) {
    if (FloatTiles<Kind>::are_for(args)) {
      function(FloatTiles<Kind>());
      return true;
    }
  }
  return false;
}

class VectorMultiplier {
 public:
  // The third cache is fast enough for the lines of tokens, which are read in order; a panel stays in the second.
  static constexpr int64_t kBytesAtOnce = 1 << 22;

  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs& args) {
    int64_t bytes = 0;
    if (with_float_tiles<Kind>(args, [&](auto tiles) { bytes = tiles.scratch_bytes(args); })) return bytes;
    const bool once = kIsCoded<Kind> || (kIsExpanded<Kind> && args.num_tokens > kMaxGroup);
    return once ? args.in_features * kPanel * static_cast<int64_t>(sizeof(typename Kind::X)) : 0;
  }

  template <class Kind>
  static int64_t packed_bytes(const ProductArgs& args) {
    int64_t bytes = 0;
    if (with_float_tiles<Kind>(args, [&](auto tiles) { bytes = tiles.packed_bytes(args); })) return bytes;
    return kPacksTokens && args.num_tokens > 1 ? args.num_tokens * num_words<Kind>(args) * kBytesOfWord : 0;
  }

  // Packs blocks begin to end of the lines of all tokens.
  template <class Kind>
  static void pack(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
    for_passes<Kind, kBytesAtOnce>(args, 0, args.num_tokens, [&](int64_t first, int64_t last) {
      auto* to = reinterpret_cast<float*>(packed);
      if (with_float_tiles<Kind>(args, [&](auto tiles) { tiles.pack(args, first, last, begin, end, to); })) return;
      const auto groups = TokenGroups::of<Kind>(first, last);
      for (int64_t group = 0; group < groups.count(); ++group)
        pack_group<Kind>(args, groups.first_of(group), groups.first_of(group + 1), begin, end, to);
    });
  }

  // Multiplies tokens begin to end with some panels.
  template <class Kind>
  void multiply(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end,
                std::byte* scratch, const std::byte* packed) {
    const auto groups = TokenGroups::of<Kind>(begin, end);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (with_float_tiles<Kind>(args, [&](auto tiles) { tiles.multiply(args, panel, begin, end, scratch, packed); }))
        continue;
      if (args.addends != nullptr)
        args.addends->start(panel, panel == first_panel, groups.count() * num_words<Kind>(args) / kWordsOfBlock);
      Passes<Kind>(args, panel, groups, packed).multiply(panel + 1 < last_panel, scratch);
    }
  }

 private:
  // Packs tokens first to last - 1, which are a group.
  template <class Kind>
  static void pack_group(const ProductArgs& args, int64_t first, int64_t last, int64_t begin, int64_t end,
                         float* packed) {
    const int count = static_cast<int>(last - first);
    float* to = packed + first * num_words<Kind>(args) + begin * kWordsOfBlock * count;
    for (int64_t k = begin * kWordsOfBlock; k < end * kWordsOfBlock; k += kWidth) {
      Vec lines[kWidth];
      for (int t = 0; t < kWidth; ++t) lines[t] = t < count ? words_of<Kind>(args, first + t, k) : zero();
      transpose(lines);
      for (int i = 0; i < kWidth; ++i, to += count) store(to, lines[i], count);
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
