// The doors of the library, and for which instruction set they open.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <new>

#include "api.h"
#include "exchange.h"
#include "isa.h"
#include "isas.h"
#include "operations.h"

namespace quire {

// Those that the compiler of this build knows; CMakeLists.txt says which.
#define QUIRE_DECLARE(isa) \
  namespace isa {          \
  IsaKernels kernels();    \
  }
QUIRE_FOR_ISAS(QUIRE_DECLARE)

namespace {

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

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

bool has_avx512_bf16() { return has_avx512_vnni() && has_feature(7, 1, &Registers::a, 5); }

// Matrix units for bfloat16 and int8 also need the system's leave, once a process.
bool has_amx() {
  constexpr long kAskForPermission = 0x1023, kTileData = 18;
  return has_avx512_bf16() && has_feature(7, 0, &Registers::d, 24) && has_feature(7, 0, &Registers::d, 22) &&
         has_feature(7, 0, &Registers::d, 25) &&
         syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
}

bool has_amx_fp16() { return has_amx() && has_feature(7, 1, &Registers::a, 21); }

struct Isa {
  const char* name;
  bool (*supported)();
  IsaKernels (*kernels)();
};

#define QUIRE_LIST(isa) {#isa, has_##isa, isa::kernels},
constexpr Isa kIsas[] = {QUIRE_FOR_ISAS(QUIRE_LIST)};

// Runs what add(operations) adds.
template <class Add>
int32_t run_added(const Context& context, int64_t threads, const Add& add) {
  try {
    Operations operations(context);
    const Status status = add(operations);
    if (status == kOk) operations.run(threads);
    return status;
  } catch (...) {  // Only allocations throw.
    return kNoMemory;
  }
}

// A part of a recording, for as many tokens and rows as there are now.
Status add(Operations& operations, const RecordedOperation& recorded, const RunArgs& run) {
  const int64_t lines = run.num_tokens * recorded.lines_per_token;
  switch (recorded.operation) {
    case kPagedAttention: {
      AttentionArgs args = *static_cast<const AttentionArgs*>(recorded.args);
      args.num_tokens = lines;
      args.num_rows = run.num_rows;
      return operations.add_paged_attention(args);
    }
    case kRmsNorm:
    case kLayerNorm: {
      NormArgs args = *static_cast<const NormArgs*>(recorded.args);
      args.rows = lines;
      return recorded.operation == kRmsNorm ? operations.add_rms_norm(args) : operations.add_layer_norm(args);
    }
    case kGate: {
      SiluArgs args = *static_cast<const SiluArgs*>(recorded.args);
      args.rows = lines;
      return operations.add_silu_and_mul(args);
    }
    case kRotary: {
      RotaryArgs args = *static_cast<const RotaryArgs*>(recorded.args);
      args.num_tokens = lines;
      return operations.add_rotary(args);
    }
    case kQuantize: {
      QuantizeArgs args = *static_cast<const QuantizeArgs*>(recorded.args);
      args.rows = lines;
      return operations.add_quantize(args);
    }
    case kAllReduce: {
      AllReduceArgs args = *static_cast<const AllReduceArgs*>(recorded.args);
      args.rows = lines;
      return operations.add_all_reduce(args);
    }
    case kAllGather: {
      AllGatherArgs args = *static_cast<const AllGatherArgs*>(recorded.args);
      args.rows = lines;
      return operations.add_all_gather(args);
    }
    default: {
      ProductArgs args = *static_cast<const ProductArgs*>(recorded.args);
      args.num_tokens = lines;
      return operations.add_product(args);
    }
  }
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

void quire_argument_sizes(int64_t sizes[12]) {
  sizes[0] = sizeof(quire::AttentionArgs);
  sizes[1] = sizeof(quire::NormArgs);
  sizes[2] = sizeof(quire::SiluArgs);
  sizes[3] = sizeof(quire::RotaryArgs);
  sizes[4] = sizeof(quire::PackArgs);
  sizes[5] = sizeof(quire::QuantizeArgs);
  sizes[6] = sizeof(quire::ProductArgs);
  sizes[7] = sizeof(quire::RecordedOperation);
  sizes[8] = sizeof(quire::RunArgs);
  sizes[9] = sizeof(quire::AllReduceArgs);
  sizes[10] = sizeof(quire::AllGatherArgs);
  sizes[11] = sizeof(quire::ShortenArgs);
}

int64_t quire_group_bytes(int64_t size, int64_t slot_bytes) { return quire::group_bytes(size, slot_bytes); }

int32_t quire_paged_attention(const quire::Context* context, const quire::AttentionArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_paged_attention(*args); });
}

int32_t quire_rms_norm(const quire::Context* context, const quire::NormArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_rms_norm(*args); });
}

int32_t quire_layer_norm(const quire::Context* context, const quire::NormArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_layer_norm(*args); });
}

int32_t quire_silu_and_mul(const quire::Context* context, const quire::SiluArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_silu_and_mul(*args); });
}

int32_t quire_rotary(const quire::Context* context, const quire::RotaryArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_rotary(*args); });
}

int32_t quire_quantize(const quire::Context* context, const quire::QuantizeArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_quantize(*args); });
}

int32_t quire_product(const quire::Context* context, const quire::ProductArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_product(*args); });
}

int32_t quire_all_reduce(const quire::Context* context, const quire::AllReduceArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_all_reduce(*args); });
}

int32_t quire_all_gather(const quire::Context* context, const quire::AllGatherArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) { return all.add_all_gather(*args); });
}

int32_t quire_run(const quire::Context* context, const quire::RunArgs* args) {
  return quire::run_added(*context, args->threads, [&](quire::Operations& all) {
    for (int64_t i = 0; i < args->num_operations; ++i)
      if (const quire::Status status = quire::add(all, args->operations[i], *args); status != kOk) return status;
    return kOk;
  });
}
