// Low-rank parts of a product: each token adds B (scale A x) of the adapter in its slot to some columns (LoRA).
//
// `shrink` computes scale A x of all tokens, and a product adds B times that to its sums, before its activation. The
// order of sums depends only on the token's own adapter, so neither other tokens nor their number change its bits.
// Tokens are multiplied slot by slot: tokens with the same adapter share its loads.
//
// A lies in groups of 4 lines, whose cache lines alternate, so that whole groups are read from one end to the other. B
// lies in tiles of 16 columns, each word by word of `shrunk`: one float number, or a pair of bfloat16 numbers. A gated
// product has the tiles of the gates first, then the tiles of the other outputs. Included only by product.cpp.
#pragma once

#include <type_traits>

#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLinesOfGroup = 4;
// Tokens of a slot that are multiplied together, so that their sums fit into registers.
constexpr int64_t kTokensAtOnce = kWidth == 16 ? 4 : 2;

// Numbers of T in words: vectors of them, as they are multiplied.
template <class T>
struct LowRank {
  using Shrunk = float;
  static constexpr int64_t kNumbers = 1;  // of a word

  static Vec load_words(const T* p) { return load(p); }
  static Vec word(const float* p) { return set1(*p); }
  static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

template <>
struct LowRank<BF16> {
  using Shrunk = BF16;
  static constexpr int64_t kNumbers = 2;

  static Vec load_words(const BF16* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec word(const BF16* p) {
    float pair;
    std::memcpy(&pair, p, sizeof(pair));
    return set1(pair);
  }
  static Vec add(Vec sum, Vec a, Vec b) { return Lanes<Pairs<BF16>>::add(sum, a, b); }
};

// kCount lines of A by kTokens tokens. As many lines from `ahead` on are prefetched meanwhile.
template <class T, int kCount, int kTokens>
inline void shrink_lines(const ShrinkArgs& args, const LowRankPart& part, const T* a, const T* ahead, int64_t line,
                         const int64_t* tokens) {
  using Words = LowRank<T>;
  constexpr int64_t kInLine = kCacheLine / sizeof(T), kInVector = kWidth * Words::kNumbers;
  const int64_t n = args.in_features;
  auto in_group = [n](int64_t i) { return i / kLinesOfGroup * kLinesOfGroup * n + i % kLinesOfGroup * kInLine; };
  const T* x[kTokens];
  for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const T*>(args.x) + tokens[t] * args.x_stride;
  Vec sums[kTokens][kCount] = {};
  for (int64_t k = 0; k < n; k += kInLine) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) prefetch<kSecondCache>(ahead + in_group(i) + k * kLinesOfGroup);
#pragma GCC unroll 2
    for (int64_t v = 0; v < kInLine; v += kInVector) {
      Vec words[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) words[t] = Words::load_words(x[t] + k + v);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const Vec of_line = Words::load_words(a + in_group(i) + k * kLinesOfGroup + v);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) sums[t][i] = Words::add(sums[t][i], of_line, words[t]);
      }
    }
  }
  const float scale = static_cast<float>(part.scale);
  for (int t = 0; t < kTokens; ++t) {
    alignas(64) float lines[kWidth] = {};
    for (int i = 0; i < kCount; i += 4) reduce_add4(sums[t] + i, lines + i);
    auto* to = static_cast<typename Words::Shrunk*>(args.shrunk) + tokens[t] * args.shrunk_stride;
    store(to + part.column + line, load(lines) * set1(scale), kCount);
  }
}

// The lines of the next unit are prefetched, unless it has the same lines.
template <class T>
void shrink_as(const ShrinkArgs& args, const int64_t* tokens, const ShrinkUnit* begin, const ShrinkUnit* end) {
  auto lines_of = [&](const ShrinkUnit& unit) {
    return static_cast<const T*>(unit.part->a) + unit.line * args.in_features;
  };
  for (const ShrinkUnit* unit = begin; unit < end; ++unit) {
    const LowRankPart& part = *unit->part;
    const T *a = lines_of(*unit), *ahead = unit + 1 < end ? lines_of(unit[1]) : a;
    const int64_t lines = part.rank - unit->line < kLinesOfUnit ? part.rank - unit->line : kLinesOfUnit;
    for (int64_t token = unit->begin; token < unit->end; token += kTokensAtOnce, ahead = a) {
      const int64_t left = unit->end - token;
      for (int64_t line = 0; line < lines;) {
        const int64_t first = line * args.in_features;
        // Few tokens read more lines at once, so that a sum does not wait for the one before it.
        const bool many = left < kTokensAtOnce && left <= 2 && lines - line >= 2 * kLinesOfGroup;
        with_count<kTokensAtOnce>(left, [&]<int kTokens>() {
          if constexpr (kTokens <= 2)
            if (many)
              return shrink_lines<T, 2 * kLinesOfGroup, kTokens>(args, part, a + first, ahead + first,
                                                                 unit->line + line, tokens + token);
          shrink_lines<T, kLinesOfGroup, kTokens>(args, part, a + first, ahead + first, unit->line + line,
                                                  tokens + token);
        });
        line += many ? 2 * kLinesOfGroup : kLinesOfGroup;
      }
    }
  }
}

inline bool has_tile(const LowRankPart& part, int64_t tile) { return tile >= part.first_tile && tile < part.last_tile; }

// function(slot, first, last) for tokens `first` to `last` - 1 of each slot that are among tokens begin to end - 1.
template <class Function>
inline void for_slots(const TokensBySlot& by_slot, int64_t begin, int64_t end, Function function) {
  for (const TokensOfSlot* of_slot = by_slot.slots; of_slot < by_slot.slots + by_slot.num_slots; ++of_slot) {
    auto first_from = [&](int64_t token) {
      int64_t low = of_slot->begin, high = of_slot->end;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (by_slot.tokens[middle] < token)
          low = middle + 1;
        else
          high = middle;
      }
      return by_slot.tokens + low;
    };
    const int64_t *first = first_from(begin), *last = first_from(end);
    if (first < last) function(of_slot->slot, first, last);
  }
}

void Addends::want(const void* begin, int64_t lines) {
  if (lines <= 0 || last_span_ == std::end(spans_)) return;
  *last_span_++ = {static_cast<const char*>(begin), lines};
  lines_ += lines;
}

// The B of a panel, each once.
void Addends::want_panel(int64_t panel) {
  const int64_t size = args_.dtype == kFloat32 ? sizeof(float) : sizeof(BF16);
  for_slots(by_slot_, begin_, end_, [&](int64_t slot, const int64_t*, const int64_t*) {
    const LowRankPart* parts = args_.parts + slot * args_.num_parts;
    for (int64_t half = 0; half < kPanel / kTile; ++half) {
      for (const LowRankPart* part = parts; part < parts + args_.num_parts; ++part) {
        if (!has_tile(*part, tile(panel, half))) continue;
        const int64_t bytes = part->rank * kTile * size;
        want(static_cast<const char*>(part->b) + (tile(panel, half) - part->first_tile) * bytes, bytes / kCacheLine);
      }
    }
  });
}

// Prefetches this panel's share of the lines of A that the next `shrink` reads.
void Addends::want_share_of_next(int64_t panel) {
  const ShrinkArgs* next = by_slot_.next;
  if (next == nullptr || begin_ != 0) return;
  const int64_t line_of_a = next->in_features * (next->dtype == kFloat32 ? sizeof(float) : sizeof(BF16)) / kCacheLine;
  auto for_parts = [&](auto function) {
    for (const TokensOfSlot* of_slot = by_slot_.slots; of_slot < by_slot_.slots + by_slot_.num_slots; ++of_slot)
      for (int64_t number = 0; of_slot->slot < next->num_slots && number < next->num_parts; ++number)
        function(next->parts[of_slot->slot * next->num_parts + number]);
  };
  int64_t all = 0, at = 0;
  for_parts([&](const LowRankPart& part) { all += part.rank * line_of_a; });
  const int64_t begin = all * panel / num_panels(args_), end = all * (panel + 1) / num_panels(args_);
  for_parts([&](const LowRankPart& part) {
    const int64_t lines = part.rank * line_of_a, from = begin < at ? at : begin,
                  to = end < at + lines ? end : at + lines;
    want(static_cast<const char*>(part.a) + (from - at) * kCacheLine, to - from);
    at += lines;
  });
}

void Addends::start(int64_t panel, bool is_first, int64_t steps) {
  if (is_first) want_panel(panel);
  while (span_ != last_span_) prefetch_line();
  span_ = last_span_ = spans_;
  lines_ = 0;
  if (panel + 1 < num_panels(args_)) want_panel(panel + 1);
  want_share_of_next(panel);
  lines_of_step_ = (lines_ + steps - 1) / steps;
}

template <class T, int kTokens>
void Addends::compute_some(const LowRankPart* parts, const int64_t* tokens) const {
  using Words = LowRank<T>;
  using Shrunk = typename Words::Shrunk;
  constexpr int kVectorsOfTile = kTile / kWidth;
  const Shrunk* shrunk[kTokens];
  for (int t = 0; t < kTokens; ++t)
    shrunk[t] = static_cast<const Shrunk*>(args_.shrunk) + tokens[t] * args_.shrunk_stride;
  for (int64_t half = 0; half < kPanel / kTile; ++half) {
    // Two sums, of every other word each, so that a sum does not wait for the previous one.
    Vec sums[2][kTokens][kVectorsOfTile] = {};
    for (const LowRankPart* part = parts; part < parts + args_.num_parts; ++part) {
      if (!has_tile(*part, tile(panel_, half))) continue;
      const T* b = static_cast<const T*>(part->b) + (tile(panel_, half) - part->first_tile) * part->rank * kTile;
      for (int64_t k = 0; k < part->rank; k += 2 * Words::kNumbers) {
#pragma GCC unroll 2
        for (int turn = 0; turn < 2; ++turn, b += kTile * Words::kNumbers) {
          for (int i = 0; i < kVectorsOfTile; ++i) {
            const Vec columns = Words::load_words(b + i * kWidth * Words::kNumbers);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t)
              sums[turn][t][i] = Words::add(sums[turn][t][i], columns,
                                            Words::word(shrunk[t] + part->column + k + turn * Words::kNumbers));
          }
        }
      }
    }
    for (int t = 0; t < kTokens; ++t)
      for (int i = 0; i < kVectorsOfTile; ++i)
        store(sums_ + (tokens[t] - begin_) * kPanel + half * kTile + i * kWidth, sums[0][t][i] + sums[1][t][i]);
  }
}

template <class T>
void Addends::compute_as() const {
  for_slots(by_slot_, begin_, end_, [&](int64_t slot, const int64_t* first, const int64_t* last) {
    for (; first < last; first += kTokensAtOnce)
      with_count<kTokensAtOnce>(
          last - first, [&]<int kTokens>() { compute_some<T, kTokens>(args_.parts + slot * args_.num_parts, first); });
  });
}

void Addends::compute(int64_t panel) {
  panel_ = panel;
  switch (args_.dtype) {
    case kFloat32:
      return compute_as<float>();
    case kBFloat16:
      return compute_as<BF16>();
    default:
      return compute_as<F16>();
  }
}

}  // namespace

extern const decltype(IsaKernels::shrink) shrink_kernels = {shrink_as<float>, shrink_as<BF16>, shrink_as<F16>};

}  // namespace quire::QUIRE_ISA
