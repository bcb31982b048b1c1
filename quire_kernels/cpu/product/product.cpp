// Products of tokens with packed weights (pack_weight.cpp), panel by panel.
//
// With few tokens the reading of the weights takes the time, so they are prefetched well ahead of their use. Matrix
// units, where the processor has them, are faster even for a single token: they read the weights at 85% of the speed of
// a plain sum over them, vectors at 64%.
#include <array>
#include <bit>
#include <type_traits>

#include "product/blocks.h"
#include "product/matmul.h"
#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int64_t kTile = kPanel / 2;

// The numbers that the adapters of tokens `begin` to `end` - 1 add to a panel (low_rank.h), computed at their first
// use. While a panel is multiplied, the adapters' lines for the next one are prefetched, and a share of the lines that
// the next `shrink` reads: a few lines at a time, because a processor stalls when its queue of requests is full.
class Addends {
 public:
  // `sums` has room for kPanel of each token.
  Addends(const ProductArgs& args, const TokensBySlot& by_slot, int64_t begin, int64_t end, float* sums)
      : args_(args), by_slot_(by_slot), begin_(begin), end_(end), sums_(sums) {}

  // Begins to multiply a panel, in `steps` steps; is_first: the panel is the first of consecutive ones.
  void start(int64_t panel, bool is_first, int64_t steps);
  void step() {
    for (int64_t i = 0; i < lines_of_step_ && span_ != last_span_; ++i) prefetch_line();
  }

  // kPanel of them; null for a token without an adapter.
  const float* of(int64_t panel, int64_t token) {
    if (panel != panel_) compute(panel);
    return args_.slots[token] == 0 ? nullptr : sums_ + (token - begin_) * kPanel;
  }

 private:
  void compute(int64_t panel);
  template <class T>
  void compute_as() const;
  template <class T, int kTokens>
  void compute_some(const LowRankPart* parts, const int64_t* tokens) const;
  void want(const void* begin, int64_t lines);
  void want_panel(int64_t panel);
  void want_share_of_next(int64_t panel);
  void prefetch_line() {
    prefetch<kSecondCache>(span_->at);
    span_->at += 64;
    if (--span_->lines == 0) ++span_;
  }
  int64_t tile(int64_t panel, int64_t half) const {
    return is_gated(args_) ? panel + half * num_panels(args_) : panel * (kPanel / kTile) + half;
  }

  const ProductArgs& args_;
  const TokensBySlot& by_slot_;
  const int64_t begin_, end_;
  float* const sums_;
  int64_t panel_ = -1;  // of the sums
  // Remaining lines to prefetch; lines beyond the capacity are not prefetched.
  struct Span {
    const char* at;
    int64_t lines;
  };
  Span spans_[96], *span_ = spans_, *last_span_ = spans_;
  int64_t lines_ = 0, lines_of_step_ = 0;
};

// The product of some tokens; `addends` is null where they have no adapters.
struct Pass : ProductArgs {
  Addends* addends;
};

inline Vec activate(int64_t activation, Vec x) {
  switch (activation) {
    case kRelu:
      return zero_below(x, x, zero());
    case kSilu:
    case kSiluAndMul:
      return silu(x);
    case kGeluTanh:
    case kGeluTanhAndMul: {
      const Vec inner = set1(0.7978845608f) * fma(x * x * x, set1(0.044715f), x);
      return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
    }
    case kGelu:
    case kGeluAndMul:
      return gelu(x);
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

// Sums of a token for output columns from `column` on, with scales, bias, and addends where they are not null.
template <class Sum>
inline Vec biased(const ProductArgs& args, int64_t token, const Sum* sums, int64_t column, int lanes,
                  const float* addends) {
  Vec product = load(sums);
  if (args.x_scales != nullptr) product = product * set1(args.x_scales[token]);
  if (args.scales != nullptr) product = product * load(args.scales + column, lanes);
  if (args.bias != nullptr) product = product + load_bias(args, column, lanes);
  return addends == nullptr ? product : product + load(addends);
}

// Writes the sums of a panel as columns of the output. A gated panel has the columns of both factors.
template <class Sum, bool kGated>
class Finish {
 public:
  static constexpr int64_t kColumns = kGated ? kPanel / 2 : kPanel;

  Finish(const Pass& args, int64_t panel)
      : args_(args),
        columns_(kGated ? args.out_features / 2 : args.out_features),
        panel_(panel),
        first_(panel * kColumns) {}

  // Writes `count` tokens from `token` on, from kPanel sums of each.
  template <class Out>
  void write(int64_t token, int64_t count, const Sum* sums) const {
    Out* to = static_cast<Out*>(args_.output) + token * args_.output_stride + first_;
    const bool whole = first_ + kColumns <= columns_;
    for (const int64_t end = token + count; token < end; ++token, sums += kPanel, to += args_.output_stride) {
      const float* addends = args_.addends == nullptr ? nullptr : args_.addends->of(panel_, token);
      whole ? write_whole(to, token, sums, addends) : write_some(to, token, sums, addends);
    }
  }

 private:
  // Two vectors at once where the processor can: with many tokens, these stores take a large part of the time.
  template <class Out>
  void write_whole(Out* to, int64_t token, const Sum* sums, const float* addends) const {
    if constexpr (kColumns % (2 * kWidth) == 0) {
      for (int64_t i = 0; i < kColumns; i += 2 * kWidth)
        store_both(to + i, column(token, sums, i, kWidth, addends), column(token, sums, i + kWidth, kWidth, addends));
    } else {
      for (int64_t i = 0; i < kColumns; i += kWidth) store(to + i, column(token, sums, i, kWidth, addends));
    }
  }

  template <class Out>
  void write_some(Out* to, int64_t token, const Sum* sums, const float* addends) const {
    for (int64_t i = 0; i < kColumns && first_ + i < columns_; i += kWidth) {
      const int64_t left = columns_ - first_ - i;
      const int lanes = static_cast<int>(left < kWidth ? left : kWidth);
      store(to + i, column(token, sums, i, lanes, addends), lanes);
    }
  }

  Vec column(int64_t token, const Sum* sums, int64_t i, int lanes, const float* addends) const {
    auto of_half = [&](int64_t half, int64_t column) {
      const int64_t at = half * kColumns + i;
      return biased(args_, token, sums + at, column + i, lanes, addends == nullptr ? nullptr : addends + at);
    };
    const Vec x = of_half(0, first_);
    if constexpr (kGated)
      return gated(x, of_half(1, columns_ + first_));
    else
      return args_.activation == kIdentity ? x : activate(args_.activation, x);
  }

  // NaN stays NaN, since it is the second argument.
  Vec gated(Vec gate, Vec up) const {
    if (args_.activation != kClampedSwiglu) return activate(args_.activation, gate) * up;
    gate = min(set1(7.0f), gate);
    up = max(set1(-7.0f), min(set1(7.0f), up));
    return (up + set1(1.0f)) * (silu(gate * set1(1.702f)) * set1(1 / 1.702f));
  }

  const Pass& args_;
  const int64_t columns_, panel_, first_;
};

template <class Sum, bool kGated>
inline void finish_as(const Pass& args, int64_t panel, int64_t token, int64_t count, const Sum* sums) {
  const Finish<Sum, kGated> finish(args, panel);
  switch (args.output_dtype) {
    case kFloat32:
      return finish.template write<float>(token, count, sums);
    case kBFloat16:
      return finish.template write<BF16>(token, count, sums);
    default:
      return finish.template write<F16>(token, count, sums);
  }
}

// Writes one panel of some tokens, from kPanel sums of each.
template <class Sum>
inline void finish(const Pass& args, int64_t panel, int64_t token, int64_t count, const Sum* sums) {
  return is_gated(args) ? finish_as<Sum, true>(args, panel, token, count, sums)
                        : finish_as<Sum, false>(args, panel, token, count, sums);
}

template <class Kind>
inline const typename Kind::X* x_of(const ProductArgs& args, int64_t token) {
  return static_cast<const typename Kind::X*>(args.x) + token * args.x_stride;
}

// Calls function(first, last) for tokens that are multiplied at once: equal parts, of at most kBytes, of each unit's
// tokens. `begin` is the beginning of a unit.
template <class Kind, int64_t kBytes, class Function>
void for_passes(const ProductArgs& args, int64_t begin, int64_t end, Function function) {
  const int64_t line = sizeof(typename Kind::X) * (args.in_features < 1 ? 1 : args.in_features);
  for (; begin < end; begin += kMaxTokens) {
    const int64_t tokens = end - begin < kMaxTokens ? end - begin : kMaxTokens;
    const int64_t passes = (tokens * line + kBytes - 1) / kBytes, step = padded((tokens + passes - 1) / passes, kPanel);
    for (int64_t at = 0; at < tokens; at += step)
      function(begin + at, begin + (at + step < tokens ? at + step : tokens));
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#include "product/codes.h"
#include "product/vectors.h"
#if !defined(__AVX512F__)
#include "product/code_tiles.h"
#endif
#if defined(__AMX_BF16__)
#include "product/amx.h"
#endif
#include "product/low_rank.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Kind>
struct MultiplierOf {
#if defined(__AMX_BF16__)
  using Type = std::conditional_t<std::is_same_v<typename Kind::X, float>, VectorMultiplier, MatrixMultiplier>;
#else
  using Type = VectorMultiplier;
#endif
};
template <class Format>
struct MultiplierOf<Int8ByCoded<Format>> {
#if defined(__AVX512F__)
  using Type = CodeMultiplier;
#else
  using Type = CodeTiles;
#endif
};
template <class Kind>
using Multiplier = typename MultiplierOf<Kind>::Type;

template <class Kind>
int64_t scratch_bytes(const ProductArgs& args) {
  const int64_t tokens = args.parts == nullptr ? 0 : args.num_tokens < kMaxTokens ? args.num_tokens : kMaxTokens;
  return padded(Multiplier<Kind>::template scratch_bytes<Kind>(args), kCacheLine) + tokens * kPanel * sizeof(float);
}

template <class Kind>
void multiply(const ProductArgs& args, const TokensBySlot& by_slot, int64_t unit, int64_t last_unit,
              std::byte* scratch, const std::byte* packed) {
  using Multiplier = Multiplier<Kind>;
  auto* sums = reinterpret_cast<float*>(scratch + padded(Multiplier::template scratch_bytes<Kind>(args), kCacheLine));
  for (const int64_t panels = num_panels(args); unit < last_unit;) {
    const int64_t tokens = unit / panels * kMaxTokens, first = unit % panels;
    const int64_t last = last_unit - unit < panels - first ? first + last_unit - unit : panels;
    const int64_t end = tokens + kMaxTokens < args.num_tokens ? tokens + kMaxTokens : args.num_tokens;
    for_passes<Kind, Multiplier::kBytesAtOnce>(args, tokens, end, [&](int64_t begin, int64_t end) {
      Addends addends(args, by_slot, begin, end, sums);
      const Pass pass{args, args.parts == nullptr ? nullptr : &addends};
      Multiplier().template multiply<Kind>(pass, first, last, begin, end, scratch, packed);
    });
    unit += last - first;
  }
}

struct Product {
  decltype(IsaKernels::product) multiply;
  decltype(IsaKernels::product_scratch) scratch_bytes;
  decltype(IsaKernels::pack_tokens) pack;
  decltype(IsaKernels::packed_bytes) packed_bytes;
};

template <class Kind>
constexpr Product kProduct = {multiply<Kind>, scratch_bytes<Kind>, Multiplier<Kind>::template pack<Kind>,
                              Multiplier<Kind>::template packed_bytes<Kind>};

const Product& product_for(const ProductArgs& args) {
  const bool int8 = args.stored == kInt8;
  if (int8 && args.x_scales != nullptr) return kProduct<Int8ByInt8>;
  if (args.stored == kBf12) return kProduct<PairsOfBf12>;
  if (is_coded(args.stored))
    return with_format(args.stored, [&]<class Format>() -> const Product& {
      if constexpr (!Format::kFloats)
        if (args.x_scales != nullptr) return kProduct<Int8ByCoded<Format>>;
      return kProduct<PairsOfCoded<Format>>;
    });
  if (args.dtype == kFloat32) return int8 ? kProduct<Floats<int8_t>> : kProduct<Floats<float>>;
  return int8 ? kProduct<PairsByInt8<BF16>> : kProduct<Pairs<BF16>>;
}

}  // namespace

void product(const ProductArgs& args, const TokensBySlot& by_slot, int64_t begin, int64_t end, std::byte* scratch,
             const std::byte* packed) {
  product_for(args).multiply(args, by_slot, begin, end, scratch, packed);
}

int64_t product_scratch(const ProductArgs& args) { return product_for(args).scratch_bytes(args); }

void pack_tokens(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed) {
  product_for(args).pack(args, begin, end, packed);
}

int64_t packed_bytes(const ProductArgs& args) { return product_for(args).packed_bytes(args); }

}  // namespace quire::QUIRE_ISA
