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

// One panel for kTokens tokens from `token` on; `ahead` is what to ask for, as fast as its blocks go by.
template <class Kind, int kTokens, class AnyBlocks>
void multiply_panel(const ProductArgs& args, int64_t panel, AnyBlocks blocks, const char* ahead, int64_t token) {
  using Sum = typename Kind::Sum;
  using Words = typename Lanes<Kind>::Words;
  // A word of what is multiplied: an element where that is floating on its way, else 32 bits.
  using Word = std::conditional_t<std::is_same_v<typename Kind::X, float>, typename Kind::Weight, int32_t>;
  constexpr int64_t kBytes = block_bytes<Kind>();
  const auto* x = x_of<Kind>(args, token);
  Words sums[kTokens][kVectors] = {}, off[kVectors] = {};
  for (int64_t k = 0; k < args.in_features; k += kLines<Kind>, ahead += kBytes) {
    const Word* block = static_cast<const Word*>(blocks.next(Ahead<kCache<Kind>, Constant<kBytes / kCacheLine>>{ahead, {}}));
    for (int64_t at = 0; at < kWordsOfBlock; ++at) {
      Words weights[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const int64_t column = i * kWidth, tile = column / kTile * kTile * kWordsOfBlock;
        weights[i] = Lanes<Kind>::load(block + tile + at * kTile + column % kTile);
        if constexpr (kIsOff<Sum>) off[i] = add_codes(off[i], weights[i], set1_whole(kCodeOffset));
      }
      for (int t = 0; t < kTokens; ++t) {
        const Words of_token = Lanes<Kind>::of_token(word(x + t * args.x_stride + k, at));
        for (int i = 0; i < kVectors; ++i) sums[t][i] = Lanes<Kind>::add(sums[t][i], weights[i], of_token);
      }
    }
  }
  alignas(64) Sum lines[kTokens][kPanel];
  for (int t = 0; t < kTokens; ++t)
    for (int i = 0; i < kVectors; ++i) store(lines[t] + i * kWidth, kIsOff<Sum> ? sums[t][i] - off[i] : sums[t][i]);
  finish(args, panel, token, kTokens, lines[0]);
}

// As many tokens at once as there are registers for their sums.
constexpr int kTokensOfRegisters = kSums / kVectors;

class VectorMultiplier {
 public:
  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs& args) {
    const bool once = kIsMade<Kind> && args.num_tokens > kTokensOfRegisters;
    return once ? args.in_features * kPanel * static_cast<int64_t>(sizeof(typename Kind::X)) : 0;
  }

  // Tokens begin to end by some panels. Where they are more than registers hold sums of, weights that are to be made
  // numbers are so once, in `scratch`.
  template <class Kind>
  void multiply(const ProductArgs& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end,
                std::byte* scratch) {
    const int64_t blocks = args.in_features / kLines<Kind>;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const char* ahead = bytes_of<Kind>(args, panel) + kAhead<Kind>;
      if constexpr (kIsMade<Kind>) {
        if (end - begin > kTokensOfRegisters) {
          using X = typename Kind::X;
          make_panel<Kind>(args, panel, reinterpret_cast<X*>(scratch));
          multiply_tokens<Pairs<X>>(args, panel, [=] { return StoredBlocks<Pairs<X>>(scratch); }, ahead, begin, end);
          continue;
        }
      }
      multiply_tokens<Kind>(args, panel, [&, panel] { return Blocks<Kind>(args, panel, blocks); }, ahead, begin, end);
    }
  }

 private:
  template <class Kind>
  static void make_panel(const ProductArgs& args, int64_t panel, typename Kind::X* numbers) {
    typename Kind::Maker maker(args, panel);
    for (int64_t k = 0; k < args.in_features; k += kLines<Kind>, numbers += kNumbersOfBlock) {
      maker.start_block();
      for (int64_t i = 0; i < kNumbersOfBlock; i += kMadeAtOnce) maker.make(numbers + i);
      maker.end_block(numbers);
    }
  }

  // By one panel, whose blocks blocks() gives.
  template <class Kind, class Function>
  static void multiply_tokens(const ProductArgs& args, int64_t panel, Function blocks, const char* ahead, int64_t token,
                              int64_t end) {
    for (; token + kTokensOfRegisters <= end; token += kTokensOfRegisters)
      multiply_panel<Kind, kTokensOfRegisters>(args, panel, blocks(), ahead, token);
    if constexpr (kTokensOfRegisters > 4)
      for (; token + 4 <= end; token += 4) multiply_panel<Kind, 4>(args, panel, blocks(), ahead, token);
    for (; token + 2 <= end; token += 2) multiply_panel<Kind, 2>(args, panel, blocks(), ahead, token);
    for (; token < end; ++token) multiply_panel<Kind, 1>(args, panel, blocks(), ahead, token);
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
