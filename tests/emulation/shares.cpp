// Calls `Shares` of work.h, so that tests can let threads of a simulated machine take units one after the other.
#include "runtime/work.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

struct SharesOfThreads {
  explicit SharesOfThreads(int64_t threads) : of_threads(threads), shares(of_threads) {}

  std::vector<quire::Shares::OfThread> of_threads;
  quire::Shares shares;
};

EXPORT SharesOfThreads* make_shares(int64_t threads, int64_t units, int64_t grain) {
  auto* made = new SharesOfThreads(threads);
  made->shares.assign(units, grain);
  return made;
}

EXPORT void free_shares(SharesOfThreads* made) { delete made; }

EXPORT bool take(SharesOfThreads* made, int64_t thread, int64_t* distance, int64_t count, quire::Units* taken) {
  return made->shares.take(thread, *distance, count, *taken);
}
