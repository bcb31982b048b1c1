// Products by matrix units (AMX), for 16-bit numbers and int8 values. Included by product.cpp alone.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

// How many bytes ahead of its use a weight is prefetched, and into which cache: the second one where it is expanded
// first.
template <class Kind>
constexpr int64_t kPrefetchDistance = kIsExpanded<Kind> ? 1 << 12 : 1 << 13;
template <class Kind>
constexpr int kWeightCache = kIsExpanded<Kind> ? kSecondCache : kFirstCache;

// Bytes of a block as it is multiplied.
constexpr int64_t kMultipliedBytes = kPanel * kWordsOfBlock * kBytesOfWord;

// Adds the products of the lines in tile 4, and with kTwo in 5, with the columns in 6 and 7. The numbers of tiles must
// be literals: they are part of the instructions.
template <class X, bool kTwo>
inline void multiply_loaded() {
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

// Some blocks of a panel, and the memory to prefetch meanwhile: `lines` cache lines with each block, from `ahead` on,
// which moves by `step` bytes.
template <int kCache, class Lines>
struct Stretch {
  int64_t first;
  int64_t count;
  const char* ahead;
  Lines lines;
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

// Multiplies up to 32 tokens with a stretch of a panel, on configured tiles; adds to the sums after the first stretch.
template <class Kind, bool kTwo, class AnyBlocks, int kCache, class Lines>
void multiply_tiles(const ProductArgs& args, AnyBlocks& blocks, int64_t token, const Stretch<kCache, Lines>& stretch,
                    typename Kind::Sum* sums) {
  const int64_t bytes = args.x_stride * static_cast<int64_t>(sizeof(typename Kind::X));
  const auto *x = x_of<Kind>(args, token), *second = x + kTile * args.x_stride;
  if (stretch.first == 0)
    clear_sums();
  else
    load_sums<kTwo>(sums);
  const char* ahead = stretch.ahead;
  const int64_t end = (stretch.first + stretch.count) * kLines<Kind>;
  for (int64_t k = stretch.first * kLines<Kind>; k < end; k += kLines<Kind>, ahead += stretch.step) {
    const char* block = static_cast<const char*>(blocks.next(Prefetch<kCache, Lines>{ahead, stretch.lines}));
    _tile_loadd(6, block, 64);
    _tile_loadd(7, block + kMultipliedBytes / 2, 64);
    _tile_loadd(4, x + k, bytes);
    if constexpr (kTwo) _tile_loadd(5, second + k, bytes);
    multiply_loaded<typename Kind::X, kTwo>();
  }
  store_sums<kTwo>(sums);
}

// Blocks of a stretch. With as much of 32 tokens they fill half of the first cache, or a quarter where there are only a
// few passes of tokens.
constexpr int64_t kMaxBlocks = 8;
inline int64_t blocks_at_once(int64_t passes) { return passes > 4 ? kMaxBlocks : kMaxBlocks / 2; }

// The stretches of panels, one after the other, each of which is multiplied in several passes of tokens.
template <class Kind, bool = kIsExpanded<Kind>>
class Stretches {
 public:
  Stretches(const ProductArgs& args, int64_t panel, int64_t, int64_t) : next_(bytes_of<Kind>(args, panel)) {}

  // Begins the next stretch of `count` blocks; the one after it has the other number.
  void start(int64_t count, int64_t) {
    now_ = next_;
    next_ += count * block_bytes<Kind>();
  }
  StoredBlocks<Kind> blocks() { return StoredBlocks<Kind>(now_); }

 private:
  const char *now_ = nullptr, *next_;
};

// The same for weights that are expanded: each stretch while the matrix unit multiplies the one before it.
template <class Kind>
class Stretches<Kind, true> {
 public:
  Stretches(const ProductArgs& args, int64_t panel, int64_t count, int64_t passes)
      : expander_(args, panel), parts_at_once_((kParts + passes - 1) / passes) {
    want(count);
  }

  void start(int64_t, int64_t count_after) {
    expand(parts_left_);
    now_ = numbers_[turn_];
    turn_ ^= 1;
    want(count_after);
  }

  class Blocks {
   public:
    explicit Blocks(Stretches& stretches) : stretches_(stretches), block_(stretches.now_) {}

    template <class AnyPrefetch>
    const void* next(const AnyPrefetch& ahead) {
      ahead.fetch_all();
      stretches_.expand(stretches_.parts_at_once_);
      const void* block = block_;
      block_ += kNumbersOfBlock;
      return block;
    }

   private:
    Stretches& stretches_;
    const typename Kind::X* block_;
  };

  Blocks blocks() { return Blocks(*this); }

 private:
  static constexpr int64_t kParts = kNumbersOfBlock / kExpandedAtOnce;

  void want(int64_t blocks) {
    parts_left_ = blocks * kParts;
    to_ = numbers_[turn_];
  }

  void expand(int64_t parts) {
    for (; parts > 0 && parts_left_ > 0; --parts) {
      if (parts_left_ % kParts == 0) expander_.start_block();
      expander_.expand(to_);
      to_ += kExpandedAtOnce;
      if (--parts_left_ % kParts == 0) expander_.end_block(to_ - kNumbersOfBlock);
    }
  }

  alignas(64) typename Kind::X numbers_[2][kMaxBlocks * kNumbersOfBlock];
  typename Kind::Expander expander_;
  const int64_t parts_at_once_;
  int64_t parts_left_ = 0;
  typename Kind::X *now_ = nullptr, *to_ = nullptr;
  int turn_ = 0;
};

class MatrixMultiplier {
 public:
  template <class Kind>
  static int64_t scratch_bytes(const ProductArgs&) {
    return 0;
  }

  // Tokens are multiplied as they are.
  template <class Kind>
  static int64_t packed_bytes(const ProductArgs&) {
    return 0;
  }
  template <class Kind>
  static void pack(const ProductArgs&, int64_t, int64_t, std::byte*) {}

  // Multiplies tokens begin to end with some panels.
  template <class Kind>
  void multiply(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end, std::byte*,
                const std::byte*) {
    const int64_t passes = padded(end - begin, kPanel) / kPanel;
    if (passes == 1)
      multiply_once<Kind>(args, first_panel, last_panel, begin, end);
    else
      multiply_by_stretches<Kind>(args, first_panel, last_panel, begin, end, passes);
  }

 private:
  // Up to 32 tokens, as fast as memory delivers the weights.
  template <class Kind>
  void multiply_once(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end) {
    constexpr int64_t kStep = block_bytes<Kind>(), kShare = kStep / kCacheLine;
    alignas(64) typename Kind::Sum sums[kPanel * kPanel];
    const int64_t blocks = args.in_features / kLines<Kind>;
    Blocks<Kind> all(args, first_panel, (last_panel - first_panel) * blocks);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) {
        args.addends->start(panel, panel == first_panel, 1);
        args.addends->step();
      }
      const char* ahead = bytes_of<Kind>(args, panel) + kPrefetchDistance<Kind>;
      multiply_lines<Kind>(args, all, begin, end - begin,
                           Stretch<kWeightCache<Kind>, Constant<kShare>>{0, blocks, ahead, {}, kStep}, sums);
      finish(args, panel, begin, end - begin, sums);
    }
  }

  // More tokens, in several passes over each stretch of a panel, which stays in the first cache and is expanded once.
  // The next panel is prefetched meanwhile.
  template <class Kind>
  void multiply_by_stretches(const Pass& args, int64_t first_panel, int64_t last_panel, int64_t begin, int64_t end,
                             int64_t passes) {
    alignas(64) typename Kind::Sum sums[kMaxTokens * kPanel];
    const int64_t blocks = args.in_features / kLines<Kind>, max_blocks = blocks_at_once(passes);
    constexpr int64_t kStep = block_bytes<Kind>();
    const int64_t share = padded(kStep / passes, kCacheLine) / kCacheLine;
    auto count_at = [&](int64_t first) { return blocks - first < max_blocks ? blocks - first : max_blocks; };
    Stretches<Kind> stretches(args, first_panel, count_at(0), passes);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      if (args.addends != nullptr) {
        args.addends->start(panel, panel == first_panel, 1);
        args.addends->step();
      }
      for (int64_t first = 0; first < blocks; first += max_blocks) {
        const bool last = first + max_blocks >= blocks;
        stretches.start(count_at(first), !last                    ? count_at(first + max_blocks)
                                         : panel + 1 < last_panel ? count_at(0)
                                                                  : 0);
        for (int64_t pass = 0; pass < passes; ++pass) {
          const char* ahead = bytes_of<Kind>(args, panel + 1) + pass * share * kCacheLine + first * kStep;
          const int64_t token = begin + pass * kPanel, tokens = end - token < kPanel ? end - token : kPanel;
          auto* of_pass = sums + pass * kPanel * kPanel;
          auto some = stretches.blocks();
          multiply_lines<Kind>(args, some, token, tokens,
                               Stretch<kSecondCache, int64_t>{first, count_at(first), ahead, share, kStep}, of_pass);
          // Here, while the sums are in the first cache.
          if (last) finish(args, panel, token, tokens, of_pass);
        }
      }
    }
  }

  // Multiplies `count` tokens from `token` on, at most 32, with a stretch.
  template <class Kind, class AnyBlocks, class AnyStretch>
  void multiply_lines(const ProductArgs& args, AnyBlocks& blocks, int64_t token, int64_t count,
                      const AnyStretch& stretch, typename Kind::Sum* sums) {
    const bool two = count > kTile;
    if (count != lines_set_) unit_.set_lines(two ? kTile : count, two ? count - kTile : kTile);
    lines_set_ = count;
    if (two)
      multiply_tiles<Kind, true>(args, blocks, token, stretch, sums);
    else
      multiply_tiles<Kind, false>(args, blocks, token, stretch, sums);
  }

  MatrixUnit unit_;
  int64_t lines_set_ = 0;
};

}  // namespace
}  // namespace quire::QUIRE_ISA
