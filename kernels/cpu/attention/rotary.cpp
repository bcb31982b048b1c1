// Rotation of queries and keys by their positions, and the write of keys and values into the pool.
#include "runtime/isa.h"
#include "vec/quantize.h"
#include "vec/vec.h"

namespace quire::QUIRE_ISA {
namespace {

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

// The number of the line in the pool that the keys of one head of the token go to.
inline int64_t line_of(const RotaryArgs& args, int64_t token, int64_t head) {
  const CacheSlots& cache = args.cache;
  const int64_t block = cache.slot_mapping[token] / cache.block_size;
  const int64_t offset = cache.slot_mapping[token] - block * cache.block_size;
  return (block * args.key.count + head) * cache.block_size + offset;
}

// Lines of keys before those of values.
inline int64_t lines_of_keys(const RotaryArgs& args) {
  return args.cache.num_blocks * args.key.count * args.cache.block_size;
}

// Key and value of one head of a token to the pool as they are, the key rotated where there are cosines.
template <class T>
inline void write(const RotaryArgs& args, int64_t token, int64_t head, const float* cos_sin) {
  const int64_t dims = args.head_dim, bytes = dims * static_cast<int64_t>(sizeof(T));
  const T* key = source_of<T>(args.key, token, head);
  T* target = static_cast<T*>(args.cache.kv_cache) + line_of(args, token, head) * dims;
  if (cos_sin != nullptr)
    rotate(key, target, cos_sin, dims);
  else
    std::memcpy(target, key, bytes);
  std::memcpy(target + lines_of_keys(args) * dims, source_of<T>(args.value, token, head), bytes);
}

// The same to a pool of int8.
template <class T>
inline void write_int8(const RotaryArgs& args, int64_t token, int64_t head, const float* cos_sin) {
  const int64_t dims = args.head_dim, bytes = args.cache.int8_line_bytes;
  const T* key = source_of<T>(args.key, token, head);
  int8_t* line = static_cast<int8_t*>(args.cache.kv_cache) + line_of(args, token, head) * bytes;
  if (cos_sin != nullptr) {
    T* rotated = target_of<T>(args.key, token, head);
    rotate(key, rotated, cos_sin, dims);
    key = rotated;
  }
  quantize_line(line, key, dims, bytes);
  quantize_line(line + lines_of_keys(args) * bytes, source_of<T>(args.value, token, head), dims, bytes);
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

}  // namespace

extern const decltype(IsaKernels::rotary) rotary_kernels = {{rotary<float>, rotary<BF16>, rotary<F16>}};

}  // namespace quire::QUIRE_ISA
