// Products of a query with a key, operand by operand: in float, or for bfloat16 in pairs where the processor has it.
#pragma once

#include "vec.h"

namespace quire::QUIRE_ISA {

template <class T>
struct Dot {
  using Operand = Vec;
  using Query = float;
  static constexpr int kStep = kWidth;

  static Operand operand(const T* key) { return load(key); }
  static Operand operand(const T* key, int n) { return load(key, n); }
  static Vec add(Vec sum, Operand key, const Query* query) { return fma(key, load(query), sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<BF16> {
  using Operand = __m512bh;
  using Query = BF16;
  static constexpr int kStep = 2 * kWidth;

  static Operand operand(const BF16* key) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(key)); }
  static Operand operand(const BF16* key, int n) {
    const __mmask32 lanes = n < 32 ? (1u << n) - 1 : ~0u;
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(lanes, key));
  }
  static Vec add(Vec sum, Operand key, const Query* query) {
    return {_mm512_dpbf16_ps(sum.v, key, operand(query))};
  }
};
#endif

}  // namespace quire::QUIRE_ISA
