// Packed weights of bfloat16 to 12 bits a number (short_weight.h).
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>

#include "api.h"
#include "huge_pages.h"
#include "isa.h"
#include "short_weight.h"
#include "threads.h"

namespace quire {
namespace {

constexpr uint8_t kNoPlace = 0xff;

inline uint8_t upper_of(uint16_t bits) { return static_cast<uint8_t>(bits >> 8); }

// A panel before and after.
class Panel {
 public:
  Panel(const ShortenArgs& args, int64_t panel)
      : numbers_(static_cast<const uint16_t*>(args.packed) + panel * args.numbers),
        count_(args.numbers),
        head_(reinterpret_cast<ShortHead*>(static_cast<std::byte*>(args.shortened) + panel * short_panel_bytes(args.numbers))) {}

  ShortHead& head() const { return *head_; }

  // Fills in the table, and how many exceptions it leaves.
  void choose_upper_bytes() const {
    std::array<int64_t, 256> counts = {};
    for (int64_t i = 0; i < count_; ++i) ++counts[upper_of(numbers_[i])];
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), 0);
    std::partial_sort(bytes.begin(), bytes.begin() + kShortPlaces, bytes.end(),
                      [&](int a, int b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
    std::copy_n(bytes.begin(), kShortPlaces, head_->upper);
    head_->num_exceptions = count_;
    for (const uint8_t byte : head_->upper) head_->num_exceptions -= counts[byte];
  }

  // Writes the groups, and exceptions from the head's first on.
  void write(ShortException* exceptions) const {
    std::array<uint8_t, 256> places;
    places.fill(kNoPlace);
    for (int i = 0; i < kShortPlaces; ++i) places[head_->upper[i]] = static_cast<uint8_t>(i);
    ShortException* exception = exceptions + head_->first_exception;
    ShortGroup* group = reinterpret_cast<ShortGroup*>(head_ + 1);
    for (int64_t i = 0; i < count_; i += ShortGroup::kNumbers, ++group) {
      std::memset(group->places, 0, sizeof(group->places));
      for (int64_t j = 0; j < ShortGroup::kNumbers; ++j) {
        const uint16_t bits = numbers_[i + j];
        const uint8_t place = places[upper_of(bits)];
        const int64_t half = j / 64, byte = j % 32 / 8 * 16 + j % 64 / 32 * 8 + j % 8;
        group->lower[half][byte] = static_cast<uint8_t>(bits);
        if (place == kNoPlace)
          *exception++ = {static_cast<uint32_t>(i + j), bits, 0};
        else
          group->places[byte] |= static_cast<uint8_t>(place << 4 * half);
      }
    }
  }

 private:
  const uint16_t* numbers_;
  const int64_t count_;
  ShortHead* head_;
};

template <class Function>
void for_panels(const OpenMp& openmp, const ShortenArgs& args, Function function) {
  std::atomic<int64_t> next = 0;
  run_on_threads(openmp, args.threads, [&] {
    for (int64_t panel; (panel = next.fetch_add(1, std::memory_order_relaxed)) < args.panels;) function(Panel(args, panel));
  });
}

}  // namespace
}  // namespace quire

int32_t quire_shorten_weight(const quire::Context* context, const quire::ShortenArgs* args) {
  using namespace quire;
  const int64_t panels_bytes = args->panels * short_panel_bytes(args->numbers);
  want_huge_pages(args->shortened, panels_bytes);
  for_panels(context->openmp, *args, [](const Panel& panel) { panel.choose_upper_bytes(); });
  int64_t exceptions = 0;
  for (int64_t i = 0; i < args->panels; ++i) {
    ShortHead& head = Panel(*args, i).head();
    head.first_exception = exceptions;
    exceptions += head.num_exceptions;
  }
  *args->num_exceptions = exceptions;
  if (exceptions > args->most_exceptions) return kOk;
  std::byte* end = static_cast<std::byte*>(args->shortened) + panels_bytes;
  for_panels(context->openmp, *args, [&](const Panel& panel) { panel.write(reinterpret_cast<ShortException*>(end)); });
  return kOk;
}
