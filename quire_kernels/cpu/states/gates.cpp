// Gates of recurrences from the outputs of products, and norms of their outputs with a gate.
#include "runtime/isa.h"
#include "states/lines.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
class Gates {
 public:
  explicit Gates(const GatesArgs& args)
      : args_(args),
        dt_min_(set1(static_cast<float>(args.dt_min))),
        dt_max_(set1(static_cast<float>(args.dt_max))),
        beta_scale_(set1(static_cast<float>(args.beta_scale))) {}

  void run(int64_t token) const {
    const int64_t channels = args_.head_channels;
    const T* a = static_cast<const T*>(args_.a) + token * args_.a_stride;
    float *decay = args_.decay + token * args_.num_heads * channels, *beta = args_.beta + token * args_.num_heads;
    auto decays = [&](int64_t i, Vec a_log, auto... lanes) {
      const Vec step = min(dt_max_, max(dt_min_, softplus(load(a + i, lanes...) + load(args_.dt_bias + i, lanes...))));
      store(decay + i, exp((zero() - exp(a_log)) * step), lanes...);
      return step;
    };
    if (channels > 1) {
      for (int64_t head = 0; head < args_.num_heads; ++head)
        for_vectors(channels,
                    [&](int64_t i, auto... lanes) { decays(head * channels + i, set1(args_.a_log[head]), lanes...); });
    }
    for_vectors(args_.num_heads, [&](int64_t i, auto... lanes) {
      Vec of_beta = zero();
      if (channels == 1) of_beta = decays(i, load(args_.a_log + i, lanes...), lanes...);
      if (args_.b != nullptr)
        of_beta = sigmoid(load(static_cast<const T*>(args_.b) + token * args_.b_stride + i, lanes...)) * beta_scale_;
      store(beta + i, of_beta, lanes...);
    });
  }

 private:
  const GatesArgs& args_;
  const Vec dt_min_, dt_max_, beta_scale_;
};

template <class T>
void gates(const GatesArgs& args, int64_t begin, int64_t end) {
  const Gates<T> all(args);
  for (int64_t token = begin; token < end; ++token) all.run(token);
}

// One group of a token's numbers.
template <class T>
class GatedGroup {
 public:
  GatedGroup(const GatedNormArgs& args, int64_t token, int64_t first)
      : args_(args),
        weight_(args.weight, args.weight_dtype),
        first_weight_(first % args.weight_size),
        x_(static_cast<const T*>(args.x) + token * args.x_stride + first),
        gate_(static_cast<const T*>(args.gate) + token * args.gate_stride + first),
        output_(static_cast<T*>(args.output) + token * args.hidden + first) {}

  void run() const {
    if (args_.weight == nullptr) {
      for_vectors(args_.group_size,
                  [&](int64_t i, auto... lanes) { store(output_ + i, gated(i, lanes...), lanes...); });
      return;
    }
    const bool is_norm_first = args_.is_norm_first;
    Vec squares = zero();
    for_vectors(args_.group_size, [&](int64_t i, auto... lanes) {
      const Vec number = is_norm_first ? load(x_ + i, lanes...) : gated(i, lanes...);
      squares = fma(number, number, squares);
    });
    const float mean = reduce_add(squares) / static_cast<float>(args_.group_size);
    const Vec factor = set1(1.0f / __builtin_sqrtf(mean + static_cast<float>(args_.eps)));
    for_vectors(args_.group_size, [&](int64_t i, auto... lanes) {
      const Vec weight = weight_.vec(first_weight_ + i, lanes...);
      const Vec normed = (is_norm_first ? load(x_ + i, lanes...) : gated(i, lanes...)) * factor * weight;
      store(output_ + i, is_norm_first ? normed * activation(i, lanes...) : normed, lanes...);
    });
  }

 private:
  template <class... Lanes>
  Vec activation(int64_t i, Lanes... lanes) const {
    const Vec gate = load(gate_ + i, lanes...);
    return args_.is_sigmoid ? sigmoid(gate) : silu(gate);
  }

  template <class... Lanes>
  Vec gated(int64_t i, Lanes... lanes) const {
    return load(x_ + i, lanes...) * activation(i, lanes...);
  }

  const GatedNormArgs& args_;
  const Numbers<T> weight_;
  const int64_t first_weight_;
  const T *x_, *gate_;
  T* output_;
};

template <class T>
void gated_norm(const GatedNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int64_t first = 0; first < args.hidden; first += args.group_size) GatedGroup<T>(args, token, first).run();
}

}  // namespace

extern const decltype(IsaKernels::gates) gates_kernels = {{gates<float>, gates<BF16>, gates<F16>}};
extern const decltype(IsaKernels::gated_norm) gated_norm_kernels = {
    {gated_norm<float>, gated_norm<BF16>, gated_norm<F16>}};

}  // namespace quire::QUIRE_ISA
