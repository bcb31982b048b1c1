// Causal convolutions of each channel by itself, over the last few tokens of a row.
#include "runtime/isa.h"
#include "states/lines.h"
#include "states/pages.h"
#include "states/sizes.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Columns of x, the last of them of the token at hand.
template <class T>
class ConvGroup {
 public:
  ConvGroup(const ConvArgs& args, int64_t group, Arena arena)
      : args_(args),
        channel_(group * kColumns),
        count_(args.channels - channel_ < kColumns ? static_cast<int>(args.channels - channel_) : kColumns),
        group_(group),
        tiles_(args.pages, args.taps - 1),
        scratch_(args, arena) {
    // Columns of a tile that have no channel stay zeros.
    if (count_ < kColumns) std::memset(scratch_.lines, 0, (args.taps - 1 + kTokensAtOnce) * kColumns * sizeof(float));
    const Numbers<T> weight(args.weight, args.weight_dtype);
    for (int64_t tap = 0; tap < args.taps; ++tap) {
      float* line = scratch_.weights + tap * kColumns;
      const int64_t first = channel_ * args.weight_channel_stride + tap * args.weight_tap_stride;
      for_channels([&](int64_t i, auto... lanes) {
        if (args.weight_channel_stride == 1) {
          store(line + i, weight.vec(first + i, lanes...));
        } else {
          for (int lane = 0; lane < kWidth; ++lane)
            line[i + lane] = i + lane < count_ ? weight.one(first + (i + lane) * args.weight_channel_stride) : 0.0f;
        }
      });
    }
  }

  void run(const StateRow& row) {
    for (int64_t begin = 0; begin < row.num_tokens; begin += kTokensAtOnce) {
      const int64_t end = begin + kTokensAtOnce < row.num_tokens ? begin + kTokensAtOnce : row.num_tokens;
      for_spans<1>(tiles_, row, group_, begin, end, scratch_.rest, [&](float* const* state, int64_t from, int64_t to) {
        if (to - from == 1)
          run_token(state[0], row.first_token + from);
        else
          run_span(state[0], row.first_token + from, to - from);
      });
    }
  }

 private:
  // Vectors of the group that have channels. The last one may have fewer lanes.
  template <class Function>
  void for_channels(Function function) const {
    for_vectors(count_, function);
  }

  // `count` tokens, at most kTokensAtOnce.
  void run_span(float* state, int64_t token, int64_t count) {
    const int64_t history = args_.taps - 1, size = history * kColumns;
    std::memcpy(scratch_.lines, state, size * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      float* line = scratch_.lines + (history + i) * kColumns;
      for_channels([&](int64_t at, auto... lanes) { store(line + at, product(token + i, at, lanes...)); });
      for_channels([&](int64_t at, auto... lanes) { convolve(token + i, line - size, at, lanes...); });
    }
    // Lanes without channels too.
    std::memcpy(state, scratch_.lines + count * kColumns, size * sizeof(float));
  }

  // The same for one token.
  void run_token(float* state, int64_t token) {
    for_channels([&](int64_t at, auto... lanes) {
      const Vec last = product(token, at, lanes...);
      Vec sum = bias(at, lanes...);
      for (int64_t tap = 0; tap + 1 < args_.taps; ++tap) {
        const Vec column = load(state + tap * kColumns + at);
        sum = fma(load(scratch_.weights + tap * kColumns + at), column, sum);
        if (tap > 0) store(state + (tap - 1) * kColumns + at, column);
      }
      sum = fma(load(scratch_.weights + (args_.taps - 1) * kColumns + at), last, sum);
      store(state + (args_.taps - 2) * kColumns + at, last);
      finish(token, sum, at, lanes...);
    });
  }

  // x * before
  template <class... Lanes>
  Vec product(int64_t token, int64_t at, Lanes... lanes) const {
    const Vec x = load(static_cast<const T*>(args_.x) + token * args_.x_stride + channel_ + at, lanes...);
    if (args_.before == nullptr) return x;
    return x * load(static_cast<const T*>(args_.before) + token * args_.before_stride + channel_ + at, lanes...);
  }

  template <class... Lanes>
  Vec bias(int64_t at, Lanes... lanes) const {
    return args_.bias == nullptr ? zero() : Numbers<T>(args_.bias, args_.weight_dtype).vec(channel_ + at, lanes...);
  }

  template <class... Lanes>
  void convolve(int64_t token, const float* line, int64_t at, Lanes... lanes) const {
    Vec sum = bias(at, lanes...);
    for (int64_t tap = 0; tap < args_.taps; ++tap)
      sum = fma(load(scratch_.weights + tap * kColumns + at), load(line + tap * kColumns + at), sum);
    finish(token, sum, at, lanes...);
  }

  template <class... Lanes>
  void finish(int64_t token, Vec sum, int64_t at, Lanes... lanes) const {
    if (args_.is_silu) sum = silu(sum);
    if (args_.after != nullptr)
      sum = sum * load(static_cast<const T*>(args_.after) + token * args_.after_stride + channel_ + at, lanes...);
    store(static_cast<T*>(args_.output) + token * args_.channels + channel_ + at, sum, lanes...);
  }

  const ConvArgs& args_;
  const int64_t channel_;  // the first
  const int count_;
  const int64_t group_;
  const Tiles tiles_;
  ConvScratch scratch_;
};

template <class T>
void conv(const ConvArgs& args, const StateRow* rows, int64_t num_rows, int64_t begin, int64_t end,
          std::byte* scratch) {
  for (int64_t index = begin; index < end; ++index) {
    ConvGroup<T> group(args, index, Arena(scratch));
    for (int64_t row = 0; row < num_rows; ++row) group.run(rows[row]);
  }
}

}  // namespace

extern const decltype(IsaKernels::conv) conv_kernels = {{conv<float>, conv<BF16>, conv<F16>}};

}  // namespace quire::QUIRE_ISA
