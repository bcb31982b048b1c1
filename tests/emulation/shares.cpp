// Calls `Shares` of work.h, so that tests can let threads of a simulated machine take units one after the other.
#include "runtime/work.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT quire::Shares* make_shares(int64_t threads, int64_t units, int64_t grain) {
  auto* shares = new quire::Shares(threads);
  shares->assign(units, grain);
  return shares;
}

EXPORT void free_shares(quire::Shares* shares) { delete shares; }

EXPORT bool take(quire::Shares* shares, int64_t thread, int64_t* distance, int64_t count, quire::Units* taken) {
  return shares->take(thread, *distance, count, *taken);
}
