// Rounding to int8 as kernels/int8.py does it, and lines of a pool of int8: the values of one token and head, padded,
// then their scale, a float.
#pragma once

#include "vec/vec.h"

namespace quire::QUIRE_ISA {

inline constexpr float kMaxInt8 = 127.0f;

inline float scale_of(const int8_t* line, int64_t line_bytes) {
  float scale;
  std::memcpy(&scale, line + line_bytes - sizeof(scale), sizeof(scale));
  return scale;
}

template <class T>
inline void dequantize_line(T* to, const int8_t* line, int64_t head_dim, int64_t line_bytes) {
  const Vec scale = set1(scale_of(line, line_bytes));
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(to + d, load(line + d) * scale);
  if (d < head_dim)
    store(to + d, load(line + d, static_cast<int>(head_dim - d)) * scale, static_cast<int>(head_dim - d));
}

// Rounds n numbers and returns their scale. Where it is 0, or NaN because a number is not finite, nothing is written.
template <class T>
inline float round_to_int8(int8_t* values, const T* from, int64_t n) {
  Vec largest = zero(), rest = zero();
  auto scan = [&](int64_t d, auto... lanes) {
    const Vec x = load(from + d, lanes...);
    largest = max(largest, max(x, zero() - x));
    rest = rest + (x - x);  // NaN where x is not finite
  };
  int64_t d = 0;
  for (; d + kWidth <= n; d += kWidth) scan(d);
  if (d < n) scan(d, static_cast<int>(n - d));
  if (reduce_add(rest) != 0.0f) return std::numeric_limits<float>::quiet_NaN();
  const float scale = reduce_max(largest) / kMaxInt8;
  if (scale == 0.0f) return scale;
  const Vec limit = set1(kMaxInt8);
  auto round_lanes = [&](int64_t at, auto... lanes) {
    const Vec value = round(load(from + at, lanes...) / set1(scale));
    store(values + at, max(zero() - limit, min(limit, value)), lanes...);
  };
  for (d = 0; d + kWidth <= n; d += kWidth) round_lanes(d);
  if (d < n) round_lanes(d, static_cast<int>(n - d));
  return scale;
}

// Writes a line of a pool. One that is not finite is not finite when it is read.
template <class T>
inline void quantize_line(int8_t* line, const T* from, int64_t head_dim, int64_t line_bytes) {
  std::memset(line, 0, line_bytes);
  const float scale = round_to_int8(line, from, head_dim);
  std::memcpy(line + line_bytes - sizeof(scale), &scale, sizeof(scale));
}

}  // namespace quire::QUIRE_ISA
