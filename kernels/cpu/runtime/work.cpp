#include "runtime/work.h"

#include <immintrin.h>

#include <cstdlib>
#include <new>

namespace quire {
namespace {

// The barrier of a region's threads after each operation. Usually the last thread arrives within microseconds, so a
// thread spins that long. Then it sleeps: its partner may have lost its core to another process and can use this one.
class Barrier {
 public:
  // Returns when `threads` threads have called it.
  void wait(int64_t threads) {
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      // Sequentially consistent with the wait of a sleeper: either it sees the new turn, or notify_all sees it.
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
  // Ticks of the time stamp counter, about a tenth of a millisecond. The length of a pause differs between processors.
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
  // Used in turn: while threads take units of a work, the units of the next one are assigned.
  Shares shares[2] = {Shares(threads), Shares(threads)};
  if (!works.empty()) works[0]->assign(shares[0], 0, 1);
  run_on_threads(openmp, threads, [&] {
    // The runtime may give fewer threads than requested.
    const int64_t team = threads > 1 ? openmp.num_threads() : 1, thread = team > 1 ? openmp.thread_num() : 0;
    const Scratch scratch{memory.get() + shared + own * thread, memory.get()};
    for (size_t i = 0; i < works.size(); ++i) {
      if (i > 0 && team > 1) barrier.wait(team);
      if (i + 1 < works.size()) works[i + 1]->assign(shares[(i + 1) % 2], thread, team);
      works[i]->take_part(shares[i % 2], thread, team, scratch);
    }
  });
}

}  // namespace quire
