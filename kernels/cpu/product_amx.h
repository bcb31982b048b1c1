// product.cpp for processors with matrix units. Included by it alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

// For float16, of which compilers may not know yet.
#define QUIRE_TILE_DPFP16PS(sums, lines, columns) asm volatile("tdpfp16ps %tmm" #columns ", %tmm" #lines ", %tmm" #sums)

// Adds the products of the lines in tile 4, and with kTwo in 5, with the columns in 6 and 7. The numbers of tiles must stand
// in the instructions.
template <class X, bool kTwo>
inline void multiply_loaded() {
#if defined(QUIRE_AMX_FP16)
  if constexpr (std::is_same_v<X, F16>) {
    QUIRE_TILE_DPFP16PS(0, 4, 6);
    QUIRE_TILE_DPFP16PS(1, 4, 7);
    if constexpr (kTwo) {
      QUIRE_TILE_DPFP16PS(2, 5, 6);
      QUIRE_TILE_DPFP16PS(3, 5, 7);
    }
    return;
  }
#endif
  if constexpr (std::is_same_v<X, int8_t>) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  } else if constexpr (std::is_same_v<X, BF16>) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Up to 32 tokens by one panel, on tiles whose lines are set. Asks for `share` bytes of what comes after it with each block,
// from `ahead` on, `step` bytes further each time.
template <class Kind, bool kTwo, _mm_hint kHint>
void multiply_tiles(const ProductArgs& args, const typename Kind::Weight* panel, int64_t token, const char* ahead,
                    int64_t share, int64_t step, typename Kind::Sum* sums) {
  const int64_t bytes = args.x_stride * static_cast<int64_t>(sizeof(typename Kind::X)), sums_bytes = kPanel * 4;
  const auto *x = x_of<Kind>(args, token), *second = x + kTile * args.x_stride;
  Blocks<Kind> blocks(panel, args.in_features / kLines<Kind>);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < args.in_features; k += kLines<Kind>, ahead += step) {
    fetch<kHint>(ahead, share);
    const char* block = static_cast<const char*>(blocks.next());
    _tile_loadd(6, block, 64);
    _tile_loadd(7, block + kBlockBytes / 2, 64);
    _tile_loadd(4, x + k, bytes);
    if constexpr (kTwo) _tile_loadd(5, second + k, bytes);
    multiply_loaded<typename Kind::X, kTwo>();
  }
  _tile_stored(0, sums, sums_bytes);
  _tile_stored(1, sums + kTile, sums_bytes);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kPanel, sums_bytes);
    _tile_stored(3, sums + kTile * kPanel + kTile, sums_bytes);
  }
}

class MatrixMultiplier {
 public:
  // Up to so many tokens codes are made floating anew for every 32 of them: it costs less than to write them down.
  static constexpr int64_t kTokensOfCodes = 2 * kPanel;

  // Tokens begin to end by one panel, whose weights are `weights`; `next` are the bytes in memory that come after it.
  template <class Kind>
  void multiply(const ProductArgs& args, int64_t panel, const typename Kind::Weight* weights, Bytes next,
                int64_t begin, int64_t end) {
    alignas(64) typename Kind::Sum sums[kPanel * kPanel];
    const int64_t passes = padded(end - begin, kPanel) / kPanel, blocks = args.in_features / kLines<Kind>;
    const int64_t share = padded(next.count / (passes * blocks), kCacheLine), step = next.count / blocks;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t token = begin + pass * kPanel, lines = end - token < kPanel ? end - token : kPanel;
      const bool two = lines > kTile;
      if (lines != lines_set_) unit_.set_lines(two ? kTile : lines, two ? lines - kTile : kTile);
      lines_set_ = lines;
      const char* ahead = passes == 1 ? next.start - next.count + kAhead : next.start + pass * share;
      const auto multiply = passes > 1 ? two ? multiply_tiles<Kind, true, _MM_HINT_T1> : multiply_tiles<Kind, false, _MM_HINT_T1>
                                       : two ? multiply_tiles<Kind, true, _MM_HINT_T0> : multiply_tiles<Kind, false, _MM_HINT_T0>;
      multiply(args, weights, token, ahead, share, step, sums);
      for (int64_t line = 0; line < lines; ++line) finish_line(args, panel, token + line, sums + line * kPanel);
    }
  }

 private:
  MatrixUnit unit_;
  int64_t lines_set_ = 0;
};

}  // namespace
}  // namespace quire::QUIRE_ISA
