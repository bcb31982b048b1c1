// Products of small matrices in scratch memory, for prefill.
//
// Elements are words of 32 bits: a float, or two bfloat16 that are multiplied with their like and summed up. So the
// layouts are the same: A [m, k words] by rows, B [k words, n], C [m, n] float. A pair of B is (2k, n) and (2k + 1, n).
#pragma once

#include "isa.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

// What prefill multiplies in: elements of this type, `kPair` of them to a word.
template <class T>
struct Words {
  using Element = float;
  static constexpr int kPair = 1;
  static Vec add(Vec sum, const float* a, Vec b) { return fma(set1(*a), b, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Words<BF16> {
  using Element = BF16;
  static constexpr int kPair = 2;
  static Vec add(Vec sum, const float* a, Vec b) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_set1_ps(*a)), reinterpret_cast<__m512bh>(b.v))};
  }
};
#endif

struct Matrix {
  float* at;
  int64_t stride;  // words from one line to the next

  float* line(int64_t i) const { return at + i * stride; }
};

template <class T, int kLines, int kVectors>
inline void multiply_tile(Matrix c, Matrix a, Matrix b, int64_t k, bool add) {
  Vec sums[kLines][kVectors];
  for (int m = 0; m < kLines; ++m)
    for (int i = 0; i < kVectors; ++i) sums[m][i] = add ? load(c.line(m) + i * kWidth) : zero();
  for (int64_t at = 0; at < k; ++at) {
    Vec columns[kVectors];
    for (int i = 0; i < kVectors; ++i) columns[i] = load(b.line(at) + i * kWidth);
    for (int m = 0; m < kLines; ++m)
      for (int i = 0; i < kVectors; ++i) sums[m][i] = Words<T>::add(sums[m][i], a.line(m) + at, columns[i]);
  }
  for (int m = 0; m < kLines; ++m)
    for (int i = 0; i < kVectors; ++i) store(c.line(m) + i * kWidth, sums[m][i]);
}

// C = A B, or C += A B. The numbers of columns and of words are multiples of 16, columns of 32 too; that of lines is one
// of kLinesAtOnce.
template <class T>
inline void multiply(Matrix c, Matrix a, Matrix b, int64_t m, int64_t n, int64_t k, bool add) {
  constexpr int kLines = 4, kColumns = kTileVectors * kWidth;
  for (int64_t i = 0; i < m; i += kLines) {
    const Matrix lines{a.line(i), a.stride};
    int64_t j = 0;
    for (; j + kColumns <= n; j += kColumns)
      multiply_tile<T, kLines, kTileVectors>({c.line(i) + j, c.stride}, lines, {b.at + j, b.stride}, k, add);
    for (; j < n; j += kWidth)
      multiply_tile<T, kLines, 1>({c.line(i) + j, c.stride}, lines, {b.at + j, b.stride}, k, add);
  }
}

#if !defined(__AMX_BF16__)
inline constexpr int64_t kLinesAtOnce = 4;

struct MatrixUnit {
  MatrixUnit() {}
};
#endif

}  // namespace quire::QUIRE_ISA

#if defined(__AMX_BF16__)
#include "matmul_amx.h"
#endif
