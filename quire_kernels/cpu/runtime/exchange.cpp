#include "runtime/exchange.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/spin.h"

namespace quire {
namespace {

// The signals of each process, on cache lines of its own. Zero, the value of new memory, is before the first round.
struct alignas(64) Member {
  uint64_t begun;  // rounds that the process has begun; read only by itself
};

struct alignas(64) Arrival {
  uint64_t round;       // the last one whose stripe is in its slot
  uint32_t num_asleep;  // threads that wait for a later one
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a futex is the low half of a round's number");

int64_t slots_offset(int64_t size) {
  return size * static_cast<int64_t>(sizeof(Member) + kMaxStripes * sizeof(Arrival));
}

Member& member(const SharedGroup& group) { return static_cast<Member*>(group.memory)[group.rank]; }

Arrival& arrival(const SharedGroup& group, int64_t rank, int64_t stripe) {
  Member* members = static_cast<Member*>(group.memory);
  return reinterpret_cast<Arrival*>(members + group.size)[rank * kMaxStripes + stripe];
}

long futex(uint64_t* word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

int64_t group_bytes(int64_t size, int64_t slot_bytes) { return slots_offset(size) + 2 * size * slot_bytes; }

Round::Round(const SharedGroup& group) : group_(group), number_(++member(group).begun) {}

std::byte* Round::slot(int64_t rank) const {
  const int64_t index = static_cast<int64_t>(number_ % 2) * group_.size + rank;
  return static_cast<std::byte*>(group_.memory) + slots_offset(group_.size) + index * group_.slot_bytes;
}

void Round::signal(int64_t stripe) const {
  Arrival& mine = arrival(group_, group_.rank, stripe);
  // Sequentially consistent with the wait of a sleeper: either it sees the round, or this thread sees the sleeper.
  __atomic_store_n(&mine.round, number_, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&mine.num_asleep, __ATOMIC_SEQ_CST) > 0) futex(&mine.round, FUTEX_WAKE, INT32_MAX);
}

void Round::wait(int64_t rank, int64_t stripe) const {
  constexpr int kSpins = 2000;  // about a tenth of a millisecond; see Barrier in work.cpp
  Arrival& theirs = arrival(group_, rank, stripe);
  for (int i = 0; i < kSpins; ++i) {
    if (__atomic_load_n(&theirs.round, __ATOMIC_ACQUIRE) >= number_) return;
    pause();
  }
  __atomic_fetch_add(&theirs.num_asleep, 1, __ATOMIC_SEQ_CST);
  for (uint64_t seen; (seen = __atomic_load_n(&theirs.round, __ATOMIC_SEQ_CST)) < number_;)
    futex(&theirs.round, FUTEX_WAIT, static_cast<uint32_t>(seen));
  __atomic_fetch_sub(&theirs.num_asleep, 1, __ATOMIC_SEQ_CST);
}

}  // namespace quire
