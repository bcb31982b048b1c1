// What products multiply, and the blocks of a panel (pack_weight.cpp) as they do so. Included by product.cpp alone.
#pragma once

#include <type_traits>

#include "product/bf12.h"
#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kCacheLine = 64;
// Bytes that a token brings to a block.
constexpr int64_t kLineBytes = kWordsOfBlock * 4;
// Numbers of a block, where they have 16 bits, and those that are made at once of what a weight is stored as.
constexpr int64_t kNumbersOfBlock = kPanel * kPanel;
constexpr int64_t kMadeAtOnce = Bf12Group::kNumbers;

template <int64_t kValue>
using Constant = std::integral_constant<int64_t, kValue>;

// Int8 values as floating numbers, which are exact; `count` is a multiple of 32.
template <class Number>
inline void make_floating(Number* to, const int8_t* values, int64_t count) {
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

// Makes floating numbers of int8 panels, one after the other.
template <class Number>
class Int8Maker {
 public:
  static constexpr int64_t kHeadBytes = 0, kBlockBytes = kNumbersOfBlock;

  Int8Maker(const ProductArgs& args, int64_t panel)
      : values_(static_cast<const int8_t*>(args.weight) + panel * args.in_features * kPanel) {}

  void start_block() {}
  void make(Number* numbers) {
    make_floating(numbers, values_, kMadeAtOnce);
    values_ += kMadeAtOnce;
  }
  void end_block(Number*) {}

 private:
  const int8_t* values_;
};

// Makes bfloat16 numbers of panels in 12 bits.
class Bf12Maker {
 public:
  static constexpr int64_t kHeadBytes = sizeof(Bf12Head);
  static constexpr int64_t kBlockBytes = kNumbersOfBlock / Bf12Group::kNumbers * sizeof(Bf12Group);

  Bf12Maker(const ProductArgs& args, int64_t panel) : numbers_(args.in_features * kPanel) {
    const std::byte* panels = static_cast<const std::byte*>(args.weight);
    const int64_t bytes = bf12_panel_bytes(numbers_);
    at_ = panels + panel * bytes;
    exceptions_ = reinterpret_cast<const Bf12Exception*>(panels + num_panels(args) * bytes);
  }

  void start_block() {
    if (start_ == end_) start_panel();
  }

  void make(BF16* numbers) {
    expand(numbers, *reinterpret_cast<const Bf12Group*>(at_), upper_bytes_);
    at_ += sizeof(Bf12Group);
  }

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
    prefetch<kFirstCache>(last_exception_);  // where those of the next panel are
    start_ = 0;
    end_ = numbers_;
    at_ += kHeadBytes;
  }

  const int64_t numbers_;  // of a panel
  const std::byte* at_;
  const Bf12Exception *exceptions_, *exception_ = nullptr, *last_exception_ = nullptr;
  ByteVector upper_bytes_;
  int64_t start_ = 0, end_ = 0;  // of the block and of the panel
};

// What is multiplied: elements of a token, elements of the weight in memory, and the sums of their products. A token's
// elements are words, or pairs or fours of them are. A Maker makes of a weight what is multiplied, where that is not
// the same.
template <class Number>
struct Pairs {
  using X = Number;
  using Weight = Number;
  using Sum = float;
  using Maker = void;
};

template <class Number>
struct PairsByInt8 {
  using X = Number;
  using Weight = int8_t;
  using Sum = float;
  using Maker = Int8Maker<Number>;
};

struct PairsOfBf12 {
  using X = BF16;
  using Weight = std::byte;
  using Sum = float;
  using Maker = Bf12Maker;
};

// Floats, or int8 values that become floats when they are loaded.
template <class Stored>
struct Floats {
  using X = float;
  using Weight = Stored;
  using Sum = float;
  using Maker = void;
};

struct Int8ByInt8 {
  using X = int8_t;
  using Weight = int8_t;
  using Sum = int32_t;
  using Maker = void;
};

template <class Kind>
constexpr bool kIsMade = !std::is_void_v<typename Kind::Maker>;

// Lines of a block.
template <class Kind>
constexpr int64_t kLines = kLineBytes / sizeof(typename Kind::X);

// Bytes in memory that come before a panel's blocks, and those of a block.
template <class Kind>
constexpr int64_t head_bytes() {
  if constexpr (kIsMade<Kind>)
    return Kind::Maker::kHeadBytes;
  else
    return 0;
}

template <class Kind>
constexpr int64_t block_bytes() {
  if constexpr (kIsMade<Kind>)
    return Kind::Maker::kBlockBytes;
  else
    return kLines<Kind> * kPanel * sizeof(typename Kind::Weight);
}

template <class Kind>
inline int64_t panel_bytes(const ProductArgs& args) {
  return head_bytes<Kind>() + args.in_features / kLines<Kind> * block_bytes<Kind>();
}

template <class Kind>
inline const char* bytes_of(const ProductArgs& args, int64_t panel) {
  return static_cast<const char*>(args.weight) + panel * panel_bytes<Kind>(args);
}

// Memory to prefetch while a block is made or multiplied: so many cache lines, a constant where they are known.
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

// The same, block after block.
template <int kCache, class Lines>
struct MovingPrefetch : Prefetch<kCache, Lines> {
  void go_on() { this->start += this->lines * kCacheLine; }
};

// Blocks as they lie in memory, of panel after panel.
template <class Kind>
class StoredBlocks {
 public:
  StoredBlocks(const ProductArgs& args, int64_t panel, int64_t) : StoredBlocks(bytes_of<Kind>(args, panel)) {}
  explicit StoredBlocks(const void* block) : block_(static_cast<const char*>(block)) {}

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    ahead.fetch_all();
    const void* block = block_;
    block_ += block_bytes<Kind>();
    return block;
  }

 private:
  const char* block_;
};

constexpr Prefetch<kFirstCache, Constant<0>> kNoPrefetch{nullptr, {}};

// Makes `count` blocks, of panel after panel. Memory is prefetched a few lines at a time: a processor whose queue of
// requests is full does nothing else.
template <class Kind>
class BlockMaker {
 public:
  BlockMaker(const ProductArgs& args, int64_t panel, int64_t count) : maker_(args, panel), left_(count) {}

  // The next one, if there is one.
  template <class AnyPrefetch>
  void make(typename Kind::X* block, const AnyPrefetch& ahead) {
    if (left_-- <= 0) return;
    constexpr int64_t kParts = kNumbersOfBlock / kMadeAtOnce;
    maker_.start_block();
    for (int64_t part = 0; part < kParts; ++part) {
      maker_.make(block + part * kMadeAtOnce);
      ahead.fetch_part(part, kParts);
    }
    maker_.end_block(block);
  }

 private:
  typename Kind::Maker maker_;
  int64_t left_;
};

// Blocks that are made one ahead of their use, while the one before it is multiplied.
template <class Kind>
class MadeBlocks {
 public:
  MadeBlocks(const ProductArgs& args, int64_t panel, int64_t count) : maker_(args, panel, count) {
    maker_.make(blocks_[0], kNoPrefetch);
  }

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    const void* block = blocks_[turn_];
    turn_ ^= 1;
    maker_.make(blocks_[turn_], ahead);
    return block;
  }

 private:
  alignas(64) typename Kind::X blocks_[2][kNumbersOfBlock];
  BlockMaker<Kind> maker_;
  int turn_ = 0;
};

// The same, which all stay in `memory`.
template <class Kind>
class KeptBlocks {
 public:
  KeptBlocks(const ProductArgs& args, int64_t panel, int64_t count, typename Kind::X* memory)
      : maker_(args, panel, count), next_(memory) {
    maker_.make(next_, kNoPrefetch);
  }

  template <class AnyPrefetch>
  const void* next(const AnyPrefetch& ahead) {
    const void* block = next_;
    next_ += kNumbersOfBlock;
    maker_.make(next_, ahead);
    return block;
  }

 private:
  BlockMaker<Kind> maker_;
  typename Kind::X* next_;
};

template <class Kind>
using Blocks = std::conditional_t<kIsMade<Kind>, MadeBlocks<Kind>, StoredBlocks<Kind>>;

}  // namespace
}  // namespace quire::QUIRE_ISA
