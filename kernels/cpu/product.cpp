// Products of a few or many tokens with packed weights (pack_weight.cpp), panel by panel.
//
// For few tokens all of it is reading the weights, so memory is asked well ahead of their use. Matrix units, where the
// processor has them, are the faster way even for a single token: 85% of what a plain sum reads, where vectors gave 64%.
#include "finish.h"
#include "isa.h"
#include "matmul.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTile = kPanel / 2;
// Elements of a block: kPanel lines of a panel.
constexpr int64_t kBlock = kPanel * kPanel;
// How far ahead of its use a weight is asked for, in elements.
template <class Weight>
constexpr int64_t kAhead = 8 * kBlock / sizeof(Weight);
constexpr int64_t kCacheLine = 64;

inline const BF16* x_of(const ProductArgs& args, int64_t token) {
  return static_cast<const BF16*>(args.x) + token * args.x_stride;
}

template <class Weight>
inline const Weight* panel_of(const ProductArgs& args, int64_t panel) {
  return static_cast<const Weight*>(args.weight) + panel * args.in_features * kPanel;
}

template <_mm_hint kHint, class Weight>
inline void fetch(const Weight* weights, int64_t elements) {
  const char* from = reinterpret_cast<const char*>(weights);
  for (int64_t i = 0; i < elements * static_cast<int64_t>(sizeof(Weight)); i += kCacheLine) _mm_prefetch(from + i, kHint);
}

// Codes as bfloat16, in which they are exact; `count` is a multiple of 32.
inline void make_floating(BF16* to, const int8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(load(codes + i + 16).v, load(codes + i).v);
    _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(both));
#else
    for (int64_t j = i; j < i + 32; j += kWidth) store(to + j, load(codes + j));
#endif
  }
}

// The blocks of a panel in bfloat16, one after the other: those that lie in memory, or codes made floating.
template <class Weight>
class Blocks {
 public:
  Blocks(const Weight* panel, int64_t) : block_(panel) {}
  const BF16* next() {
    const BF16* block = block_;
    block_ += kBlock;
    return block;
  }

 private:
  const BF16* block_;
};

// One block is made floating ahead of its use, while the one before it is multiplied.
template <>
class Blocks<int8_t> {
 public:
  Blocks(const int8_t* panel, int64_t count) : codes_(panel), left_(count) { make_next(); }
  const BF16* next() {
    const BF16* block = blocks_[turn_ ^ 1];
    make_next();
    return block;
  }

 private:
  void make_next() {
    if (left_-- > 0) make_floating(blocks_[turn_], codes_, kBlock);
    codes_ += kBlock;
    turn_ ^= 1;
  }

  alignas(64) BF16 blocks_[2][kBlock];
  const int8_t* codes_;
  int64_t left_;
  int turn_ = 0;
};

// Tokens whose lines stay in the second cache while all panels pass by.
inline int64_t tokens_at_once(const ProductArgs& args) {
  constexpr int64_t kBytes = 3 << 18;
  const int64_t tokens = kBytes / (2 * (args.in_features < 1 ? 1 : args.in_features)) / kPanel * kPanel;
  return tokens < kPanel ? kPanel : tokens;
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#if defined(__AMX_BF16__)
#include "product_amx.h"
#else
#include "product_vectors.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

// Tokens by all panels that a thread has; lines of `begin` to `end` fit the second cache.
template <class Weight>
void multiply_tokens(const ProductArgs& args, Multiplier& multiplier, int64_t first_panel, int64_t last_panel,
                     int64_t begin, int64_t end, std::byte* scratch) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const Weight* weights = panel_of<Weight>(args, panel);
    if constexpr (sizeof(Weight) == 1) {
      // Codes that are used more than once are made floating once.
      if (end - begin > Multiplier::kTokensAtOnce) {
        BF16* floating = reinterpret_cast<BF16*>(scratch);
        make_floating(floating, weights, args.in_features * kPanel);
        multiplier.multiply(args, panel, floating, begin, end);
        continue;
      }
    }
    multiplier.multiply(args, panel, weights, begin, end);
  }
}

}  // namespace

void product(const ProductArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
  Multiplier multiplier;
  const auto multiply = args.scales == nullptr ? multiply_tokens<BF16> : multiply_tokens<int8_t>;
  const int64_t step = tokens_at_once(args);
  for (int64_t token = 0; token < args.num_tokens; token += step)
    multiply(args, multiplier, begin, end, token, token + step < args.num_tokens ? token + step : args.num_tokens,
             scratch);
}

}  // namespace quire::QUIRE_ISA
