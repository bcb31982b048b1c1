#include "runtime/work.h"

#include <sched.h>

#include <cstdlib>
#include <new>

#include "runtime/spin.h"

namespace quire {
namespace {

// The works of a region that are done. A work is done when all its units are, whichever threads did them. So nothing
// waits for a thread that has lost its core, unless it has taken units.
class Progress {
 public:
  explicit Progress(const Works& works) : works_(works), units_left_(works.size()) {
    for (size_t i = 0; i < works.size(); ++i) units_left_[i].store(works[i]->units(), std::memory_order_relaxed);
    set_first(0);
  }

  // The first work that is not done.
  size_t first() const { return first_.load(std::memory_order_acquire); }

  void add(size_t work, int64_t units) {
    if (units > 0 && units_left_[work].fetch_sub(units, std::memory_order_acq_rel) == units) set_first(work + 1);
  }

  // Returns when the work is done. Usually that takes microseconds, so a thread spins that long. Then it sleeps:
  // another thread may have lost its core to a process and can use this one.
  void wait(size_t work) const {
    const uint64_t begin = ticks();
    do {
      if (first() > work) return;
      pause();
    } while (ticks() - begin < millisecond_ticks() / 10);
    for (uint32_t now; (now = first()) <= work;) first_.wait(now, std::memory_order_acquire);
  }

 private:
  void set_first(size_t work) {
    while (work < works_.size() && works_[work]->units() == 0) ++work;
    // Sequentially consistent with the wait of a sleeper: either it sees the new number, or notify_all sees it.
    first_.store(work, std::memory_order_seq_cst);
    first_.notify_all();
  }

  const Works& works_;
  std::vector<std::atomic<int64_t>> units_left_;
  alignas(64) std::atomic<uint32_t> first_{0};
};

// The time that a thread keeps its core before it lets another process have it, between two units. Otherwise the
// scheduler would take the core a little later, probably within units, and all threads would wait for them.
class Turn {
 public:
  bool is_over() const { return ticks() - begin_ > millisecond_ticks(); }

  // Returns at once if no other process waits for this core.
  void yield() {
    sched_yield();
    begin_ = ticks();
  }

 private:
  uint64_t begin_ = ticks();
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
  // Each work has shares of its own: a thread that was away looks for units of works that are done.
  std::vector<Shares::OfThread> of_threads(works.size() * threads);
  auto shares = [&](size_t work) { return Shares(std::span(of_threads).subspan(work * threads, threads)); };
  for (size_t i = 0; i < works.size(); ++i) works[i]->assign(shares(i));
  Progress progress(works);
  for (const auto& work : works) work->begin();
  run_on_threads(openmp, threads, [&] {
    // The runtime may give fewer threads than requested.
    const int64_t team = threads > 1 ? openmp.num_threads() : 1, thread = team > 1 ? openmp.thread_num() : 0;
    const Scratch scratch{memory.get() + shared + own * thread, memory.get()};
    Turn turn;
    for (size_t i; (i = progress.first()) < works.size();) {
      int64_t done = 0;
      works[i]->take_part(shares(i), thread, team, scratch, [&](int64_t units) {
        done += units;
        if (team == 1 || !turn.is_over()) return;
        progress.add(i, std::exchange(done, 0));
        turn.yield();
      });
      progress.add(i, done);
      progress.wait(i);
    }
  });
}

}  // namespace quire
