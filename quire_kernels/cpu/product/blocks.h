// The operands of products, and the blocks of a panel (pack_weight.cpp) in the order of their use. Included only by
// product.cpp.
#pragma once

#include <type_traits>

#include "product/bf12.h"
#include "product/coded.h"
#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kCacheLine = 64;
// Bytes of a token that are multiplied with a block.
constexpr int64_t kLineBytes = kWordsOfBlock * 4;
// 16-bit numbers of a block, and the number of them that are expanded from the stored form at once.
constexpr int64_t kNumbersOfBlock = kPanel * kPanel;
constexpr int64_t kExpandedAtOnce = Bf12Group::kNumbers;

template <int64_t kValue>
using Constant = std::integral_constant<int64_t, kValue>;

// Int8 values as floating numbers, which are exact; `count` is a multiple of 32.
template <class Number>
inline void convert_int8(Number* to, const int8_t* values, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<Number, BF16>) {
      const __m512bh both = _mm512_cvtne2ps_pbh(load(values + i + 16).v, load(values + i).v);
      _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(both));
      continue;
    }
#endif
    for (int64_t j = i; j < i + 32; j += kWidth) store(to + j, load(values + j));
  }
}

// Converts int8 panels to floating numbers, one after the other.
template <class Number>
class Int8Expander {
 public:
  static constexpr int64_t kBlockBytes = kNumbersOfBlock;
  static int64_t head_bytes(const ProductArgs&) { return 0; }

  Int8Expander(const ProductArgs& args, int64_t panel)
      : values_(static_cast<const int8_t*>(args.weight) + panel * args.in_features * kPanel) {}

  void start_block() {}
  void expand(Number* numbers) {
    convert_int8(numbers, values_, kExpandedAtOnce);
    values_ += kExpandedAtOnce;
  }
  void skip(int64_t parts) { values_ += parts * kExpandedAtOnce; }
  void end_block(Number*) {}

 private:
  const int8_t* values_;
};

// Expands panels of 12 bits a number to bfloat16.
class Bf12Expander {
 public:
  static constexpr int64_t kBlockBytes = kNumbersOfBlock / Bf12Group::kNumbers * sizeof(Bf12Group);
  static int64_t head_bytes(const ProductArgs&) { return sizeof(Bf12Head); }

  Bf12Expander(const ProductArgs& args, int64_t panel) : numbers_(args.in_features * kPanel) {
    const std::byte* panels = static_cast<const std::byte*>(args.weight);
    const int64_t bytes = bf12_panel_bytes(numbers_);
    at_ = panels + panel * bytes;
    exceptions_ = reinterpret_cast<const Bf12Exception*>(panels + num_panels(args) * bytes);
  }

  void start_block() {
    if (start_ == end_) start_panel();
  }

  void expand(BF16* numbers) {
    expand_group(numbers, *reinterpret_cast<const Bf12Group*>(at_), upper_bytes_);
    at_ += sizeof(Bf12Group);
  }
  void skip(int64_t parts) { at_ += parts * sizeof(Bf12Group); }

  void end_block(BF16* block) {
    for (; exception_ != last_exception_ && exception_->number < start_ + kNumbersOfBlock; ++exception_)
      block[exception_->number - start_].bits = exception_->bits;
    start_ += kNumbersOfBlock;
  }

 private:
  void start_panel() {
    const auto& head = *reinterpret_cast<const Bf12Head*>(at_);
    upper_bytes_ = load_table(head.upper);
    exception_ = exceptions_ + head.first_exception;
    last_exception_ = exception_ + head.num_exceptions;
    prefetch<kFirstCache>(last_exception_);  // the exceptions of the next panel
    start_ = 0;
    end_ = numbers_;
    at_ += sizeof(Bf12Head);
  }

  const int64_t numbers_;  // of a panel
  const std::byte* at_;
  const Bf12Exception *exceptions_, *exception_ = nullptr, *last_exception_ = nullptr;
  ByteVector upper_bytes_;
  int64_t start_ = 0, end_ = 0;  // of the block and of the panel
};

// The kinds of operands: X, the elements of a token; Weight, the elements of the weight in memory; and the Sum of their
// products. One, two or four elements of a token are a word. An Expander converts a weight that is not multiplied as
// stored.
template <class Number>
struct Pairs {
  using X = Number;
  using Weight = Number;
  using Sum = float;
  using Expander = void;
};

template <class Number>
struct PairsByInt8 {
  using X = Number;
  using Weight = int8_t;
  using Sum = float;
  using Expander = Int8Expander<Number>;
};

struct PairsOfBf12 {
  using X = BF16;
  using Weight = std::byte;
  using Sum = float;
  using Expander = Bf12Expander;
};

template <class Format>
struct PairsOfCoded {
  using X = BF16;
  using Weight = std::byte;
  using Sum = float;
  using Expander = CodedExpander<Format>;
};

// Floats, by floats or by int8 values that are converted when they are loaded.
template <class Stored>
struct Floats {
  using X = float;
  using Weight = Stored;
  using Sum = float;
  using Expander = void;
};

struct Int8ByInt8 {
  using X = int8_t;
  using Weight = int8_t;
  using Sum = int32_t;
  using Expander = void;
};

template <class>
constexpr bool kIsCoded = false;
template <class Format>
constexpr bool kIsCoded<PairsOfCoded<Format>> = true;

template <class Kind>
constexpr bool kIsExpanded = !std::is_void_v<typename Kind::Expander>;

// Lines of a block.
template <class Kind>
constexpr int64_t kLines = kLineBytes / sizeof(typename Kind::X);

// Stored bytes before a panel's blocks, and stored bytes of a block.
template <class Kind>
int64_t head_bytes(const ProductArgs& args) {
  if constexpr (kIsExpanded<Kind>)
    return Kind::Expander::head_bytes(args);
  else
    return 0;
}

template <class Kind>
constexpr int64_t block_bytes() {
  if constexpr (kIsExpanded<Kind>)
    return Kind::Expander::kBlockBytes;
  else
    return kLines<Kind> * kPanel * sizeof(typename Kind::Weight);
}

template <class Kind>
inline int64_t panel_bytes(const ProductArgs& args) {
  return head_bytes<Kind>(args) + args.in_features / kLines<Kind> * block_bytes<Kind>();
}

template <class Kind>
inline const char* bytes_of(const ProductArgs& args, int64_t panel) {
  return static_cast<const char*>(args.weight) + panel * panel_bytes<Kind>(args);
}

// Memory to prefetch while a block is expanded or multiplied. The number of cache lines is a constant where it is
// known.
template <int kCache, class Lines = int64_t>
struct Prefetch {
  const char* start;
  Lines lines;

  void fetch(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) prefetch<kCache>(start + i * kCacheLine);
  }
  void fetch_all() const { fetch(0, lines); }
  void fetch_part(int64_t part, int64_t parts) const { fetch(part * lines / parts, (part + 1) * lines / parts); }
};

// The same for block after block.
template <int kCache, class Lines>
struct MovingPrefetch : Prefetch<kCache, Lines> {
  void go_on() { this->start += this->lines * kCacheLine; }
};

// Blocks that are multiplied as stored, panel after panel.
template <class Kind>
class StoredBlocks {
 public:
  StoredBlocks(const ProductArgs& args, int64_t panel, int64_t, int64_t = 0)
      : StoredBlocks(bytes_of<Kind>(args, panel)) {}
  explicit StoredBlocks(const void* block) : block_(static_cast<const char*>(block)) {}

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    ahead.fetch_all();
    const void* block = block_;
    block_ += block_bytes<Kind>();
    return block;
  }

  // Before word `at` of a block is multiplied, where `next` prefetches nothing.
  template <class AnyPrefetch>
  void go_on(int64_t at, const AnyPrefetch& ahead) {
    ahead.fetch_part(at, kWordsOfBlock);
  }

 private:
  const char* block_;
};

constexpr Prefetch<kFirstCache, Constant<0>> kNoPrefetch{nullptr, {}};

// Expands `count` blocks, panel after panel. Memory is prefetched a few lines at a time, because a processor stalls
// when its queue of requests is full.
template <class Kind>
class BlockExpander {
 public:
  static constexpr int64_t kParts = kNumbersOfBlock / kExpandedAtOnce;

  BlockExpander(const ProductArgs& args, int64_t panel, int64_t count) : expander_(args, panel), left_(count) {}

  // The next one, if there is one: both tiles, or with kTiles 1 only `tile`.
  template <int kTiles = 2, class AnyPrefetch>
  void expand(typename Kind::X* block, const AnyPrefetch& ahead, int64_t tile = 0) {
    constexpr int64_t kPartsOfTile = kParts / 2, kWanted = kTiles * kPartsOfTile;
    if (!start()) return;
    if constexpr (kTiles == 1) expander_.skip(tile * kPartsOfTile);
    for (int64_t part = 0; part < kWanted; ++part) {
      expander_.expand(block + (tile * kPartsOfTile + part) * kExpandedAtOnce);
      ahead.fetch_part(part, kWanted);
    }
    if constexpr (kTiles == 1) expander_.skip((1 - tile) * kPartsOfTile);
    expander_.end_block(block);
  }

  // Whether there is another one.
  bool start() {
    if (left_-- <= 0) return false;
    expander_.start_block();
    return true;
  }

  template <class AnyPrefetch>
  void expand_part(typename Kind::X* block, int64_t part, const AnyPrefetch& ahead) {
    expander_.expand(block + part * kExpandedAtOnce);
    ahead.fetch_part(part, kParts);
  }

 private:
  typename Kind::Expander expander_;
  int64_t left_;
};

// Blocks that are expanded while the block before them is multiplied: both tiles of each, or with kTiles 1 only `tile`.
template <class Kind, int kTiles>
class ExpandedBlocks {
 public:
  ExpandedBlocks(const ProductArgs& args, int64_t panel, int64_t count, int64_t tile = 0)
      : expander_(args, panel, count), tile_(tile) {
    expander_.template expand<kTiles>(blocks_[0], kNoPrefetch, tile);
  }

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    const void* block = blocks_[turn_];
    turn_ ^= 1;
    expander_.template expand<kTiles>(blocks_[turn_], ahead, tile_);
    return block;
  }

 private:
  alignas(64) typename Kind::X blocks_[2][kNumbersOfBlock];
  BlockExpander<Kind> expander_;
  const int64_t tile_;
  int turn_ = 0;
};

// The same, but blocks are kept in `memory`: all of them, or the last kTurns.
template <class Kind, int64_t kTurns = 0>
class KeptBlocks {
 public:
  KeptBlocks(const ProductArgs& args, int64_t panel, int64_t count, typename Kind::X* memory)
      : expander_(args, panel, count), next_(memory) {
    expander_.expand(next_, kNoPrefetch);
  }

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    const void* block = next_;
    next_ += kTurns > 0 && ++turn_ % kTurns == 0 ? -(kTurns - 1) * kNumbersOfBlock : kNumbersOfBlock;
    if constexpr (kIsCoded<Kind>)
      has_next_ = expander_.start();
    else
      expander_.expand(next_, ahead);
    return block;
  }

  // Before word `at` of a block is multiplied. Coded blocks are expanded a little at a time, so that the processor does
  // both at once.
  template <class AnyPrefetch>
  void go_on(int64_t at, const AnyPrefetch& ahead) {
    constexpr int64_t kWordsOfPart = kWordsOfBlock / BlockExpander<Kind>::kParts;
    if (has_next_ && at % kWordsOfPart == 0) expander_.expand_part(next_, at / kWordsOfPart, ahead);
  }

 private:
  BlockExpander<Kind> expander_;
  typename Kind::X* next_;
  int64_t turn_ = 0;
  bool has_next_ = false;
};

template <class Kind, int kTiles = 2>
using Blocks = std::conditional_t<kIsExpanded<Kind>, ExpandedBlocks<Kind, kTiles>, StoredBlocks<Kind>>;

}  // namespace
}  // namespace quire::QUIRE_ISA
