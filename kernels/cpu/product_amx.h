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

// Some blocks of a panel, and what to ask for meanwhile: `share` bytes with each block, from `ahead` on, `step` bytes further
// each time.
struct Stretch {
  int64_t first;
  int64_t count;
  const char* ahead;
  int64_t share;
  int64_t step;
};

template <bool kTwo, class Sum>
inline void load_sums(const Sum* sums) {
  _tile_loadd(0, sums, kPanel * 4);
  _tile_loadd(1, sums + kTile, kPanel * 4);
  if constexpr (kTwo) {
    _tile_loadd(2, sums + kTile * kPanel, kPanel * 4);
    _tile_loadd(3, sums + kTile * kPanel + kTile, kPanel * 4);
  }
}

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <bool kTwo, class Sum>
inline void store_sums(Sum* sums) {
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile, kPanel * 4);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTile * kPanel + kTile, kPanel * 4);
  }
}

// Up to 32 tokens by a stretch of a panel, on tiles whose lines are set; adds to the sums after the first stretch.
template <class Kind, bool kTwo, _mm_hint kHint>
void multiply_tiles(const ProductArgs& args, const typename Kind::Weight* panel, int64_t token, const Stretch& stretch,
                    typename Kind::Sum* sums) {
  const int64_t bytes = args.x_stride * static_cast<int64_t>(sizeof(typename Kind::X));
  const auto *x = x_of<Kind>(args, token), *second = x + kTile * args.x_stride;
  Blocks<Kind> blocks(panel + stretch.first * kBlock<Kind>, stretch.count);
  if (stretch.first == 0)
    clear_sums();
  else
    load_sums<kTwo>(sums);
  const char* ahead = stretch.ahead;
  const int64_t end = (stretch.first + stretch.count) * kLines<Kind>;
  for (int64_t k = stretch.first * kLines<Kind>; k < end; k += kLines<Kind>, ahead += stretch.step) {
    fetch<kHint>(ahead, stretch.share);
    const char* block = static_cast<const char*>(blocks.next());
    _tile_loadd(6, block, 64);
    _tile_loadd(7, block + kBlockBytes / 2, 64);
    _tile_loadd(4, x + k, bytes);
    if constexpr (kTwo) _tile_loadd(5, second + k, bytes);
    multiply_loaded<typename Kind::X, kTwo>();
  }
  store_sums<kTwo>(sums);
}

// Of a panel, and as much of 32 tokens beside them: half of the first cache.
constexpr int64_t kBlocksAtOnce = 8;

class MatrixMultiplier {
 public:
  // Up to so many tokens codes are made floating anew for every 32 of them: it costs less than to write them down.
  static constexpr int64_t kTokensOfCodes = 2 * kPanel;

  // Tokens begin to end by one panel, whose weights are `weights`; `next` are the bytes in memory that come after it.
  //
  // Where many tokens pass by, they do so for each stretch of the panel that stays in the first cache.
  template <class Kind>
  void multiply(const ProductArgs& args, int64_t panel, const typename Kind::Weight* weights, Bytes next,
                int64_t begin, int64_t end) {
    alignas(64) typename Kind::Sum sums[kMostTokens * kPanel];
    const int64_t passes = padded(end - begin, kPanel) / kPanel, blocks = args.in_features / kLines<Kind>;
    const int64_t share = padded(next.count / (passes * blocks), kCacheLine), step = next.count / blocks;
    const int64_t most = passes > 2 ? kBlocksAtOnce : blocks;
    for (int64_t first = 0; first < blocks; first += most) {
      const int64_t count = blocks - first < most ? blocks - first : most;
      for (int64_t pass = 0; pass < passes; ++pass) {
        const char* ahead = passes == 1 ? next.start - next.count + kAhead : next.start + pass * share;
        const int64_t token = begin + pass * kPanel;
        auto* of_pass = sums + pass * kPanel * kPanel;
        multiply_lines<Kind>(args, weights, token, end, {first, count, ahead + first * step, share, step}, passes == 1,
                             of_pass);
        // Now, while they are in the first cache.
        if (first + count == blocks) finish(args, panel, token, end - token < kPanel ? end - token : kPanel, of_pass);
      }
    }
  }

 private:
  // Tokens from `token` on, 32 of them at most.
  template <class Kind>
  void multiply_lines(const ProductArgs& args, const typename Kind::Weight* weights, int64_t token, int64_t end,
                      const Stretch& stretch, bool once, typename Kind::Sum* sums) {
    const int64_t lines = end - token < kPanel ? end - token : kPanel;
    const bool two = lines > kTile;
    if (lines != lines_set_) unit_.set_lines(two ? kTile : lines, two ? lines - kTile : kTile);
    lines_set_ = lines;
    const auto multiply = once ? two ? multiply_tiles<Kind, true, _MM_HINT_T0> : multiply_tiles<Kind, false, _MM_HINT_T0>
                               : two ? multiply_tiles<Kind, true, _MM_HINT_T1> : multiply_tiles<Kind, false, _MM_HINT_T1>;
    multiply(args, weights, token, stretch, sums);
  }

  MatrixUnit unit_;
  int64_t lines_set_ = 0;
};

}  // namespace
}  // namespace quire::QUIRE_ISA
