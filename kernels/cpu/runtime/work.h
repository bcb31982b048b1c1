// Work on torch's threads: an operation is divided into units, which the threads of one parallel region take in turn.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/api.h"

namespace quire {

// Memory that works may use as they run.
struct Scratch {
  std::byte* own;     // of the thread
  std::byte* shared;  // of all threads, kept from one work to the next
};

// Calls function() on `threads` threads at once, or here if it is one. A team always has the full size: for a
// smaller team, the runtime would end the other threads and start them again for the next one.
template <class Function>
void run_on_threads(const OpenMp& openmp, int64_t threads, const Function& function) {
  if (threads <= 1) {
    function();
    return;
  }
  auto call = [](void* data) { (*static_cast<const Function*>(data))(); };
  openmp.parallel(call, const_cast<Function*>(&function), static_cast<unsigned>(threads), 0);
}

class Work {
 public:
  // `grain`: units below which a second thread costs more than it saves. `max_share`: units that a thread takes at
  // once, unless `grain` is more. `own_bytes`: scratch memory of each thread; `shared_bytes`: of all together.
  Work(int64_t units, int64_t grain, int64_t max_share, int64_t own_bytes, int64_t shared_bytes)
      : own_bytes(own_bytes),
        shared_bytes(shared_bytes),
        units_(units),
        grain_(std::max<int64_t>(grain, 1)),
        max_share_(max_share) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // Called once, by one thread, after the last operation that can fail and before any thread takes part.
  virtual void begin() {}

  bool pays_for_threads() const { return units_ >= 2 * grain_; }

  // Does units until none is left. Called once by every thread of `threads`.
  void take_part(int64_t threads, const Scratch& scratch) {
    const int64_t share = std::max(grain_, std::min(max_share_, units_ / (kTurns * threads)));
    for (int64_t begin; (begin = next_.fetch_add(share, std::memory_order_relaxed)) < units_;)
      run(begin, std::min(begin + share, units_), scratch);
  }

  const int64_t own_bytes, shared_bytes;

 protected:
  virtual void run(int64_t begin, int64_t end, const Scratch& scratch) const = 0;

 private:
  // How often a thread returns for more units: so the others take over when one has lost its core for a while.
  static constexpr int64_t kTurns = 4;

  const int64_t units_, grain_, max_share_;
  alignas(64) std::atomic<int64_t> next_{0};
};

using Works = std::vector<std::unique_ptr<Work>>;

// Runs the works one after the other on up to `threads` threads. Throws std::bad_alloc.
void run_in_turn(const OpenMp& openmp, const Works& works, int64_t threads);

}  // namespace quire
