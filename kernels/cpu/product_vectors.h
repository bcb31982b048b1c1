// product.cpp by vectors, for all but what matrix units do where the processor has them: each vector of weights is
// multiplied with some tokens while it is in a register. Included by it alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

constexpr int kVectors = kPanel / kWidth;

// A vector of words of a block, what a word of a token is multiplied with them as, and sums of such products.
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
struct Lanes<PairsByCodes<BF16>> : Lanes<Pairs<BF16>> {};
template <>
struct Lanes<PairsOfShort> : Lanes<Pairs<BF16>> {};

template <>
struct Lanes<CodesByCodes> {
  using Words = Whole;

  static Whole load(const void* words) { return load_whole(words); }
  static Whole of_token(int32_t word) { return set1_whole(word ^ kCodeOffset); }
  static Whole add(Whole sum, Whole weights, Whole of_token) { return add_codes(sum, weights, of_token); }
};

// What sums are too much by where the processor multiplies with codes that are offset.
template <class Sum>
constexpr bool kIsOff = std::is_same_v<Sum, int32_t> && kCodeOffset != 0;

inline int32_t word(const void* words, int64_t at) {
  int32_t bits;
  std::memcpy(&bits, static_cast<const char*>(words) + at * sizeof(bits), sizeof(bits));
  return bits;
}

// Tokens whose sums are in registers while a panel passes by, and the most of them. Where they are more than a few their words
// are packed: those of a group lie side by side, so that lines of all lengths are read alike.
constexpr int64_t kMostOfGroup = kWidth == 16 ? 12 : kSums / kVectors;
constexpr bool kPacksTokens = kMostOfGroup > 4;

// Tokens begin to end in groups of nearly the same size.
struct Groups {
  int64_t begin, end;

  int64_t count() const { return (end - begin + kMostOfGroup - 1) / kMostOfGroup; }
  int64_t first_of(int64_t group) const { return begin + (end - begin) * group / count(); }
};

// Words of a line of x.
template <class Kind>
inline int64_t num_words(const ProductArgs& args) {
  return args.in_features / kLines<Kind> * kWordsOfBlock;
}

// A group's words as they are multiplied: word k of token t is at k * word_stride + t * token_stride.
template <int kTokens>
struct PackedWords {
  static constexpr int64_t kWordStride = kTokens, kTokenStride = 1;
  const void* words;

  int32_t operator()(int64_t k, int t) const { return word(words, k * kTokens + t); }
};

struct LinesOfWords {
  const char* lines;
  int64_t bytes;  // from one to the next

  int32_t operator()(int64_t k, int t) const { return word(lines + t * bytes, k); }
};

template <class Kind>
inline LinesOfWords lines_of(const ProductArgs& args, int64_t token) {
  return {reinterpret_cast<const char*>(x_of<Kind>(args, token)), args.x_stride * static_cast<int64_t>(sizeof(typename Kind::X))};
}

// One panel for kTokens tokens from `token` on; `ahead` is what to ask for while its blocks go by.
template <class Kind, int kTokens, class AnyBlocks, class AnyWords, class AnyAhead>
void multiply_panel(const ProductArgs& args, int64_t panel, AnyBlocks blocks, AnyWords words, AnyAhead ahead, int64_t token) {
  using Sum = typename Kind::Sum;
  using Words = typename Lanes<Kind>::Words;
  // A word of what is multiplied: an element where that is floating on its way, else 32 bits.
  using Word = std::conditional_t<std::is_same_v<typename Kind::X, float>, typename Kind::Weight, int32_t>;
  Words sums[kTokens][kVectors] = {}, off[kVectors] = {};
  for (int64_t k = 0, end = num_words<Kind>(args); k < end; k += kWordsOfBlock) {
    const Word* block = static_cast<const Word*>(blocks.next(ahead));
    ahead.go_on();
    for (int64_t at = 0; at < kWordsOfBlock; ++at) {
      Words weights[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const int64_t column = i * kWidth, tile = column / kTile * kTile * kWordsOfBlock;
        weights[i] = Lanes<Kind>::load(block + tile + at * kTile + column % kTile);
        if constexpr (kIsOff<Sum>) off[i] = add_codes(off[i], weights[i], set1_whole(kCodeOffset));
      }
      for (int t = 0; t < kTokens; ++t) {
        const Words of_token = Lanes<Kind>::of_token(words(k + at, t));
        for (int i = 0; i < kVectors; ++i) sums[t][i] = Lanes<Kind>::add(sums[t][i], weights[i], of_token);
      }
    }
  }
  alignas(64) Sum lines[kTokens][kPanel];
  for (int t = 0; t < kTokens; ++t)
    for (int i = 0; i < kVectors; ++i) store(lines[t] + i * kWidth, kIsOff<Sum> ? sums[t][i] - off[i] : sums[t][i]);
  finish(args, panel, token, kTokens, lines[0]);
}

// function.operator()<count>() for a count of 1 to kMost.
template <int kMost, class Function>
inline void with_count(int64_t count, Function function) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, function);
  }
  function.template operator()<kMost>();
}

class VectorMultiplier {
 public:
  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs& args) {
    const bool once = kIsMade<Kind> && args.num_tokens > kMostOfGroup;
    return once ? args.in_features * kPanel * static_cast<int64_t>(sizeof(typename Kind::X)) : 0;
  }

  template <class Kind>
  static int64_t packed_bytes(const ProductArgs& args) {
    return kPacksTokens && args.num_tokens > 1 ? args.num_tokens * num_words<Kind>(args) * 4 : 0;
  }

  // Blocks begin to end of the lines of all tokens.
  template <class Kind>
  static void pack(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
    const int64_t step = tokens_at_once<Kind>(args);
    for (int64_t token = 0; token < args.num_tokens; token += step) {
      const Groups groups{token, token + step < args.num_tokens ? token + step : args.num_tokens};
      for (int64_t group = 0; group < groups.count(); ++group)
        pack_group<Kind>(args, groups.first_of(group), groups.first_of(group + 1), begin, end, reinterpret_cast<float*>(packed));
    }
  }

  // Tokens begin to end by some panels.
  template <class Kind>
  void multiply(const ProductArgs& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end,
                std::byte* scratch, const std::byte* packed) {
    const Groups groups{begin, end};
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (groups.count() > 1)
        multiply_groups<Kind>(args, panel, panel + 1 < last_panel, groups, scratch, packed);
      else
        multiply_group<Kind>(args, panel, Blocks<Kind>(args, panel, num_blocks<Kind>(args)), own_ahead<Kind>(args, panel), begin,
                             end, packed);
    }
  }

 private:
  template <class Kind>
  static int64_t num_blocks(const ProductArgs& args) {
    return args.in_features / kLines<Kind>;
  }

  // What comes next of the panel itself.
  template <class Kind>
  static auto own_ahead(const ProductArgs& args, int64_t panel) {
    constexpr int64_t kBytesAhead = 1 << 13;
    using Lines = Constant<block_bytes<Kind>() / kCacheLine>;
    return Going<_MM_HINT_T1, Lines>{{bytes_of<Kind>(args, panel) + kBytesAhead, {}}};
  }

  // The first group reads a panel from memory, where weights that are to be made numbers are so once, in `scratch`. While the
  // others pass by it they ask for the next one.
  template <class Kind>
  static void multiply_groups(const ProductArgs& args, int64_t panel, bool has_next, const Groups& groups, std::byte* scratch,
                              const std::byte* packed) {
    const int64_t blocks = num_blocks<Kind>(args), others = groups.count() - 1;
    const int64_t share = has_next ? (block_bytes<Kind>() / kCacheLine + others - 1) / others : 0;
    auto multiply = [&]<class Multiplied>(int64_t group, const auto& all, const auto& ahead) {
      multiply_group<Multiplied>(args, panel, all, ahead, groups.first_of(group), groups.first_of(group + 1), packed);
    };
    auto multiply_others = [&]<class Multiplied>(const StoredBlocks<Multiplied>& all) {
      const char* next = bytes_of<Kind>(args, panel + 1);
      for (int64_t group = 1; group <= others; ++group, next += share * blocks * kCacheLine)
        multiply.template operator()<Multiplied>(group, all, Going<_MM_HINT_T1, int64_t>{{next, share}});
    };
    if constexpr (kIsMade<Kind>) {
      auto* numbers = reinterpret_cast<typename Kind::X*>(scratch);
      multiply.template operator()<Kind>(0, KeptBlocks<Kind>(args, panel, blocks, numbers), own_ahead<Kind>(args, panel));
      multiply_others(StoredBlocks<Pairs<typename Kind::X>>(numbers));
    } else {
      const StoredBlocks<Kind> all(args, panel, blocks);
      multiply.template operator()<Kind>(0, all, own_ahead<Kind>(args, panel));
      multiply_others(all);
    }
  }

  // A group by one panel.
  template <class Kind, class AnyBlocks, class AnyAhead>
  static void multiply_group(const ProductArgs& args, int64_t panel, const AnyBlocks& blocks, const AnyAhead& ahead, int64_t first,
                             int64_t last, const std::byte* packed) {
    with_count<kMostOfGroup>(last - first, [&]<int kTokens>() {
      if constexpr (kPacksTokens && kTokens > 1)
        multiply_panel<Kind, kTokens>(args, panel, blocks, PackedWords<kTokens>{packed + first * num_words<Kind>(args) * 4}, ahead,
                                      first);
      else
        multiply_panel<Kind, kTokens>(args, panel, blocks, lines_of<Kind>(args, first), ahead, first);
    });
  }

  // Tokens first to last - 1, which are a group.
  template <class Kind>
  static void pack_group(const ProductArgs& args, int64_t first, int64_t last, int64_t begin, int64_t end, float* packed) {
    const int count = static_cast<int>(last - first);
    float* to = packed + first * num_words<Kind>(args) + begin * kWordsOfBlock * count;
    for (int64_t k = begin * kWordsOfBlock; k < end * kWordsOfBlock; k += kWidth) {
      Vec lines[kWidth];
      for (int t = 0; t < kWidth; ++t)
        lines[t] = t < count ? load(reinterpret_cast<const float*>(x_of<Kind>(args, first + t)) + k) : zero();
      transpose(lines);
      for (int i = 0; i < kWidth; ++i, to += count) store(to, lines[i], count);
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
