// Products by matrix units (AMX), for 16-bit numbers and int8 values. Included only by product.cpp.
#pragma once

namespace quire::QUIRE_ISA {
namespace {

static_assert(kWidth == kTile, "A vector has the columns of a tile: processors with matrix units have AVX-512.");

// How many bytes ahead of its use a weight is prefetched, and into which cache: the second one where it is expanded
// first.
template <class Kind>
constexpr int64_t kPrefetchDistance = kIsExpanded<Kind> ? 1 << 12 : 1 << 13;
template <class Kind>
constexpr int kWeightCache = kIsExpanded<Kind> ? kSecondCache : kFirstCache;

// Cache lines that hold a half of a block.
template <class Kind>
constexpr int64_t kLinesOfHalf = (block_bytes<Kind>() / 2 + kCacheLine - 1) / kCacheLine;

// Bytes of a block as it is multiplied.
constexpr int64_t kMultipliedBytes = kPanel * kWordsOfBlock * kBytesOfWord;

// Tokens in groups, whose number is a multiple of `multiple`; each group has `lines` lines of a tile. If tokens do not
// divide evenly, the last groups repeat some earlier tokens, whose sums get the same bits.
struct Groups {
  Groups(int64_t begin, int64_t end, int64_t multiple)
      : begin(begin),
        end(end),
        count(padded(end - begin, multiple * kTile) / kTile),
        lines((end - begin + count - 1) / count) {}

  int64_t first_of(int64_t group) const {
    const int64_t first = begin + group * lines;
    return first + lines < end ? first : end - lines;
  }

  const int64_t begin, end, count, lines;
};

// Some blocks of a panel, and the memory to prefetch meanwhile: `lines` cache lines with each block, from `ahead` on,
// which moves by `step` bytes.
template <int kCache, class Lines>
struct Stretch {
  int64_t first, count;
  const char* ahead;
  Lines lines;
  int64_t step;
};

// Multiplies one group of tokens or two with a stretch of a panel; adds to the sums after the first stretch.
template <class Kind, bool kTwo, class AnyBlocks, int kCache, class Lines>
void multiply_tiles(const ProductArgs& args, AnyBlocks& blocks, int64_t first, int64_t second,
                    const Stretch<kCache, Lines>& stretch, typename Kind::Sum* sums) {
  using X = typename Kind::X;
  const int64_t bytes = args.x_stride * static_cast<int64_t>(sizeof(X));
  const X *x = x_of<Kind>(args, first), *x_of_second = x_of<Kind>(args, second);
  if (stretch.first == 0)
    clear_sums();
  else
    load_sums<kTwo>(sums, kPanel);
  const char* ahead = stretch.ahead;
  const int64_t end = (stretch.first + stretch.count) * kLines<Kind>;
  for (int64_t k = stretch.first * kLines<Kind>; k < end; k += kLines<Kind>, ahead += stretch.step) {
    const char* block = static_cast<const char*>(blocks.next(Prefetch<kCache, Lines>{ahead, stretch.lines}));
    add_products<X, kTwo>(x + k, x_of_second + k, bytes, block, block + kMultipliedBytes / 2, 64);
  }
  store_sums<kTwo>(sums, kPanel);
}

// Multiplies four groups of tokens with one tile of each block of a panel. `ahead` is prefetched meanwhile.
template <class Kind>
void multiply_half(const ProductArgs& args, int64_t panel, int64_t half, const Groups& groups, const char* ahead,
                   typename Kind::Sum* sums) {
  using X = typename Kind::X;
  const int64_t bytes = args.x_stride * static_cast<int64_t>(sizeof(X));
  const X* x[4];
  for (int64_t group = 0; group < 4; ++group) x[group] = x_of<Kind>(args, groups.first_of(group));
  Blocks<Kind, 1> blocks(args, panel, args.in_features / kLines<Kind>, half);
  clear_sums();
  for (int64_t k = 0; k < args.in_features; k += kLines<Kind>, ahead += block_bytes<Kind>()) {
    const void* block = blocks.next(Prefetch<kSecondCache, Constant<kLinesOfHalf<Kind>>>{ahead, {}});
    _tile_loadd(6, static_cast<const char*>(block) + half * kMultipliedBytes / 2, 64);
    _tile_loadd(4, x[0] + k, bytes);
    QUIRE_MULTIPLY(X, 0, 4, 6);
    _tile_loadd(5, x[1] + k, bytes);
    QUIRE_MULTIPLY(X, 1, 5, 6);
    _tile_loadd(4, x[2] + k, bytes);
    QUIRE_MULTIPLY(X, 2, 4, 6);
    _tile_loadd(5, x[3] + k, bytes);
    QUIRE_MULTIPLY(X, 3, 5, 6);
  }
  sums += half * kTile;
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kTile * kPanel, kPanel * 4);
  _tile_stored(2, sums + 2 * kTile * kPanel, kPanel * 4);
  _tile_stored(3, sums + 3 * kTile * kPanel, kPanel * 4);
}

// Blocks of a stretch. With as much of 32 tokens they fill half of the first cache, or a quarter where there are only a
// few passes of tokens.
constexpr int64_t kMaxBlocks = 8;
inline int64_t blocks_at_once(int64_t passes) { return passes > 4 ? kMaxBlocks : kMaxBlocks / 2; }

// The consecutive stretches of panels; each stretch is multiplied in several passes of tokens.
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
  static constexpr int64_t kBytesAtOnce = 3 << 18;  // stay in the second cache

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
    const int64_t tokens = end - begin;
    const Groups groups(begin, end, tokens > 4 * kTile ? 2 : tokens > 2 * kTile ? 4 : 1);
    const MatrixUnit unit(groups.lines);
    if (groups.count > 4) return multiply_by_stretches<Kind>(args, first_panel, last_panel, groups);
    if (groups.count == 4) return multiply_halves<Kind>(args, first_panel, last_panel, groups);
    if (groups.count == 2) return multiply_whole<Kind, true>(args, first_panel, last_panel, groups);
    multiply_whole<Kind, false>(args, first_panel, last_panel, groups);
  }

 private:
  // Up to 32 tokens, as fast as memory delivers the weights.
  template <class Kind, bool kTwo>
  static void multiply_whole(const Pass& args, int64_t first_panel, int64_t last_panel, const Groups& groups) {
    constexpr int64_t kStep = block_bytes<Kind>(), kShare = kStep / kCacheLine;
    alignas(64) typename Kind::Sum sums[kPanel * kPanel];
    const int64_t blocks = args.in_features / kLines<Kind>;
    Blocks<Kind> all(args, first_panel, (last_panel - first_panel) * blocks);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      start_addends(args, panel, first_panel);
      const char* ahead = bytes_of<Kind>(args, panel) + kPrefetchDistance<Kind>;
      multiply_tiles<Kind, kTwo>(args, all, groups.first_of(0), groups.first_of(1),
                                 Stretch<kWeightCache<Kind>, Constant<kShare>>{0, blocks, ahead, {}, kStep}, sums);
      finish_groups(args, panel, groups, 0, groups.count, sums);
    }
  }

  // Up to 64 tokens: four tiles hold their sums with first one half of a panel's columns, then the other, so that sums
  // stay in tiles until they are complete, and each tile of the weight is loaded once. The next half is prefetched.
  template <class Kind>
  static void multiply_halves(const Pass& args, int64_t first_panel, int64_t last_panel, const Groups& groups) {
    alignas(64) typename Kind::Sum sums[4 * kTile * kPanel];
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      start_addends(args, panel, first_panel);
      const char* second = bytes_of<Kind>(args, panel) + block_bytes<Kind>() - kLinesOfHalf<Kind> * kCacheLine;
      multiply_half<Kind>(args, panel, 0, groups, second, sums);
      multiply_half<Kind>(args, panel, 1, groups, bytes_of<Kind>(args, panel + 1), sums);
      finish_groups(args, panel, groups, 0, groups.count, sums);
    }
  }

  // More tokens, two groups in each of several passes over each stretch of a panel, which stays in the first cache and
  // is expanded once. The next panel is prefetched meanwhile.
  template <class Kind>
  static void multiply_by_stretches(const Pass& args, int64_t first_panel, int64_t last_panel, const Groups& groups) {
    alignas(64) typename Kind::Sum sums[kMaxTokens * kPanel];
    const int64_t passes = groups.count / 2;
    const int64_t blocks = args.in_features / kLines<Kind>, max_blocks = blocks_at_once(passes);
    constexpr int64_t kStep = block_bytes<Kind>();
    const int64_t share = padded(kStep / passes, kCacheLine) / kCacheLine;
    auto count_at = [&](int64_t first) { return blocks - first < max_blocks ? blocks - first : max_blocks; };
    Stretches<Kind> stretches(args, first_panel, count_at(0), passes);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      start_addends(args, panel, first_panel);
      for (int64_t first = 0; first < blocks; first += max_blocks) {
        const bool last = first + max_blocks >= blocks;
        stretches.start(count_at(first), !last                    ? count_at(first + max_blocks)
                                         : panel + 1 < last_panel ? count_at(0)
                                                                  : 0);
        for (int64_t group = 0; group < groups.count; group += 2) {
          const char* ahead = bytes_of<Kind>(args, panel + 1) + group / 2 * share * kCacheLine + first * kStep;
          auto* of_pass = sums + group * kTile * kPanel;
          auto some = stretches.blocks();
          multiply_tiles<Kind, true>(args, some, groups.first_of(group), groups.first_of(group + 1),
                                     Stretch<kSecondCache, int64_t>{first, count_at(first), ahead, share, kStep},
                                     of_pass);
          // Here, while the sums are in the first cache.
          if (last) finish_groups(args, panel, groups, group, 2, of_pass);
        }
      }
    }
  }

  static void start_addends(const Pass& args, int64_t panel, int64_t first_panel) {
    if (args.addends == nullptr) return;
    args.addends->start(panel, panel == first_panel, 1);
    args.addends->step();
  }

  // Writes one panel of `count` groups from `first` on, from the sums of a tile of lines of each.
  static void finish_groups(const Pass& args, int64_t panel, const Groups& groups, int64_t first, int64_t count,
                            const auto* sums) {
    for (int64_t group = first; group < first + count; ++group, sums += kTile * kPanel)
      finish(args, panel, groups.first_of(group), groups.lines, sums);
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
