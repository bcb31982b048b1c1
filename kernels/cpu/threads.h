// Work on torch's threads.
#pragma once

#include <atomic>
#include <cstdint>

#include "api.h"

namespace quire {

// Calls function() on `threads` threads at once, or here if it is one. A team is always of the full size: the runtime
// would end the threads that a smaller one leaves over and start them again for the next.
template <class Function>
void run_on_threads(const OpenMp& openmp, int64_t threads, const Function& function) {
  if (threads <= 1) {
    function();
    return;
  }
  auto call = [](void* data) { (*static_cast<const Function*>(data))(); };
  openmp.parallel(call, const_cast<Function*>(&function), static_cast<unsigned>(threads), 0);
}

// Calls function(begin, end) for parts of 0 to n, in parallel if a part is at least `grain`.
template <class Function>
void split_over_threads(const OpenMp& openmp, int64_t threads, int64_t n, int64_t grain, const Function& function) {
  if (threads <= 1 || n < 2 * grain) {
    if (n > 0) function(int64_t{0}, n);
    return;
  }
  run_on_threads(openmp, threads, [&] {
    const int64_t count = openmp.num_threads(), index = openmp.thread_num();
    const int64_t begin = n * index / count, end = n * (index + 1) / count;
    if (begin < end) function(begin, end);
  });
}

}  // namespace quire
