// An OpenMP runtime of plain threads, for ThreadSanitizer: what torch's runtime does to synchronize its threads is not
// instrumented, so every region would be reported.
#include <thread>
#include <vector>

namespace {
thread_local int thread_number = 0;
thread_local int team_size = 1;
}  // namespace

extern "C" {

int omp_get_thread_num() { return thread_number; }

int omp_get_num_threads() { return team_size; }

void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned) {
  auto take_part = [=](unsigned number) {
    thread_number = static_cast<int>(number);
    team_size = static_cast<int>(num_threads);
    function(data);
    thread_number = 0;
    team_size = 1;
  };
  std::vector<std::thread> others;
  for (unsigned number = 1; number < num_threads; ++number) others.emplace_back(take_part, number);
  take_part(0);
  for (std::thread& other : others) other.join();
}

}  // extern "C"
