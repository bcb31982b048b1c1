#include "work.h"

#include <immintrin.h>

#include <cstdlib>
#include <new>

#include "threads.h"

namespace quire {
namespace {

// Where the threads of a region meet after each operation. The next one is microseconds away as a rule, so a thread spins
// that long; if its partner has lost its core to another process it sleeps, for the partner to have this one.
class Barrier {
 public:
  // To be called by each of so many threads.
  void meet(int64_t threads) {
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      // In one order with what a sleeper does: either it sees the turn, or this sees the sleeper.
      turn_.store(turn + 1, std::memory_order_seq_cst);
      turn_.notify_all();
      return;
    }
    const uint64_t begin = __rdtsc();
    do {
      if (turn_.load(std::memory_order_acquire) != turn) return;
      _mm_pause();
    } while (__rdtsc() - begin < kTicks);
    turn_.wait(turn, std::memory_order_acquire);
  }

 private:
  // Of the time stamp counter: about a tenth of a millisecond. A pause is of another length on each processor.
  static constexpr uint64_t kTicks = 250'000;

  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Free>;

Memory allocate(int64_t bytes) {
  Memory memory(bytes > 0 ? static_cast<std::byte*>(std::aligned_alloc(64, bytes)) : nullptr);
  if (bytes > 0 && memory == nullptr) throw std::bad_alloc();
  return memory;
}

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

void run_in_turn(const OpenMp& openmp, const Works& works, int64_t threads) {
  auto pays = [](const std::unique_ptr<Work>& work) { return work->pays_for_threads(); };
  if (std::none_of(works.begin(), works.end(), pays)) threads = 1;
  int64_t own = 0, shared = 0;
  for (const auto& work : works) {
    own = std::max(own, whole_lines(work->own_bytes));
    shared = std::max(shared, whole_lines(work->shared_bytes));
  }
  const Memory memory = allocate(shared + own * threads);
  for (const auto& work : works) work->begin();
  Barrier barrier;
  run_on_threads(openmp, threads, [&] {
    // The runtime may have given fewer than were asked for.
    const int64_t team = threads > 1 ? openmp.num_threads() : 1;
    const Scratch scratch{memory.get() + shared + (team > 1 ? own * openmp.thread_num() : 0), memory.get()};
    for (size_t i = 0; i < works.size(); ++i) {
      if (i > 0 && team > 1) barrier.meet(team);
      works[i]->take_part(team, scratch);
    }
  });
}

}  // namespace quire
