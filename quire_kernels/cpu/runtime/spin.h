// Instructions for threads that spin: a pause, and a counter of time.
#pragma once

#include <cstdint>
#if !defined(__aarch64__)
#include <immintrin.h>
#endif

namespace quire {

#if defined(__aarch64__)
inline void pause() { asm volatile("isb" ::: "memory"); }
inline uint64_t ticks() {
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
}
inline uint64_t millisecond_ticks() {
  uint64_t a_second;
  asm("mrs %0, cntfrq_el0" : "=r"(a_second));
  return a_second / 1000;
}
#else
inline void pause() { _mm_pause(); }
inline uint64_t ticks() { return __rdtsc(); }
// About a millisecond of the time stamp counter. The length of a pause differs between processors.
inline constexpr uint64_t millisecond_ticks() { return 2'500'000; }
#endif

}  // namespace quire
