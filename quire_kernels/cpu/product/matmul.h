// Products of small matrices in scratch memory, for prefill.
//
// Elements are words of 32 bits: a float, or two bfloat16 that are multiplied with their like and summed up. So the
// layouts are the same: A [m, k words] by rows, B [k words, n], C [m, n] float. A pair of B is (2k, n) and (2k + 1, n).
#pragma once

#include <type_traits>

#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {

// The element type of products in prefill, with `kPair` elements per word.
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

template <class T, int kLines>
inline void multiply_lines(Matrix c, Matrix a, Matrix b, int64_t n, int64_t k, bool add) {
  constexpr int kColumns = kTileVectors * kWidth;
  int64_t j = 0;
  for (; j + kColumns <= n; j += kColumns)
    multiply_tile<T, kLines, kTileVectors>({c.at + j, c.stride}, a, {b.at + j, b.stride}, k, add);
  for (; j + 2 * kWidth <= n; j += 2 * kWidth)
    multiply_tile<T, kLines, 2>({c.at + j, c.stride}, a, {b.at + j, b.stride}, k, add);
  for (; j < n; j += kWidth) multiply_tile<T, kLines, 1>({c.at + j, c.stride}, a, {b.at + j, b.stride}, k, add);
}

// C = A B, or C += A B. The numbers of columns and of words are multiples of 16, columns of 32 too; the number of lines
// is one of kLinesAtOnce.
template <class T>
inline void multiply(Matrix c, Matrix a, Matrix b, int64_t m, int64_t n, int64_t k, bool add) {
  // With vectors of 8, six lines are as many sums as there are registers for.
  constexpr int kLines = kWidth == 8 ? 6 : 4;
  int64_t i = 0;
  for (; i + kLines <= m; i += kLines)
    multiply_lines<T, kLines>({c.line(i), c.stride}, {a.line(i), a.stride}, b, n, k, add);
  for (; i < m; i += 2) multiply_lines<T, 2>({c.line(i), c.stride}, {a.line(i), a.stride}, b, n, k, add);
}

#if defined(__AMX_BF16__)
inline constexpr int64_t kLinesAtOnce = 16;

// Configures the matrix unit for its lifetime, and restores the former configuration, for example oneDNN's.
class MatrixUnit {
 public:
  // `lines`: the lines of the tiles of A (4 and 5) and of C (0 to 3). B is in tiles 6 and 7. `words`: the words of a
  // line of A, and the lines of B.
  explicit MatrixUnit(int64_t lines = 16, int64_t words = 16) {
    _tile_storeconfig(before_);
    TileConfig config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.bytes_of_line[i] = static_cast<uint8_t>(i == 4 || i == 5 ? words * 4 : 64);
      config.lines[i] = static_cast<uint8_t>(i < 6 ? lines : words);
    }
    _tile_loadconfig(&config);
  }
  ~MatrixUnit() { _tile_loadconfig(before_); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  struct alignas(64) TileConfig {
    uint8_t palette;
    uint8_t start_line;
    uint8_t reserved[14];
    uint16_t bytes_of_line[16];
    uint8_t lines[16];
  };

  alignas(64) uint8_t before_[64];
};

// Loads sums of 16 lines and 32 columns to tiles 0 and 1, and with kTwo the next 16 lines to tiles 2 and 3.
template <bool kTwo, class Sum>
inline void load_sums(const Sum* c, int64_t stride) {
  _tile_loadd(0, c, stride * 4);
  _tile_loadd(1, c + 16, stride * 4);
  if constexpr (kTwo) {
    _tile_loadd(2, c + 16 * stride, stride * 4);
    _tile_loadd(3, c + 16 * stride + 16, stride * 4);
  }
}

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <bool kTwo, class Sum>
inline void store_sums(Sum* c, int64_t stride) {
  _tile_stored(0, c, stride * 4);
  _tile_stored(1, c + 16, stride * 4);
  if constexpr (kTwo) {
    _tile_stored(2, c + 16 * stride, stride * 4);
    _tile_stored(3, c + 16 * stride + 16, stride * 4);
  }
}

// Adds the products of tiles a and b, of numbers X, to tile c. Tiles must be literals: they are part of an instruction.
#define QUIRE_MULTIPLY(X, c, a, b)         \
  if constexpr (std::is_same_v<X, int8_t>) \
    _tile_dpbssd(c, a, b);                 \
  else                                     \
    _tile_dpbf16ps(c, a, b)

// Adds the products of one group of lines of A or two with two tiles of B.
template <class X, bool kTwo>
inline void add_products(const void* lines, const void* second_lines, int64_t a_bytes, const void* columns,
                         const void* second_columns, int64_t b_bytes) {
  _tile_loadd(6, columns, b_bytes);
  _tile_loadd(7, second_columns, b_bytes);
  _tile_loadd(4, lines, a_bytes);
  if constexpr (kTwo) _tile_loadd(5, second_lines, a_bytes);
  QUIRE_MULTIPLY(X, 0, 4, 6);
  QUIRE_MULTIPLY(X, 1, 4, 7);
  if constexpr (kTwo) {
    QUIRE_MULTIPLY(X, 2, 5, 6);
    QUIRE_MULTIPLY(X, 3, 5, 7);
  }
}

// 16 or, with kTwo, 32 lines and 32 columns of C.
template <bool kTwo>
inline void multiply_tiles(Matrix c, Matrix a, Matrix b, int64_t k, bool add) {
  if (add)
    load_sums<kTwo>(c.at, c.stride);
  else
    clear_sums();
  for (int64_t at = 0; at < k; at += 16)
    add_products<BF16, kTwo>(a.at + at, a.line(16) + at, a.stride * 4, b.line(at), b.line(at) + 16, b.stride * 4);
  store_sums<kTwo>(c.at, c.stride);
}

template <>
inline void multiply<BF16>(Matrix c, Matrix a, Matrix b, int64_t m, int64_t n, int64_t k, bool add) {
  for (int64_t i = 0; i < m; i += 32) {
    for (int64_t j = 0; j < n; j += 32) {
      const Matrix to{c.line(i) + j, c.stride}, lines{a.line(i), a.stride}, columns{b.at + j, b.stride};
      if (i + 16 < m)
        multiply_tiles<true>(to, lines, columns, k, add);
      else
        multiply_tiles<false>(to, lines, columns, k, add);
    }
  }
}

#else

inline constexpr int64_t kLinesAtOnce = 4;

struct MatrixUnit {
  MatrixUnit() {}
};

#endif

}  // namespace quire::QUIRE_ISA
