// Lines of numbers in the memory of operations on states.
#pragma once

#include "runtime/api.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {

// Numbers of T, or of float.
template <class T>
class Numbers {
 public:
  Numbers(const void* start, int64_t dtype) : start_(start), are_floats_(dtype == kFloat32) {}

  template <class... Lanes>
  Vec vec(int64_t i, Lanes... lanes) const {
    return are_floats_ ? load(static_cast<const float*>(start_) + i, lanes...)
                       : load(static_cast<const T*>(start_) + i, lanes...);
  }

  float one(int64_t i) const { return first_lane(vec(i, 1)); }

 private:
  const void* start_;
  const bool are_floats_;
};

// `count` numbers of T as floats, up to kPadTo more of them zeros.
template <int kPadTo, class T>
inline void widen_line(float* to, const T* from, int64_t count) {
  static_assert(kPadTo % kWidth == 0);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i % kPadTo != 0 || i < count; i += kWidth)
    store(to + i, i < count ? load(from + i, static_cast<int>(count - i)) : zero());
}

}  // namespace quire::QUIRE_ISA
