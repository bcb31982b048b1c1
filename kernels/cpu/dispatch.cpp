// The doors of the library: what they check, on how many threads they run, and for which instruction set.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "api.h"
#include "attention.h"
#include "isa.h"
#include "isas.h"
#include "threads.h"

namespace quire {

// Those that the compiler of this build knows; CMakeLists.txt says which.
#define QUIRE_DECLARE(isa) \
  namespace isa {          \
  IsaKernels kernels();    \
  }
QUIRE_FOR_ISAS(QUIRE_DECLARE)

namespace {

// Elements below which a second thread takes longer to wake than it saves.
constexpr int64_t kWorthThreads = 1 << 15;

struct Registers {
  unsigned a, b, c, d;
};

// A bit of what the processor says of itself in leaf `leaf`, `subleaf`; compilers do not know names for all of them.
bool has_feature(unsigned leaf, unsigned subleaf, unsigned Registers::*place, int bit) {
  Registers registers;
  if (!__get_cpuid_count(leaf, subleaf, &registers.a, &registers.b, &registers.c, &registers.d)) return false;
  return registers.*place >> bit & 1;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_feature(1, 0, &Registers::c, 29);
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512_bf16() { return has_avx512() && has_feature(7, 1, &Registers::a, 5); }

// Matrix units also need the system's leave, once a process.
bool has_amx() {
  constexpr long kAskForPermission = 0x1023, kTileData = 18;
  return has_avx512_bf16() && has_feature(7, 0, &Registers::d, 24) && has_feature(7, 0, &Registers::d, 22) &&
         syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
}

struct Isa {
  const char* name;
  bool (*supported)();
  IsaKernels (*kernels)();
};

#define QUIRE_LIST(isa) {#isa, has_##isa, isa::kernels},
constexpr Isa kIsas[] = {QUIRE_FOR_ISAS(QUIRE_LIST)};

// Elements of weights below which the same holds for the reading of them.
constexpr int64_t kWorthReading = 1 << 17;

int64_t grain(int64_t elements_of_line) { return 1 + kWorthThreads / (elements_of_line < 1 ? 1 : elements_of_line); }

Status check_tokens(const RotaryArgs& args) {
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.positions != nullptr && (args.positions[token] < 0 || args.positions[token] >= args.max_position))
      return kBadPosition;
    if (args.cache.kv_cache == nullptr) continue;
    if (args.cache.slot_mapping[token] < 0 || args.cache.slot_mapping[token] >= num_slots) return kBadSlot;
  }
  return kOk;
}

}  // namespace
}  // namespace quire

using quire::kOk;

const char* quire_isas() {
  // Computed once: asking for matrix units is a system call.
  static const struct Names {
    char text[128] = "";
    Names() {
      for (const quire::Isa& isa : quire::kIsas) {
        if (!isa.supported()) continue;
        if (text[0] != 0) std::strcat(text, " ");
        std::strcat(text, isa.name);
      }
    }
  } names;
  return names.text;
}

quire::Context* quire_open(const char* name, const quire::OpenMp* openmp) {
  for (const quire::Isa& isa : quire::kIsas)
    if (std::strcmp(isa.name, name) == 0 && isa.supported())
      return new (std::nothrow) quire::Context{isa.kernels(), *openmp};
  return nullptr;
}

void quire_close(quire::Context* context) { delete context; }

void quire_argument_sizes(int64_t sizes[6]) {
  sizes[0] = sizeof(quire::AttentionArgs);
  sizes[1] = sizeof(quire::NormArgs);
  sizes[2] = sizeof(quire::SiluArgs);
  sizes[3] = sizeof(quire::RotaryArgs);
  sizes[4] = sizeof(quire::PackArgs);
  sizes[5] = sizeof(quire::ProductArgs);
}

int32_t quire_paged_attention(const quire::Context* context, const quire::AttentionArgs* args) {
  try {
    return quire::paged_attention(*context, *args);
  } catch (...) {  // Only allocations throw.
    return quire::kNoMemory;
  }
}

int32_t quire_rms_norm(const quire::Context* context, const quire::NormArgs* args) {
  quire::split_over_threads(
      context->openmp, args->threads, args->rows, quire::grain(args->hidden),
      [&](int64_t begin, int64_t end) { context->kernels.rms_norm.of[args->dtype](*args, begin, end); });
  return kOk;
}

int32_t quire_layer_norm(const quire::Context* context, const quire::NormArgs* args) {
  quire::split_over_threads(
      context->openmp, args->threads, args->rows, quire::grain(args->hidden),
      [&](int64_t begin, int64_t end) { context->kernels.layer_norm.of[args->dtype](*args, begin, end); });
  return kOk;
}

int32_t quire_silu_and_mul(const quire::Context* context, const quire::SiluArgs* args) {
  quire::split_over_threads(
      context->openmp, args->threads, args->rows, quire::grain(args->n),
      [&](int64_t begin, int64_t end) { context->kernels.silu_and_mul.of[args->dtype](*args, begin, end); });
  return kOk;
}

int32_t quire_rotary(const quire::Context* context, const quire::RotaryArgs* args) {
  if (const quire::Status status = quire::check_tokens(*args); status != kOk) return status;
  const int64_t elements = (args->query.count + 2 * args->key.count) * args->head_dim;
  quire::split_over_threads(
      context->openmp, args->threads, args->num_tokens, quire::grain(elements),
      [&](int64_t begin, int64_t end) { context->kernels.rotary.of[args->dtype](*args, begin, end); });
  return kOk;
}

int32_t quire_product(const quire::Context* context, const quire::ProductArgs* args) {
  const int64_t work = args->in_features * quire::kPanel * (1 + args->num_tokens / 16);
  quire::split_over_threads(
      context->openmp, args->threads, args->num_tokens > 0 ? quire::num_panels(*args) : 0,
      1 + quire::kWorthReading / (work < 1 ? 1 : work),
      [&](int64_t begin, int64_t end) { context->kernels.product(*args, begin, end); });
  return kOk;
}
