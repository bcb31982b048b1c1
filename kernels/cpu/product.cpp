// Products of a few or many tokens with packed weights (pack_weight.cpp), panel by panel.
//
// For few tokens all of it is reading the weights, so memory is asked well ahead of their use. Matrix units, where the
// processor has them, are the faster way even for a single token: 85% of what a plain sum reads, where vectors gave 64%.
#include <bit>
#include <type_traits>

#include "blocks.h"
#include "finish.h"
#include "isa.h"
#include "matmul.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTile = kPanel / 2;

template <class Kind>
inline const typename Kind::X* x_of(const ProductArgs& args, int64_t token) {
  return static_cast<const typename Kind::X*>(args.x) + token * args.x_stride;
}

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

// As many tokens at once as fit the second cache.
template <class Kind>
void multiply(const ProductArgs& args, int64_t first_panel, int64_t last_panel, std::byte* scratch, const std::byte* packed) {
  Multiplier<Kind> multiplier;
  const int64_t step = tokens_at_once<Kind>(args);
  for (int64_t begin = 0; begin < args.num_tokens; begin += step) {
    const int64_t end = begin + step < args.num_tokens ? begin + step : args.num_tokens;
    multiplier.template multiply<Kind>(args, first_panel, last_panel, begin, end, scratch, packed);
  }
}

struct Product {
  decltype(IsaKernels::product) multiply;
  decltype(IsaKernels::product_scratch) scratch_bytes;
  decltype(IsaKernels::pack_tokens) pack;
  decltype(IsaKernels::packed_bytes) packed_bytes;
};

template <class Kind>
constexpr Product kProduct = {multiply<Kind>, Multiplier<Kind>::template scratch_bytes<Kind>,
                              Multiplier<Kind>::template pack<Kind>, Multiplier<Kind>::template packed_bytes<Kind>};

const Product& product_for(const ProductArgs& args) {
  if (args.multiplied == kCodesByCodes) return kProduct<CodesByCodes>;
  if (args.multiplied == kShortNumbers) return kProduct<PairsOfShort>;
  const bool codes = args.multiplied == kCodes;
  if (args.dtype == kFloat32) return codes ? kProduct<Floats<int8_t>> : kProduct<Floats<float>>;
#if defined(QUIRE_AMX_FP16)
  if (args.dtype == kFloat16) return codes ? kProduct<PairsByCodes<F16>> : kProduct<Pairs<F16>>;
#endif
  return codes ? kProduct<PairsByCodes<BF16>> : kProduct<Pairs<BF16>>;
}

}  // namespace

void product(const ProductArgs& args, int64_t begin, int64_t end, std::byte* scratch, const std::byte* packed) {
  product_for(args).multiply(args, begin, end, scratch, packed);
}

int64_t product_scratch(const ProductArgs& args) { return product_for(args).scratch_bytes(args); }

void pack_tokens(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
  product_for(args).pack(args, begin, end, packed);
}

int64_t packed_bytes(const ProductArgs& args) { return product_for(args).packed_bytes(args); }

}  // namespace quire::QUIRE_ISA
