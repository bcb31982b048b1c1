// Work on torch's threads.
#pragma once

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

}  // namespace quire
