// Products of a few or many tokens with packed weights (pack_weight.cpp), panel by panel.
//
// For few tokens all of it is reading the weights, so memory is asked well ahead of their use. Matrix units, where the
// processor has them, are the faster way even for a single token: 85% of what a plain sum reads, where vectors gave 64%.
#include <bit>
#include <type_traits>

#include "finish.h"
#include "isa.h"
#include "matmul.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTile = kPanel / 2;
constexpr int64_t kCacheLine = 64;
// Bytes of a block, as it is multiplied, and of what a token brings to it.
constexpr int64_t kBlockBytes = kPanel * kWordsOfBlock * 4;
constexpr int64_t kLineBytes = kWordsOfBlock * 4;
// How far ahead of its use a weight is asked for, in bytes.
constexpr int64_t kAhead = 8 * kPanel * kPanel;

// What is multiplied: elements of a token, elements of the weight in memory, and the sums of their products. A token's
// elements are words, or pairs or fours of them are.
template <class Number>
struct Pairs {
  using X = Number;
  using Weight = Number;
  using Sum = float;
};

// The codes are made numbers first.
template <class Number>
struct PairsByCodes {
  using X = Number;
  using Weight = int8_t;
  using Sum = float;
};

// Floats, or codes that become floats on their way.
template <class Stored>
struct Floats {
  using X = float;
  using Weight = Stored;
  using Sum = float;
};

struct CodesByCodes {
  using X = int8_t;
  using Weight = int8_t;
  using Sum = int32_t;
};

// Lines of a block, and elements of a block in memory.
template <class Kind>
constexpr int64_t kLines = kLineBytes / sizeof(typename Kind::X);
template <class Kind>
constexpr int64_t kBlock = kLines<Kind>* kPanel;

template <class Kind>
inline const typename Kind::X* x_of(const ProductArgs& args, int64_t token) {
  return static_cast<const typename Kind::X*>(args.x) + token * args.x_stride;
}

template <class Kind>
inline const typename Kind::Weight* panel_of(const ProductArgs& args, int64_t panel) {
  return static_cast<const typename Kind::Weight*>(args.weight) + panel * args.in_features * kPanel;
}

struct Bytes {
  const char* start;
  int64_t count;
};

// The weights of the panel after this one.
template <class Kind>
inline Bytes panel_after(const ProductArgs& args, int64_t panel) {
  const int64_t bytes = args.in_features * kPanel * static_cast<int64_t>(sizeof(typename Kind::Weight));
  return {reinterpret_cast<const char*>(panel_of<Kind>(args, panel)) + bytes, bytes};
}

template <_mm_hint kHint>
inline void fetch(const void* weights, int64_t bytes) {
  const char* from = static_cast<const char*>(weights);
  for (int64_t i = 0; i < bytes; i += kCacheLine) _mm_prefetch(from + i, kHint);
}

// Codes as numbers, in which they are exact; `count` is a multiple of 32.
template <class Number>
inline void make_floating(Number* to, const int8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Number, BF16>) {
      const __m512bh both = _mm512_cvtne2ps_pbh(load(codes + i + 16).v, load(codes + i).v);
      _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(both));
      continue;
    }
#endif
    for (int64_t j = i; j < i + 32; j += kWidth) store(to + j, load(codes + j));
  }
}

// The blocks of a panel as they are multiplied, one after the other: as they lie in memory, or made floating.
template <class Kind>
class Blocks {
 public:
  Blocks(const typename Kind::Weight* panel, int64_t) : block_(panel) {}
  const void* next() {
    const void* block = block_;
    block_ += kBlock<Kind>;
    return block;
  }

 private:
  const typename Kind::Weight* block_;
};

// One block is made floating ahead of its use, while the one before it is multiplied.
template <class Number>
class Blocks<PairsByCodes<Number>> {
 public:
  Blocks(const int8_t* panel, int64_t count) : codes_(panel), left_(count) { make_next(); }
  const void* next() {
    const Number* block = blocks_[turn_ ^ 1];
    make_next();
    return block;
  }

 private:
  void make_next() {
    if (left_-- > 0) make_floating(blocks_[turn_], codes_, kBlock<PairsByCodes<Number>>);
    codes_ += kBlock<PairsByCodes<Number>>;
    turn_ ^= 1;
  }

  alignas(64) Number blocks_[2][kBlock<PairsByCodes<Number>>];
  const int8_t* codes_;
  int64_t left_;
  int turn_ = 0;
};

// Tokens whose lines stay in the second cache while all panels pass by.
constexpr int64_t kMostTokens = 512;

template <class Kind>
int64_t tokens_at_once(const ProductArgs& args) {
  constexpr int64_t kBytes = 3 << 18;
  const int64_t line = sizeof(typename Kind::X) * (args.in_features < 1 ? 1 : args.in_features);
  const int64_t tokens = kBytes / line / kPanel * kPanel;
  return tokens < kPanel ? kPanel : tokens < kMostTokens ? tokens : kMostTokens;
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#include "product_vectors.h"
#if defined(__AMX_BF16__)
#include "product_amx.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if defined(__AMX_BF16__)
template <class Kind>
using Multiplier = std::conditional_t<std::is_same_v<typename Kind::X, float>, VectorMultiplier, MatrixMultiplier>;
#else
template <class>
using Multiplier = VectorMultiplier;
#endif

// Tokens by the panels that a thread has; lines of `begin` to `end` fit the second cache.
template <class Kind>
void multiply_tokens(const ProductArgs& args, Multiplier<Kind>& multiplier, int64_t first_panel, int64_t last_panel,
                     int64_t begin, int64_t end) {
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const auto* weights = panel_of<Kind>(args, panel);
    multiplier.template multiply<Kind>(args, panel, weights, panel_after<Kind>(args, panel), begin, end);
  }
}

// The same from codes, which become numbers once a panel, in `floating`.
template <class Number>
void multiply_tokens_once(const ProductArgs& args, Multiplier<Pairs<Number>>& multiplier, int64_t first_panel,
                          int64_t last_panel, int64_t begin, int64_t end, Number* floating) {
  using Kind = PairsByCodes<Number>;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    make_floating(floating, panel_of<Kind>(args, panel), args.in_features * kPanel);
    multiplier.template multiply<Pairs<Number>>(args, panel, floating, panel_after<Kind>(args, panel), begin, end);
  }
}

// Calls function(begin, end) for as many tokens at once as fit the second cache.
template <class Kind, class Function>
void for_tokens(const ProductArgs& args, Function function) {
  const int64_t step = tokens_at_once<Kind>(args);
  for (int64_t token = 0; token < args.num_tokens; token += step)
    function(token, token + step < args.num_tokens ? token + step : args.num_tokens);
}

template <class Kind>
void multiply(const ProductArgs& args, int64_t first_panel, int64_t last_panel, std::byte*) {
  Multiplier<Kind> multiplier;
  for_tokens<Kind>(args, [&](int64_t begin, int64_t end) {
    multiply_tokens<Kind>(args, multiplier, first_panel, last_panel, begin, end);
  });
}

template <class Number>
void multiply_by_codes(const ProductArgs& args, int64_t first_panel, int64_t last_panel, std::byte* scratch) {
  using Kind = PairsByCodes<Number>;
  Multiplier<Kind> multiplier;
  for_tokens<Kind>(args, [&](int64_t begin, int64_t end) {
    if (end - begin > multiplier.kTokensOfCodes)
      multiply_tokens_once(args, multiplier, first_panel, last_panel, begin, end, reinterpret_cast<Number*>(scratch));
    else
      multiply_tokens<Kind>(args, multiplier, first_panel, last_panel, begin, end);
  });
}

using Function = void (*)(const ProductArgs&, int64_t first_panel, int64_t last_panel, std::byte*);

Function function_for(const ProductArgs& args) {
  if (args.multiplied == kCodesByCodes) return multiply<CodesByCodes>;
  const bool codes = args.multiplied == kCodes;
  if (args.dtype == kFloat32) return codes ? multiply<Floats<int8_t>> : multiply<Floats<float>>;
#if defined(QUIRE_AMX_FP16)
  if (args.dtype == kFloat16) return codes ? multiply_by_codes<F16> : multiply<Pairs<F16>>;
#endif
  return codes ? multiply_by_codes<BF16> : multiply<Pairs<BF16>>;
}

}  // namespace

void product(const ProductArgs& args, int64_t begin, int64_t end, std::byte* scratch) {
  function_for(args)(args, begin, end, scratch);
}

}  // namespace quire::QUIRE_ISA
