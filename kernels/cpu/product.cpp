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
constexpr int64_t kAhead = 4 * kBlock;
constexpr int64_t kCacheLine = 32;

inline const BF16* x_of(const ProductArgs& args, int64_t token) {
  return static_cast<const BF16*>(args.x) + token * args.x_stride;
}

inline const BF16* panel_of(const ProductArgs& args, int64_t panel) {
  return static_cast<const BF16*>(args.weight) + panel * args.in_features * kPanel;
}

template <_mm_hint kHint>
inline void fetch(const BF16* weights, int64_t elements) {
  for (int64_t i = 0; i < elements; i += kCacheLine) _mm_prefetch(weights + i, kHint);
}

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
