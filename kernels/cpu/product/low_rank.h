// Low-rank parts of a product: each token adds B (scale A x) of the adapter in its slot to some columns (LoRA).
//
// `shrink` computes scale A x of all tokens, and a product adds B times that to its sums, before its activation. The
// order of sums depends on the token's own adapter alone, so neither other tokens nor their number change its bits.
//
// A lies in groups of 4 lines, of which each cache line is followed by that of the next line: whole groups are read
// from one end to the other. B lies in tiles of 16 columns, each word by word of `shrunk`: of float numbers one, of
// bfloat16 a pair. A gated product has the tiles of the gates first, then as many of what they are multiplied with.
// Included by product.cpp alone.
#pragma once

#include <type_traits>

#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Lines of A that are read together, so that a line of x is read once for all of them.
constexpr int kShrunkAtOnce = 8;
constexpr int kLinesOfGroup = 4;

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

// kCount lines of A by a token. As many lines from `ahead` on are prefetched meanwhile, where it is not null.
template <class T, int kCount, bool kAhead>
inline void shrink_lines(const T* a, const T* ahead, const T* x, int64_t n, float scale,
                         typename LowRank<T>::Shrunk* to) {
  using Words = LowRank<T>;
  constexpr int64_t kInLine = kCacheLine / sizeof(T), kInVector = kWidth * Words::kNumbers;
  Vec sums[kCount];
  for (int i = 0; i < kCount; ++i) sums[i] = zero();
  for (int64_t k = 0; k < n; k += kInLine) {
    if constexpr (kAhead) {
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i)
        prefetch<kSecondCache>(ahead + i / kLinesOfGroup * kLinesOfGroup * n + k * kLinesOfGroup +
                               i % kLinesOfGroup * kInLine);
    }
#pragma GCC unroll 2
    for (int64_t v = 0; v < kInLine; v += kInVector) {
      const Vec words = Words::load_words(x + k + v);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) {
        const T* group = a + i / kLinesOfGroup * kLinesOfGroup * n + k * kLinesOfGroup;
        sums[i] = Words::add(sums[i], Words::load_words(group + i % kLinesOfGroup * kInLine + v), words);
      }
    }
  }
  alignas(64) float lines[kWidth] = {};
  for (int i = 0; i < kCount; i += 4) reduce_add4(sums + i, lines + i);
  store(to, load(lines) * set1(scale), kCount);
}

template <class T, int kCount>
inline void shrink_some(const T* a, const T* ahead, const T* x, int64_t n, float scale,
                        typename LowRank<T>::Shrunk* to) {
  if (ahead == nullptr)
    shrink_lines<T, kCount, false>(a, ahead, x, n, scale, to);
  else
    shrink_lines<T, kCount, true>(a, ahead, x, n, scale, to);
}

// The lines of A are read from memory once, by the first token that has the adapter. Those of the next token's adapter
// are prefetched meanwhile, unless a token before has it.
template <class T>
void shrink_as(const ShrinkArgs& args, int64_t begin, int64_t end) {
  using Shrunk = typename LowRank<T>::Shrunk;
  const int64_t units = units_of_token(args), chunks = units / args.num_parts, n = args.in_features;
  uint64_t seen = 1;
  auto bit = [](int64_t slot) { return slot < 64 ? uint64_t{1} << slot : 0; };
  for (int64_t unit = begin; unit < end;) {
    const int64_t token = unit / units, slot = args.slots[token],
                  last = (token + 1) * units < end ? (token + 1) * units : end;
    const int64_t next = last < end ? args.slots[token + 1] : 0;
    seen |= bit(slot);
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
    while (unit < last && slot != 0) {
      const int64_t number = (unit - token * units) / chunks, first_unit = token * units + number * chunks;
      const LowRankPart &part = args.parts[slot * args.num_parts + number],
                        &after = args.parts[next * args.num_parts + number];
      const int64_t after_rank = (seen & bit(next)) != 0 ? 0 : after.rank;
      Shrunk* to = static_cast<Shrunk*>(args.shrunk) + token * args.shrunk_stride + part.column;
      const float scale = static_cast<float>(part.scale);
      const int64_t end_of_part = last < first_unit + chunks ? last : first_unit + chunks;
      int64_t line = (unit - first_unit) * kLinesOfUnit;
      const int64_t limit = (end_of_part - first_unit) * kLinesOfUnit, end_line = part.rank < limit ? part.rank : limit;
      while (line < end_line) {
        const bool many = end_line - line >= kShrunkAtOnce;
        const int64_t step = many ? kShrunkAtOnce : kLinesOfGroup;
        const T* a = static_cast<const T*>(part.a) + line * n;
        const T* ahead = line + step <= after_rank ? static_cast<const T*>(after.a) + line * n : nullptr;
        if (many)
          shrink_some<T, kShrunkAtOnce>(a, ahead, x, n, scale, to + line);
        else
          shrink_some<T, kLinesOfGroup>(a, ahead, x, n, scale, to + line);
        line += step;
      }
      unit = end_of_part;
    }
    unit = last;
  }
}

inline int64_t tile_of(const ProductArgs& args, int64_t panel, int64_t half) {
  return is_gated(args) ? panel + half * num_panels(args) : panel * (kPanel / kTile) + half;
}

inline bool has_tile(const LowRankPart& part, int64_t tile) { return tile >= part.first_tile && tile < part.last_tile; }

template <class T>
bool low_rank_sums_as(const ProductArgs& args, int64_t panel, int64_t token, float* sums) {
  using Words = LowRank<T>;
  constexpr int kVectorsOfTile = kTile / kWidth;
  const LowRankPart* parts = args.parts + args.slots[token] * args.num_parts;
  const auto* shrunk = static_cast<const typename Words::Shrunk*>(args.shrunk) + token * args.shrunk_stride;
  bool found = false;
  for (int64_t half = 0; half < kPanel / kTile; ++half) {
    const int64_t tile = tile_of(args, panel, half);
    // Of every other word: a sum does not wait for the one before it.
    Vec lanes[2][kVectorsOfTile];
    for (int i = 0; i < kVectorsOfTile; ++i) lanes[0][i] = lanes[1][i] = zero();
    for (const LowRankPart* part = parts; part < parts + args.num_parts; ++part) {
      if (!has_tile(*part, tile)) continue;
      found = true;
      const T* b = static_cast<const T*>(part->b) + (tile - part->first_tile) * part->rank * kTile;
      for (int64_t k = 0; k < part->rank; k += 2 * Words::kNumbers) {
#pragma GCC unroll 2
        for (int turn = 0; turn < 2; ++turn, b += kTile * Words::kNumbers) {
          const Vec word = Words::word(shrunk + part->column + k + turn * Words::kNumbers);
          for (int i = 0; i < kVectorsOfTile; ++i)
            lanes[turn][i] = Words::add(lanes[turn][i], Words::load_words(b + i * kWidth * Words::kNumbers), word);
        }
      }
    }
    for (int i = 0; i < kVectorsOfTile; ++i) store(sums + half * kTile + i * kWidth, lanes[0][i] + lanes[1][i]);
  }
  return found;
}

}  // namespace

// Whether a token has an adapter for a panel; its addends of the panel's columns, kPanel of them.
bool low_rank_sums(const ProductArgs& args, int64_t panel, int64_t token, float* sums) {
  if (args.slots[token] == 0) return false;
  switch (args.dtype) {
    case kFloat32:
      return low_rank_sums_as<float>(args, panel, token, sums);
    case kBFloat16:
      return low_rank_sums_as<BF16>(args, panel, token, sums);
    default:
      return low_rank_sums_as<F16>(args, panel, token, sums);
  }
}

// Starts to load what the adapters of these tokens have for a panel, each once: they are read when the panel is
// multiplied, a few cache lines of each, which takes longer than to multiply them.
void prefetch_low_rank(const ProductArgs& args, int64_t panel, int64_t begin, int64_t end) {
  const int64_t size = args.dtype == kFloat32 ? sizeof(float) : sizeof(BF16);
  uint64_t seen = 1;
  for (int64_t token = begin; token < end; ++token) {
    const uint64_t slot = static_cast<uint64_t>(args.slots[token]), bit = slot < 64 ? uint64_t{1} << slot : 0;
    if ((seen & bit) != 0) continue;
    seen |= bit;
    const LowRankPart* parts = args.parts + slot * args.num_parts;
    for (int64_t half = 0; half < kPanel / kTile; ++half) {
      const int64_t tile = tile_of(args, panel, half);
      for (const LowRankPart* part = parts; part < parts + args.num_parts; ++part) {
        if (!has_tile(*part, tile)) continue;
        const int64_t bytes = part->rank * kTile * size;
        const char* b = static_cast<const char*>(part->b) + (tile - part->first_tile) * bytes;
        for (int64_t at = 0; at < bytes; at += kCacheLine) prefetch<kSecondCache>(b + at);
      }
    }
  }
}

extern const decltype(IsaKernels::shrink) shrink_kernels = {shrink_as<float>, shrink_as<BF16>, shrink_as<F16>};

}  // namespace quire::QUIRE_ISA
