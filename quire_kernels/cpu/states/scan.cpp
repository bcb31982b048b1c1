// The selective scan of Mamba: each channel has a state of some numbers. Lanes are channels.
#include "runtime/isa.h"
#include "states/lines.h"
#include "states/pages.h"
#include "states/sizes.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
class ScanGroup {
 public:
  ScanGroup(const ScanArgs& args, int64_t group, Arena arena)
      : args_(args),
        channel_(group * kColumns),
        count_(args.channels - channel_ < kColumns ? args.channels - channel_ : kColumns),
        group_(group),
        tiles_(args.pages, args.num_states),
        scratch_(args, arena) {
    for (int64_t n = 0; n < args.num_states; ++n)
      for (int64_t i = 0; i < kColumns; ++i)
        scratch_.a[n * kColumns + i] = i < count_ ? args.a[(channel_ + i) * args.num_states + n] : 0.0f;
  }

  void run(const StateRow& row) const {
    for_spans<1>(tiles_, row, group_, 0, row.num_tokens, scratch_.rest,
                 [&](float* const* state, int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) run_token(state[0], row.first_token + i);
                 });
  }

 private:
  void run_token(float* state, int64_t token) const {
    widen_line<kWidth>(scratch_.b, static_cast<const T*>(args_.b) + token * args_.b_stride, args_.num_states);
    widen_line<kWidth>(scratch_.c, static_cast<const T*>(args_.c) + token * args_.c_stride, args_.num_states);
    for_vectors(count_, [&](int64_t at, auto... lanes) { move_on(state + at, token, at, lanes...); });
  }

  template <class... Lanes>
  void move_on(float* state, int64_t token, int64_t at, Lanes... lanes) const {
    const int64_t channel = channel_ + at;
    const Vec x = load(static_cast<const T*>(args_.x) + token * args_.x_stride + channel, lanes...);
    const Vec dt = load(args_.dt + token * args_.dt_stride + channel, lanes...), added = dt * x;
    Vec sum = zero();
    for (int64_t n = 0; n < args_.num_states; ++n) {
      const Vec decay = exp(dt * load(scratch_.a + n * kColumns + at));
      const Vec now = fma(added, set1(scratch_.b[n]), decay * load(state + n * kColumns));
      store(state + n * kColumns, now);
      sum = fma(now, set1(scratch_.c[n]), sum);
    }
    if (args_.skip != nullptr) sum = fma(load(args_.skip + channel, lanes...), x, sum);
    store(static_cast<T*>(args_.output) + token * args_.channels + channel, sum, lanes...);
  }

  const ScanArgs& args_;
  const int64_t channel_;  // the first
  const int64_t count_;
  const int64_t group_;
  const Tiles tiles_;
  const ScanScratch scratch_;
};

template <class T>
void scan(const ScanArgs& args, const StateRow* rows, int64_t num_rows, int64_t begin, int64_t end,
          std::byte* scratch) {
  for (int64_t index = begin; index < end; ++index) {
    const ScanGroup<T> group(args, index, Arena(scratch));
    for (int64_t row = 0; row < num_rows; ++row) group.run(rows[row]);
  }
}

}  // namespace

extern const decltype(IsaKernels::scan) scan_kernels = {{scan<float>, scan<BF16>, scan<F16>}};

}  // namespace quire::QUIRE_ISA
