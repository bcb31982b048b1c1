// Linear recurrences token by token: the gated delta rule, also with a decay for each channel of keys, and Mamba 2.
// Lanes are columns of the state, which are independent, so sums over the channels of keys go through the lines of a
// tile. All sums have the same order whichever tokens are computed together: even and odd lines, then both.
#include "runtime/isa.h"
#include "states/lines.h"
#include "states/pages.h"
#include "states/sizes.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Groups of columns that share the loads of keys and queries. Registers limit their number.
constexpr int kGroupsAtOnce = kWidth == kColumns ? 2 : 1;
constexpr int kVecsOfGroup = kColumns / kWidth;

// The tokens of one head, some of them at once, as floats.
struct Head {
  RecurrenceScratch scratch;
  int64_t key_dim;
  int64_t value_stride;
  float betas[kTokensAtOnce];
  const float* decays[kTokensAtOnce];  // one number, or key_dim
  const float* skip;                   // or null
};

template <int kVecs>
struct Sums {
  Vec even[kVecs], odd[kVecs];

  Sums() {
    for (int v = 0; v < kVecs; ++v) even[v] = odd[v] = zero();
  }
  Vec total(int v) const { return even[v] + odd[v]; }
};

// The lines of kVecs vectors side by side, of one tile or two.
template <int kVecs>
struct Columns {
  float* lines[kVecs];

  float* at(int v, int64_t line) const { return lines[v] + line * kColumns; }
};

// S^T key
template <int kVecs>
inline void look_up(const Columns<kVecs>& state, const float* key, int64_t key_dim, Vec (&found)[kVecs]) {
  Sums<kVecs> sums;
  auto add = [&](int64_t k, Vec(&to)[kVecs]) {
    const Vec factor = set1(key[k]);
    for (int v = 0; v < kVecs; ++v) to[v] = fma(load(state.at(v, k)), factor, to[v]);
  };
  int64_t k = 0;
  for (; k + 1 < key_dim; k += 2) {
    add(k, sums.even);
    add(k + 1, sums.odd);
  }
  if (k < key_dim) add(k, sums.even);
  for (int v = 0; v < kVecs; ++v) found[v] = sums.total(v);
}

// S = decay * S + key u^T; `output` becomes S^T query. kLooksUp: `found` becomes S^T next_key in the same pass.
template <bool kPerChannel, bool kLooksUp, int kVecs>
inline void move_on(const Columns<kVecs>& state, const Head& head, int64_t i, const Vec (&u)[kVecs],
                    Vec (&output)[kVecs], Vec (&found)[kVecs]) {
  const int64_t stride = head.scratch.stride;
  const float *query = head.scratch.query + i * stride, *key = head.scratch.key + i * stride;
  const float* next_key = head.scratch.decayed_key + (i + 1) * stride;
  const float* decays = head.decays[i];
  const Vec decay = set1(decays[0]);
  Sums<kVecs> outputs, finds;
  auto line = [&](int64_t k, Vec(&to)[kVecs], Vec(&next)[kVecs]) {
    const Vec factor = kPerChannel ? set1(decays[k]) : decay, of_key = set1(key[k]), of_query = set1(query[k]);
    const Vec of_next = kLooksUp ? set1(next_key[k]) : zero();
    // All loads, then all stores: a processor may take a load after a store for one of the same address if both are a
    // multiple of 4096 bytes apart, as the tiles of two groups often are.
    Vec now[kVecs];
    for (int v = 0; v < kVecs; ++v) now[v] = load(state.at(v, k));
    for (int v = 0; v < kVecs; ++v) now[v] = fma(of_key, u[v], now[v] * factor);
    for (int v = 0; v < kVecs; ++v) {
      store(state.at(v, k), now[v]);
      to[v] = fma(now[v], of_query, to[v]);
      if constexpr (kLooksUp) next[v] = fma(now[v], of_next, next[v]);
    }
  };
  int64_t k = 0;
  for (; k + 1 < head.key_dim; k += 2) {
    line(k, outputs.even, finds.even);
    line(k + 1, outputs.odd, finds.odd);
  }
  if (k < head.key_dim) line(k, outputs.even, finds.even);
  for (int v = 0; v < kVecs; ++v) {
    output[v] = outputs.total(v);
    if constexpr (kLooksUp) found[v] = finds.total(v);
  }
}

// Tokens begin to end - 1 of `head`: their values become outputs.
template <bool kDelta, bool kPerChannel, int kVecs>
void run_tokens(const Columns<kVecs>& state, const Head& head, float* values, int64_t begin, int64_t end) {
  Vec found[kVecs];
  if constexpr (kDelta) look_up(state, head.scratch.decayed_key + begin * head.scratch.stride, head.key_dim, found);
  for (int64_t i = begin; i < end; ++i) {
    float* value = values + i * head.value_stride;
    const Vec beta = set1(head.betas[i]);
    Vec u[kVecs], output[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const Vec x = load(value + v * kWidth);
      u[v] = (kDelta ? x - found[v] : x) * beta;
    }
    if (kDelta && i + 1 < end)
      move_on<kPerChannel, true>(state, head, i, u, output, found);
    else
      move_on<kPerChannel, false>(state, head, i, u, output, found);
    for (int v = 0; v < kVecs; ++v) {
      if (head.skip != nullptr) output[v] = fma(set1(*head.skip), load(value + v * kWidth), output[v]);
      store(value + v * kWidth, output[v]);
    }
  }
}

// The same for some groups side by side whose tiles lie anywhere.
template <int kGroups>
void run_groups(const RecurrenceArgs& args, const Head& head, float* const* tiles, float* values, int64_t begin,
                int64_t end) {
  constexpr int kVecs = kGroups * kVecsOfGroup;
  Columns<kVecs> state;
  for (int v = 0; v < kVecs; ++v) state.lines[v] = tiles[v / kVecsOfGroup] + v % kVecsOfGroup * kWidth;
  const auto run = args.is_delta ? args.is_per_channel ? run_tokens<true, true, kVecs> : run_tokens<true, false, kVecs>
                   : args.is_per_channel ? run_tokens<false, true, kVecs>
                                         : run_tokens<false, false, kVecs>;
  run(state, head, values, begin, end);
}

// A line of queries or keys as floats, normalised where it is to be, times scale.
template <class T>
void convert(const RecurrenceArgs& args, float* to, const T* from, float scale) {
  widen_line<kWidth>(to, from, args.key_dim);
  if (args.is_unit_norm) {
    Vec squares = zero();
    for (int64_t k = 0; k < args.key_dim; k += kWidth) squares = fma(load(to + k), load(to + k), squares);
    scale = scale / __builtin_sqrtf(reduce_add(squares) + 1e-6f);
  }
  if (scale == 1.0f) return;
  for (int64_t k = 0; k < args.key_dim; k += kWidth) store(to + k, load(to + k) * set1(scale));
}

// A unit: some groups of columns of one head of one row.
template <class T>
class Unit {
 public:
  Unit(const RecurrenceArgs& args, const StateRow& row, int64_t head, int64_t first_group, int64_t groups,
       int64_t capacity, Arena arena)
      : args_(args),
        row_(row),
        head_(head),
        first_group_(first_group),
        groups_(groups),
        tiles_(args.pages, args.key_dim),
        tokens_{RecurrenceScratch(args, capacity, arena),         args.key_dim, groups * kColumns, {}, {},
                args.skip == nullptr ? nullptr : args.skip + head} {}

  void run() {
    for (int64_t begin = 0; begin < row_.num_tokens; begin += kTokensAtOnce) {
      const int64_t end = begin + kTokensAtOnce < row_.num_tokens ? begin + kTokensAtOnce : row_.num_tokens;
      for (int64_t i = begin; i < end; ++i) read(row_.first_token + i, i - begin);
      for (int64_t group = 0; group < groups_; group += kGroupsAtOnce) {
        if (group + kGroupsAtOnce <= groups_)
          run_groups_at<kGroupsAtOnce>(group, begin, end);
        else
          run_groups_at<1>(group, begin, end);
      }
      for (int64_t i = begin; i < end; ++i) write(row_.first_token + i, i - begin);
    }
  }

 private:
  void read(int64_t token, int64_t i) {
    const RecurrenceScratch& scratch = tokens_.scratch;
    const int64_t key_head = head_ / (args_.num_heads / args_.num_key_heads);
    float* key = scratch.key + i * scratch.stride;
    convert(args_, scratch.query + i * scratch.stride,
            static_cast<const T*>(args_.query) + token * args_.query_token_stride + key_head * args_.query_head_stride,
            static_cast<float>(args_.scale));
    convert(args_, key,
            static_cast<const T*>(args_.key) + token * args_.key_token_stride + key_head * args_.key_head_stride, 1.0f);
    tokens_.betas[i] = args_.beta == nullptr ? 1.0f : args_.beta[token * args_.beta_token_stride + head_];
    const float* decays = args_.decay + token * args_.decay_token_stride + head_ * args_.decay_head_stride;
    tokens_.decays[i] = decays;
    if (args_.is_delta) {
      for_vectors(args_.key_dim, [&](int64_t k, auto... lanes) {
        const Vec decay = args_.is_per_channel ? load(decays + k, lanes...) : set1(*decays);
        store(scratch.decayed_key + i * scratch.stride + k, load(key + k) * decay);
      });
    }
    widen_line<kColumns>(scratch.values + i * tokens_.value_stride,
                         static_cast<const T*>(args_.value) + token * args_.value_token_stride +
                             head_ * args_.value_head_stride + first_group_ * kColumns,
                         num_columns());
  }

  template <int kGroups>
  void run_groups_at(int64_t group, int64_t begin, int64_t end) {
    // The same spans of tokens for all: their tiles are in the pages at the same time.
    const int64_t first = head_ * num_groups(args_.value_dim) + first_group_ + group;
    const int64_t floats = args_.key_dim * kColumns;
    for_spans<kGroups>(tiles_, row_, first, begin, end, tokens_.scratch.rest + group * floats,
                       [&](float* const* state, int64_t from, int64_t to) {
                         run_groups<kGroups>(args_, tokens_, state, tokens_.scratch.values + group * kColumns,
                                             from - begin, to - begin);
                       });
  }

  void write(int64_t token, int64_t i) const {
    T* output =
        static_cast<T*>(args_.output) + (token * args_.num_heads + head_) * args_.value_dim + first_group_ * kColumns;
    const float* values = tokens_.scratch.values + i * tokens_.value_stride;
    for_vectors(num_columns(), [&](int64_t d, auto... lanes) { store(output + d, load(values + d), lanes...); });
  }

  int64_t num_columns() const {
    const int64_t left = args_.value_dim - first_group_ * kColumns;
    return left < groups_ * kColumns ? left : groups_ * kColumns;
  }

  const RecurrenceArgs& args_;
  const StateRow& row_;
  const int64_t head_, first_group_, groups_;
  const Tiles tiles_;
  Head tokens_;
};

template <class T>
void recurrence(const RecurrenceArgs& args, const StateRow* rows, int64_t groups, int64_t begin, int64_t end,
                std::byte* scratch) {
  const int64_t all = num_groups(args.value_dim), spans = (all + groups - 1) / groups;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t span = index % spans, first = span * groups, head = index / spans % args.num_heads;
    const int64_t count = first + groups < all ? groups : all - first;
    Unit<T>(args, rows[index / spans / args.num_heads], head, first, count, groups, Arena(scratch)).run();
  }
}

}  // namespace

extern const decltype(IsaKernels::recurrence) recurrence_kernels = {
    {recurrence<float>, recurrence<BF16>, recurrence<F16>}};

}  // namespace quire::QUIRE_ISA
