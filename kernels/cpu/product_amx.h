// product.cpp for processors with matrix units. Included by it alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

// Up to 32 tokens by one panel, on tiles whose lines are set. Asks for a part of what comes after it with each block:
// `share` elements from `ahead` on.
template <bool kTwo, _mm_hint kHint, class Weight>
void multiply_tiles(const ProductArgs& args, const Weight* panel, int64_t token, const Weight* ahead, int64_t share,
                    float* sums) {
  const int64_t bytes = args.x_stride * 2, sums_bytes = kPanel * 4;
  const BF16* x = x_of(args, token);
  Blocks<Weight> blocks(panel, args.in_features / kPanel);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < args.in_features; k += kPanel, ahead += kBlock) {
    fetch<kHint>(ahead, share);
    const BF16* block = blocks.next();
    _tile_loadd(6, block, 64);
    _tile_loadd(7, block + kBlock / 2, 64);
    _tile_loadd(4, x + k, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x + kTile * args.x_stride + k, bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sums_bytes);
  _tile_stored(1, sums + kTile, sums_bytes);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kPanel, sums_bytes);
    _tile_stored(3, sums + kTile * kPanel + kTile, sums_bytes);
  }
}

class Multiplier {
 public:
  static constexpr int64_t kTokensAtOnce = kPanel;

  // Tokens begin to end by one panel, whose weights are `weights`.
  template <class Weight>
  void multiply(const ProductArgs& args, int64_t panel, const Weight* weights, int64_t begin, int64_t end) {
    const int64_t passes = padded(end - begin, kPanel) / kPanel;
    const int64_t share = padded(kBlock / passes, kCacheLine / sizeof(Weight));
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t token = begin + pass * kPanel, lines = end - token < kPanel ? end - token : kPanel;
      const bool two = lines > kTile;
      if (lines != lines_set_) unit_.set_lines(two ? kTile : lines, two ? lines - kTile : kTile);
      lines_set_ = lines;
      const Weight* ahead = passes == 1 ? weights + kAhead<Weight> : weights + args.in_features * kPanel + pass * share;
      const auto multiply = passes > 1 ? two ? multiply_tiles<true, _MM_HINT_T1, Weight> : multiply_tiles<false, _MM_HINT_T1, Weight>
                                       : two ? multiply_tiles<true, _MM_HINT_T0, Weight> : multiply_tiles<false, _MM_HINT_T0, Weight>;
      multiply(args, weights, token, ahead, share, sums_);
      for (int64_t line = 0; line < lines; ++line) finish_line(args, panel, token + line, sums_ + line * kPanel);
    }
  }

 private:
  MatrixUnit unit_;
  int64_t lines_set_ = 0;
  alignas(64) float sums_[kPanel * kPanel];
};

}  // namespace
}  // namespace quire::QUIRE_ISA
