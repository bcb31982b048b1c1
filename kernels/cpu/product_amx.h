// product.cpp for processors with matrix units. Included by it alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

// Up to 32 tokens by one panel, on tiles whose lines are set. Asks for a part of the panel after this one with each block:
// `share` elements of it from `ahead` on.
template <bool kTwo, _mm_hint kHint>
void multiply_tiles(const ProductArgs& args, int64_t panel, int64_t token, const BF16* ahead, int64_t share,
                    float* sums) {
  const int64_t bytes = args.x_stride * 2, sums_bytes = kPanel * 4;
  const BF16* x = x_of(args, token);
  const BF16* block = panel_of(args, panel);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < args.in_features; k += kPanel, block += kBlock, ahead += kBlock) {
    fetch<kHint>(ahead, share);
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

// Tokens begin to end, all panels; lines of `begin` to `end` fit the second cache.
void multiply_tokens(const ProductArgs& args, MatrixUnit& unit, int64_t first_panel, int64_t last_panel, int64_t begin,
                     int64_t end) {
  alignas(64) float sums[kPanel * kPanel];
  const int64_t passes = padded(end - begin, kPanel) / kPanel;
  const int64_t share = padded(kBlock / passes, kCacheLine);
  int64_t lines_set = 0;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t token = begin + pass * kPanel, lines = end - token < kPanel ? end - token : kPanel;
      const bool two = lines > kTile;
      if (lines != lines_set) unit.set_lines(two ? kTile : lines, two ? lines - kTile : kTile);
      lines_set = lines;
      const BF16* ahead = passes == 1 ? panel_of(args, panel) + kAhead : panel_of(args, panel + 1) + pass * share;
      const auto multiply = passes > 1 ? two ? multiply_tiles<true, _MM_HINT_T1> : multiply_tiles<false, _MM_HINT_T1>
                                       : two ? multiply_tiles<true, _MM_HINT_T0> : multiply_tiles<false, _MM_HINT_T0>;
      multiply(args, panel, token, ahead, share, sums);
      for (int64_t line = 0; line < lines; ++line) finish_line(args, panel, token + line, sums + line * kPanel);
    }
  }
}

}  // namespace

void product(const ProductArgs& args, int64_t begin, int64_t end) {
  MatrixUnit unit;
  const int64_t step = tokens_at_once(args);
  for (int64_t token = 0; token < args.num_tokens; token += step)
    multiply_tokens(args, unit, begin, end, token, token + step < args.num_tokens ? token + step : args.num_tokens);
}

}  // namespace quire::QUIRE_ISA
