// Lines of a pool of int8 (kernels/int8_cache.py): the codes of one token and head, padded, then their scale, a float.
#pragma once

#include "context.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

inline constexpr float kMostCode = 127.0f;

inline float scale_of(const int8_t* line, int64_t line_bytes) {
  float scale;
  std::memcpy(&scale, line + line_bytes - sizeof(scale), sizeof(scale));
  return scale;
}

template <class T>
inline void make_floating(T* to, const int8_t* line, int64_t head_dim, int64_t line_bytes) {
  const Vec scale = set1(scale_of(line, line_bytes));
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(line + d) * scale);
  if (d < head_dim) store(to + d, load(line + d, static_cast<int>(head_dim - d)) * scale, static_cast<int>(head_dim - d));
}

// Keys and values of a span of one head as numbers in scratch memory, [2, kCapacity, D].
template <class T, int kCapacity>
void make_floating(const AttentionArgs& args, const Span<int8_t, kCapacity>& codes, T* memory, Span<T, kCapacity>& span) {
  const int64_t bytes = args.quantized_line, values = value_offset<int8_t>(args), half = kCapacity * args.head_dim;
  for (int t = 0; t < codes.count; ++t) {
    T* to = memory + t * args.head_dim;
    make_floating(to, codes.lines[t], args.head_dim, bytes);
    make_floating(to + half, codes.lines[t] + values, args.head_dim, bytes);
  }
  span.count = codes.count;
  for (int t = 0; t < kCapacity; ++t) span.lines[t] = memory + (t < codes.count ? t : codes.count - 1) * args.head_dim;
}

// Rounds n numbers to codes as kernels/int8.py does, and returns their scale. Where it is 0, or NaN since a number is not
// finite, no codes are written.
template <class T>
inline float make_codes(int8_t* codes, const T* from, int64_t n) {
  Vec most = zero(), rest = zero();
  auto look = [&](int64_t d, auto... lanes) {
    const Vec x = load(from + d, lanes...);
    most = max(most, max(x, zero() - x));
    rest = rest + (x - x);  // NaN where x is not finite
  };
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) look(d);
  if (d < n) look(d, static_cast<int>(n - d));
  if (reduce_add(rest) != 0.0f) return std::numeric_limits<float>::quiet_NaN();
  const float scale = reduce_max(most) / kMostCode;
  if (scale == 0.0f) return scale;
  const Vec limit = set1(kMostCode);
  auto round_off = [&](int64_t at, auto... lanes) {
    const Vec code = round(load(from + at, lanes...) / set1(scale));
    store(codes + at, max(zero() - limit, min(limit, code)), lanes...);
  };
  for (d = 0; d + kWidth <= n; d += kWidth) round_off(d);
  if (d < n) round_off(d, static_cast<int>(n - d));
  return scale;
}

// A line of a pool. One that is not finite is not when it is read.
template <class T>
inline void quantize_line(int8_t* line, const T* from, int64_t head_dim, int64_t line_bytes) {
  std::memset(line, 0, line_bytes);
  const float scale = make_codes(line, from, head_dim);
  std::memcpy(line + line_bytes - sizeof(scale), &scale, sizeof(scale));
}

}  // namespace quire::QUIRE_ISA
