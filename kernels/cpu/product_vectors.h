// product.cpp for processors without matrix units: each vector of weights is multiplied with some tokens while it is in a
// register. Included by it alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

constexpr int kVectors = kPanel / kWidth;

inline float word(const BF16* pair) {
  float bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

inline Vec words(const BF16* pairs) { return load(reinterpret_cast<const float*>(pairs)); }

inline Vec add_pairs(Vec sum, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
#else
  return fma(second_of_pairs(a), second_of_pairs(b), fma(first_of_pairs(a), first_of_pairs(b), sum));
#endif
}

// One panel for kTokens tokens from `token` on.
template <int kTokens, class Weight>
void multiply_panel(const ProductArgs& args, int64_t panel, const Weight* weights_of_panel, int64_t token) {
  const BF16* x = x_of(args, token);
  Blocks<Weight> blocks(weights_of_panel, args.in_features / kPanel);
  const Weight* ahead = weights_of_panel + kAhead<Weight>;
  Vec sums[kTokens][kVectors] = {};
  for (int64_t k = 0; k < args.in_features; k += kPanel, ahead += kBlock) {
    const BF16* block = blocks.next();
    for (int64_t pair = 0; pair < kTile; ++pair) {
      Vec weights[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const int64_t column = i * kWidth;
        weights[i] = words(block + column / kTile * kTile * kPanel + pair * kPanel + column % kTile * 2);
      }
      fetch<_MM_HINT_T0>(ahead + pair * 2 * kPanel, 2 * kPanel);
      for (int t = 0; t < kTokens; ++t) {
        const Vec of_token = set1(word(x + t * args.x_stride + k + 2 * pair));
        for (int i = 0; i < kVectors; ++i) sums[t][i] = add_pairs(sums[t][i], weights[i], of_token);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    alignas(64) float line[kPanel];
    for (int i = 0; i < kVectors; ++i) store(line + i * kWidth, sums[t][i]);
    finish_line(args, panel, token + t, line);
  }
}

// As many tokens at once as there are registers for their sums.
constexpr int kMostTokens = kSums / kVectors;

class Multiplier {
 public:
  static constexpr int64_t kTokensAtOnce = kMostTokens;

  // Tokens begin to end by one panel, whose weights are `weights`.
  template <class Weight>
  void multiply(const ProductArgs& args, int64_t panel, const Weight* weights, int64_t begin, int64_t end) {
    int64_t token = begin;
    for (; token + kMostTokens <= end; token += kMostTokens) multiply_panel<kMostTokens>(args, panel, weights, token);
    if constexpr (kMostTokens > 4)
      for (; token + 4 <= end; token += 4) multiply_panel<4>(args, panel, weights, token);
    for (; token + 2 <= end; token += 2) multiply_panel<2>(args, panel, weights, token);
    for (; token < end; ++token) multiply_panel<1>(args, panel, weights, token);
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
