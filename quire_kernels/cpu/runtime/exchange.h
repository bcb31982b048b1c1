// Exchange of data between processes of one machine through memory that all of them have mapped.
//
// An operation passes its data through the slots of that memory in rounds. In each, every process copies its part to
// its own slot, signals that, and reads the slots of the others. A process can be at most one round ahead of
// another, because it ends a round only when all have begun it. So each process has two slots, used in turn, and no
// process waits until a slot has been read.
//
// If a process dies in a round, the others wait forever: their supervisor has to end them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/api.h"

namespace quire {

// Parts of a round that are signalled one by one, so that several threads can share it.
inline constexpr int64_t kMaxStripes = 16;

// One round, as a process sees it. All processes of a group begin the same rounds in the same order.
class Round {
 public:
  // Begins the next round of the group. Called by one thread at a time.
  explicit Round(const SharedGroup& group);

  // The slot of this rank's part, of group.slot_bytes.
  std::byte* slot(int64_t rank) const;

  // Signals that this process's part of the stripe lies in its slot.
  void signal(int64_t stripe) const;

  // Returns when the part of that process does.
  void wait(int64_t rank, int64_t stripe) const;

 private:
  SharedGroup group_;
  uint64_t number_;
};

// Bytes of memory that a group takes.
int64_t group_bytes(int64_t size, int64_t slot_bytes);

}  // namespace quire
