// What a product does to its sums: bias, activation, rounding.
#pragma once

#include "isa.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(zero() - x)); }

inline Vec activate(int64_t activation, Vec x) {
  switch (activation) {
    case kRelu:
      return zero_below(x, x, zero());
    case kSilu:
      return silu(x);
    case kGeluTanh: {
      const Vec inner = set1(0.7978845608f) * fma(x * x * x, set1(0.044715f), x);
      return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
    }
    default:
      return x;
  }
}

inline Vec load_bias(const ProductArgs& args, int64_t column, int lanes) {
  switch (args.dtype) {
    case kFloat32:
      return load(static_cast<const float*>(args.bias) + column, lanes);
    case kBFloat16:
      return load(static_cast<const BF16*>(args.bias) + column, lanes);
    default:
      return load(static_cast<const F16*>(args.bias) + column, lanes);
  }
}

// Sums of a token that end up in columns `column` on of a line of the weight, with scales and bias.
template <class Sum>
inline Vec biased(const ProductArgs& args, int64_t token, const Sum* sums, int64_t column, int lanes) {
  Vec product = load(sums);
  if (args.x_scales != nullptr) product = product * set1(args.x_scales[token]);
  if (args.scales != nullptr) product = product * load(args.scales + column, lanes);
  return args.bias == nullptr ? product : product + load_bias(args, column, lanes);
}

inline void store_line(const ProductArgs& args, int64_t token, int64_t column, Vec x, int lanes) {
  const int64_t at = token * args.output_stride + column;
  switch (args.output_dtype) {
    case kFloat32:
      return store(static_cast<float*>(args.output) + at, x, lanes);
    case kBFloat16:
      return store(static_cast<BF16*>(args.output) + at, x, lanes);
    default:
      return store(static_cast<F16*>(args.output) + at, x, lanes);
  }
}

// One panel of one token, from its kPanel sums.
template <class Sum>
inline void finish_line(const ProductArgs& args, int64_t panel, int64_t token, const Sum* sums) {
  const bool gated = is_gated(args);
  const int64_t width = gated ? kPanel / 2 : kPanel, columns = gated ? args.out_features / 2 : args.out_features;
  for (int64_t i = 0; i < width; i += kWidth) {
    const int64_t column = panel * width + i;
    if (column >= columns) return;
    const int lanes = static_cast<int>(columns - column < kWidth ? columns - column : kWidth);
    Vec x = biased(args, token, sums + i, column, lanes);
    x = gated ? silu(x) * biased(args, token, sums + width + i, columns + column, lanes) : activate(args.activation, x);
    store_line(args, token, column, x, lanes);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
