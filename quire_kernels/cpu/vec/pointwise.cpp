// Norms, the gated activation, products, rounding to int8 and sums, line by line; rotation of queries and keys by their
// positions, and the write of keys and values into the pool. All is computed in float and rounded once.
#include "runtime/isa.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
inline T* line_of(void* start, int64_t line, int64_t stride) {
  return static_cast<T*>(start) + line * stride;
}

template <class T>
inline const T* line_of(const void* start, int64_t line, int64_t stride) {
  return static_cast<const T*>(start) + line * stride;
}

template <class T>
inline const T* x_line(const NormArgs& args, int64_t line) {
  const int64_t group = line / args.x_group;
  return static_cast<const T*>(args.x) + group * args.x_group_stride + (line - group * args.x_group) * args.x_stride;
}

// x + residual to residual; returns the sum of squares of the written numbers, after rounding.
template <class T>
inline float add_to(T* residual, const T* x, int64_t n) {
  Vec squares = zero();
  for_vectors(n, [&](int64_t i, auto... lanes) {
    store(residual + i, load(x + i, lanes...) + load(residual + i, lanes...), lanes...);
    const Vec total = load(residual + i, lanes...);
    squares = fma(total, total, squares);
  });
  return reduce_add(squares);
}

template <class T>
inline float sum_of_squares(const T* x, int64_t n) {
  Vec squares = zero();
  for_vectors(n, [&](int64_t i, auto... lanes) {
    const Vec value = load(x + i, lanes...);
    squares = fma(value, value, squares);
  });
  return reduce_add(squares);
}

template <class T>
void rms_norm(const NormArgs& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  const Vec offset = set1(static_cast<float>(args.offset));
  for (int64_t line = begin; line < end; ++line) {
    const T* x = x_line<T>(args, line);
    float squares;
    if (args.residual == nullptr) {
      squares = sum_of_squares(x, args.hidden);
    } else {
      T* residual = line_of<T>(args.residual, line, args.residual_stride);
      squares = add_to(residual, x, args.hidden);
      x = residual;
    }
    const float mean = squares / static_cast<float>(args.hidden);
    const Vec factor = set1(1.0f / __builtin_sqrtf(mean + static_cast<float>(args.eps)));
    T* output = line_of<T>(args.output, line, args.output_stride);
    for_vectors(args.hidden, [&](int64_t i, auto... lanes) {
      store(output + i, load(x + i, lanes...) * factor * (load(weight + i, lanes...) + offset), lanes...);
    });
  }
}

template <class T>
inline float mean_of(const T* x, int64_t n) {
  Vec sum = zero();
  for_vectors(n, [&](int64_t i, auto... lanes) { sum = sum + load(x + i, lanes...); });
  return reduce_add(sum) / static_cast<float>(n);
}

// The mean of (x - mean)^2. A second pass over the line, since the difference of two large means is not exact.
template <class T>
inline float variance_of(const T* x, int64_t n, float mean) {
  Vec squares = zero();
  for_vectors(n, [&](int64_t i, auto... lanes) {
    Vec difference = load(x + i, lanes...) - set1(mean);
    if constexpr (sizeof...(lanes) > 0) difference = keep(difference, 0, lanes..., zero());
    squares = fma(difference, difference, squares);
  });
  return reduce_add(squares) / static_cast<float>(n);
}

template <class T>
void layer_norm(const NormArgs& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t line = begin; line < end; ++line) {
    const T* x = x_line<T>(args, line);
    if (args.residual != nullptr) {
      T* residual = line_of<T>(args.residual, line, args.residual_stride);
      add_to(residual, x, args.hidden);
      x = residual;
    }
    const float mean = mean_of(x, args.hidden);
    const float variance = variance_of(x, args.hidden, mean);
    const Vec factor = set1(1.0f / __builtin_sqrtf(variance + static_cast<float>(args.eps)));
    T* output = line_of<T>(args.output, line, args.output_stride);
    for_vectors(args.hidden, [&](int64_t i, auto... lanes) {
      Vec value = (load(x + i, lanes...) - set1(mean)) * factor;
      if (weight != nullptr) value = value * load(weight + i, lanes...);
      if (bias != nullptr) value = value + load(bias + i, lanes...);
      store(output + i, value, lanes...);
    });
  }
}

template <class T>
void silu_and_mul(const SiluArgs& args, int64_t begin, int64_t end) {
  for (int64_t line = begin; line < end; ++line) {
    const T* gate = line_of<T>(args.x, line, args.x_stride);
    const T* up = gate + args.n;
    T* output = line_of<T>(args.output, line, args.n);
    for_vectors(args.n, [&](int64_t i, auto... lanes) {
      const Vec x = load(gate + i, lanes...);
      store(output + i, silu(x) * load(up + i, lanes...), lanes...);
    });
  }
}

template <class T>
void multiply(const MultiplyArgs& args, int64_t begin, int64_t end) {
  for (int64_t line = begin; line < end; ++line) {
    const T *x = line_of<T>(args.x, line, args.x_stride), *y = line_of<T>(args.y, line, args.y_stride);
    T* output = line_of<T>(args.output, line, args.n);
    for_vectors(args.n, [&](int64_t i, auto... lanes) {
      store(output + i, load(x + i, lanes...) * load(y + i, lanes...), lanes...);
    });
  }
}

template <class T>
void quantize(const QuantizeArgs& args, int64_t begin, int64_t end) {
  for (int64_t line = begin; line < end; ++line) {
    int8_t* values = args.values + line * args.value_stride;
    std::memset(values, 0, args.value_stride);
    args.scales[line] = round_to_int8(values, line_of<T>(args.x, line, args.x_stride), args.n);
  }
}

template <class T>
void sum(void* to, const void* const* parts, int64_t count, int64_t n) {
  for_vectors(n, [&](int64_t i, auto... lanes) {
    Vec total = load(static_cast<const T*>(parts[0]) + i, lanes...);
    for (int64_t part = 1; part < count; ++part) total = total + load(static_cast<const T*>(parts[part]) + i, lanes...);
    store(static_cast<T*>(to) + i, total, lanes...);
  });
}

// Rotary embeddings, and keys and values on their way to the pool.

// One head: both halves of it are read before either is written, so the target may be the source.
template <class T>
inline void rotate(const T* source, T* target, const float* cos_sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  auto turn = [&](int64_t i, auto... lanes) {
    const Vec first = load(source + i, lanes...), second = load(source + half + i, lanes...);
    const Vec cos = load(cos_sin + i, lanes...), sin = load(cos_sin + half + i, lanes...);
    store(target + i, fnma(second, sin, first * cos), lanes...);
    store(target + half + i, fma(first, sin, second * cos), lanes...);
  };
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) turn(i);
  if (i < half) turn(i, static_cast<int>(half - i));
}

template <class T>
inline const T* source_of(const Heads& heads, int64_t token, int64_t head) {
  return static_cast<const T*>(heads.source) + token * heads.source_token_stride + head * heads.source_head_stride;
}

template <class T>
inline T* target_of(const Heads& heads, int64_t token, int64_t head) {
  return static_cast<T*>(heads.target) + token * heads.target_token_stride + head * heads.target_head_stride;
}

// Where in the pool the keys of one head of the token go to, in elements; `line` are the elements of a token.
inline int64_t place_of(const RotaryArgs& args, int64_t token, int64_t head, int64_t line) {
  const CacheSlots& cache = args.cache;
  const int64_t block = cache.slot_mapping[token] / cache.block_size;
  const int64_t offset = cache.slot_mapping[token] - block * cache.block_size;
  return block * cache.block_stride + (head * cache.block_size + offset) * line;
}

// Key and value of one head of a token to the pool as they are, the key rotated where there are cosines.
template <class T>
inline void write(const RotaryArgs& args, int64_t token, int64_t head, const float* cos_sin) {
  const int64_t dims = args.head_dim, bytes = dims * static_cast<int64_t>(sizeof(T));
  const T* key = source_of<T>(args.key, token, head);
  T* target = static_cast<T*>(args.cache.kv_cache) + place_of(args, token, head, dims);
  if (cos_sin != nullptr)
    rotate(key, target, cos_sin, dims);
  else
    std::memcpy(target, key, bytes);
  std::memcpy(target + args.cache.value_offset, source_of<T>(args.value, token, head), bytes);
}

// The same to a pool of int8.
template <class T>
inline void write_int8(const RotaryArgs& args, int64_t token, int64_t head, const float* cos_sin) {
  const int64_t dims = args.head_dim, bytes = args.cache.int8_line_bytes;
  const T* key = source_of<T>(args.key, token, head);
  int8_t* line = static_cast<int8_t*>(args.cache.kv_cache) + place_of(args, token, head, bytes);
  if (cos_sin != nullptr) {
    T* rotated = target_of<T>(args.key, token, head);
    rotate(key, rotated, cos_sin, dims);
    key = rotated;
  }
  quantize_line(line, key, dims, bytes);
  quantize_line(line + args.cache.value_offset, source_of<T>(args.value, token, head), dims, bytes);
}

template <class T>
void rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t dims = args.head_dim;
  const bool caches = args.cache.kv_cache != nullptr;
  const auto write_head = args.cache.int8_line_bytes > 0 ? write_int8<T> : write<T>;
  for (int64_t token = begin; token < end; ++token) {
    const float* cos_sin = args.positions == nullptr ? nullptr : args.cos_sin + args.positions[token] * dims;
    for (int64_t head = 0; cos_sin != nullptr && head < args.query.count; ++head)
      rotate(source_of<T>(args.query, token, head), target_of<T>(args.query, token, head), cos_sin, dims);
    for (int64_t head = 0; head < args.key.count; ++head) {
      if (caches)
        write_head(args, token, head, cos_sin);
      else
        rotate(source_of<T>(args.key, token, head), target_of<T>(args.key, token, head), cos_sin, dims);
    }
  }
}

// A product that is rounded: the compiler must not fuse it with a sum.
inline Vec rounded(Vec x) {
#if defined(__aarch64__)
  asm("" : "+w"(x.v.low), "+w"(x.v.high));
#else
  asm("" : "+v"(x.v));
#endif
  return x;
}

template <class T>
void add_experts(const ExpertsArgs& args, const void* outputs, const int64_t* rows, const float* shared_weights,
                 int64_t begin, int64_t end) {
  const int64_t hidden = args.down->out_features, count = args.num_chosen;
  for (int64_t token = begin; token < end; ++token) {
    T* to = static_cast<T*>(args.output) + token * hidden;
    for_vectors(hidden, [&](int64_t at, auto... lanes) {
      Vec sum = zero();
      for (int64_t i = token * count; i < (token + 1) * count; ++i) {
        const Vec output = load(static_cast<const T*>(outputs) + rows[i] * hidden + at, lanes...);
        sum = sum + rounded(output * set1(args.weights[i]));
      }
      if (args.shared != nullptr) {
        const Vec shared = load(static_cast<const T*>(args.shared) + token * hidden + at, lanes...);
        sum = sum + (shared_weights == nullptr ? shared : rounded(shared * set1(shared_weights[token])));
      }
      store(to + at, sum, lanes...);
    });
  }
}

}  // namespace

extern const decltype(IsaKernels::add_experts) add_experts_kernels = {
    {add_experts<float>, add_experts<BF16>, add_experts<F16>}};
extern const decltype(IsaKernels::rotary) rotary_kernels = {{rotary<float>, rotary<BF16>, rotary<F16>}};
extern const decltype(IsaKernels::sum) sum_kernels = {{sum<float>, sum<BF16>, sum<F16>}};
extern const decltype(IsaKernels::quantize) quantize_kernels = {{quantize<float>, quantize<BF16>, quantize<F16>}};
extern const decltype(IsaKernels::rms_norm) rms_norm_kernels = {{rms_norm<float>, rms_norm<BF16>, rms_norm<F16>}};
extern const decltype(IsaKernels::layer_norm) layer_norm_kernels = {
    {layer_norm<float>, layer_norm<BF16>, layer_norm<F16>}};
extern const decltype(IsaKernels::silu_and_mul) silu_and_mul_kernels = {
    {silu_and_mul<float>, silu_and_mul<BF16>, silu_and_mul<F16>}};
extern const decltype(IsaKernels::multiply) multiply_kernels = {{multiply<float>, multiply<BF16>, multiply<F16>}};

}  // namespace quire::QUIRE_ISA
