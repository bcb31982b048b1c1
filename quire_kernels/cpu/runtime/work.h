// Work on torch's threads: an operation is divided into units. Each thread of a region has its own, then helps others.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
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

struct Units {
  int64_t begin, end;
};

// The units of a work, divided among threads: with an equal number of units a thread has the same ones every time, so
// that their data stays near to it. It takes them by a counter on a cache line of its own.
class Shares {
 public:
  struct alignas(64) OfThread {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  explicit Shares(std::span<OfThread> of_threads) : of_threads_(of_threads) {}

  // Gives threads their parts of `units`, in whole grains. To be called before any takes units.
  void assign(int64_t units, int64_t grain) {
    const int64_t threads = of_threads_.size(), grains = (units + grain - 1) / grain;
    for (int64_t thread = 0; thread < threads; ++thread) {
      of_threads_[thread].next.store(grains * thread / threads * grain, std::memory_order_relaxed);
      of_threads_[thread].end = std::min(grains * (thread + 1) / threads * grain, units);
    }
  }

  // Takes at most `count` units of the thread at `distance`, at first 0, or of the next one that has any: the thread's
  // own units, then units of the nearest threads. Returns false if none is left.
  bool take(int64_t thread, int64_t& distance, int64_t count, Units& taken) {
    for (const int64_t threads = of_threads_.size(); distance < 2 * threads; ++distance) {
      const int64_t other = thread ^ distance;  // of the same 2 threads, then of the same 4, 8, ...
      // A counter is read first: where no unit is left, its cache line stays with its thread.
      if (other >= threads || of_threads_[other].next.load(std::memory_order_relaxed) >= of_threads_[other].end)
        continue;
      taken.begin = of_threads_[other].next.fetch_add(count, std::memory_order_relaxed);
      taken.end = std::min(taken.begin + count, of_threads_[other].end);
      if (taken.begin < taken.end) return true;
    }
    return false;
  }

 private:
  std::span<OfThread> of_threads_;
};

class Work {
 public:
  // `grain`: units below which a second thread costs more than it saves. `max_share`: units that a thread takes at
  // once, unless `grain` is more. `own_bytes`: scratch memory of each thread; `shared_bytes`: of all together.
  // `is_in_order`: threads have no units of their own, and take them in order.
  Work(int64_t units, int64_t grain, int64_t max_share, int64_t own_bytes, int64_t shared_bytes,
       bool is_in_order = false)
      : own_bytes(own_bytes),
        shared_bytes(shared_bytes),
        units_(units),
        grain_(std::max<int64_t>(grain, 1)),
        max_share_(max_share),
        is_in_order_(is_in_order) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // Called once, by one thread, after the last operation that can fail and before any thread takes part.
  virtual void begin() {}

  bool pays_for_threads() const { return units_ >= 2 * grain_; }

  void assign(Shares shares) const { shares.assign(units_, is_in_order_ ? std::max<int64_t>(units_, 1) : grain_); }

  // Does units until none is left. Calls done(count) after each turn of some units.
  template <class Done>
  void take_part(Shares shares, int64_t thread, int64_t threads, const Scratch& scratch, Done done) const {
    const int64_t count = std::max(grain_, std::min(max_share_, units_ / (kTurns * threads)));
    int64_t distance = 0;
    for (Units units; shares.take(thread, distance, count, units);) {
      run(units.begin, units.end, scratch);
      done(units.end - units.begin);
    }
  }

  int64_t units() const { return units_; }

  const int64_t own_bytes, shared_bytes;

 protected:
  virtual void run(int64_t begin, int64_t end, const Scratch& scratch) const = 0;

 private:
  // How often a thread returns for more units: so the others take over when one has lost its core for a while.
  static constexpr int64_t kTurns = 4;

  const int64_t units_, grain_, max_share_;
  const bool is_in_order_;
};

// A work whose units function(begin, end, scratch) does.
template <class Function>
class FunctionWork : public Work {
 public:
  FunctionWork(int64_t units, int64_t grain, int64_t own_bytes, int64_t shared_bytes, Function function)
      : Work(units, grain, std::numeric_limits<int64_t>::max(), own_bytes, shared_bytes),
        function_(std::move(function)) {}

 private:
  void run(int64_t begin, int64_t end, const Scratch& scratch) const override { function_(begin, end, scratch); }

  const Function function_;
};

// Below this many elements, waking a second thread takes longer than it saves.
inline constexpr int64_t kWorthThreads = 1 << 15;
// The same for elements of weights, whose reading takes the time.
inline constexpr int64_t kWorthReading = 1 << 17;

inline int64_t grain(int64_t worth, int64_t elements_of_unit) {
  return 1 + worth / std::max<int64_t>(elements_of_unit, 1);
}

using Works = std::vector<std::unique_ptr<Work>>;

// Runs the works one after the other on up to `threads` threads. Throws std::bad_alloc.
void run_in_turn(const OpenMp& openmp, const Works& works, int64_t threads);

}  // namespace quire
