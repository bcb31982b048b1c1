// An operation as units of work, which the threads of one parallel region take as they come.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"

namespace quire {

// Memory that works may use as they run.
struct Scratch {
  std::byte* own;     // of the thread
  std::byte* shared;  // of all threads: what one work leaves there, the next one finds
};

class Work {
 public:
  // `grain`: units below which a second thread takes longer to come than it saves. `most`: to be taken at once, if that
  // is not fewer. `own_bytes`: memory that each thread needs for itself; `shared_bytes`: that all need together.
  Work(int64_t units, int64_t grain, int64_t most, int64_t own_bytes, int64_t shared_bytes)
      : own_bytes(own_bytes),
        shared_bytes(shared_bytes),
        units_(units),
        grain_(std::max<int64_t>(grain, 1)),
        most_(most) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // To be called once, by one thread, when nothing can fail any more and before any thread takes part.
  virtual void begin() {}

  bool pays_for_threads() const { return units_ >= 2 * grain_; }

  // Does units until none is left. To be called once by every thread of `threads`.
  void take_part(int64_t threads, const Scratch& scratch) {
    const int64_t share = std::max(grain_, std::min(most_, units_ / (kTurns * threads)));
    for (int64_t begin; (begin = next_.fetch_add(share, std::memory_order_relaxed)) < units_;)
      run(begin, std::min(begin + share, units_), scratch);
  }

  const int64_t own_bytes, shared_bytes;

 protected:
  virtual void run(int64_t begin, int64_t end, const Scratch& scratch) const = 0;

 private:
  // How often a thread comes back for more. It evens out that one of them has lost its core for a while.
  static constexpr int64_t kTurns = 4;

  const int64_t units_, grain_, most_;
  alignas(64) std::atomic<int64_t> next_{0};
};

using Works = std::vector<std::unique_ptr<Work>>;

// Does all of it, each when the one before is done, on up to `threads` threads. Throws std::bad_alloc.
void run_in_turn(const OpenMp& openmp, const Works& works, int64_t threads);

}  // namespace quire
