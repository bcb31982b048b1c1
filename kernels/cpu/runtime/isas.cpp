// Which instruction sets this processor has, contexts for them, and the layout of the interface.
#include "isas.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "product/bf12.h"
#include "runtime/api.h"
#include "runtime/exchange.h"
#include "runtime/isa.h"

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
bool has_feature(unsigned leaf, unsigned subleaf, unsigned Registers::* place, int bit) {
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
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has_avx512_bf16() && has_feature(7, 0, &Registers::d, 24) && has_feature(7, 0, &Registers::d, 22) &&
         has_feature(7, 0, &Registers::d, 25) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Isa {
  const char* name;
  bool (*supported)();
  IsaKernels (*kernels)();
};

#define QUIRE_LIST(isa) {#isa, has_##isa, isa::kernels},
constexpr Isa kIsas[] = {QUIRE_FOR_ISAS(QUIRE_LIST)};

}  // namespace
}  // namespace quire

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

namespace quire {
namespace {

template <class Field>
constexpr int64_t kind_of() {
  return std::is_pointer_v<Field>         ? 'p'
         : std::is_same_v<Field, double>  ? 'd'
         : std::is_same_v<Field, int64_t> ? 'q'
                                          : 's';
}

// Every field that a caller fills in: one that is missing here makes callers refuse the library.
#define QUIRE_STRUCT(type) {#type, sizeof(type), 0}
#define QUIRE_FIELD(type, name) {#type "." #name, offsetof(type, name), kind_of<decltype(type::name)>()}
#define QUIRE_CONSTANT(name) {#name, name, 0}
constexpr Layout kLayout[] = {
    QUIRE_STRUCT(AttentionArgs),
    QUIRE_FIELD(AttentionArgs, output),
    QUIRE_FIELD(AttentionArgs, query),
    QUIRE_FIELD(AttentionArgs, kv_cache),
    QUIRE_FIELD(AttentionArgs, block_tables),
    QUIRE_FIELD(AttentionArgs, query_start_loc),
    QUIRE_FIELD(AttentionArgs, seq_lens),
    QUIRE_FIELD(AttentionArgs, alibi_slopes),
    QUIRE_FIELD(AttentionArgs, sinks),
    QUIRE_FIELD(AttentionArgs, dtype),
    QUIRE_FIELD(AttentionArgs, threads),
    QUIRE_FIELD(AttentionArgs, num_tokens),
    QUIRE_FIELD(AttentionArgs, num_rows),
    QUIRE_FIELD(AttentionArgs, num_heads),
    QUIRE_FIELD(AttentionArgs, num_kv_heads),
    QUIRE_FIELD(AttentionArgs, head_dim),
    QUIRE_FIELD(AttentionArgs, block_size),
    QUIRE_FIELD(AttentionArgs, num_blocks),
    QUIRE_FIELD(AttentionArgs, query_token_stride),
    QUIRE_FIELD(AttentionArgs, query_head_stride),
    QUIRE_FIELD(AttentionArgs, table_stride),
    QUIRE_FIELD(AttentionArgs, table_width),
    QUIRE_FIELD(AttentionArgs, int8_line_bytes),
    QUIRE_FIELD(AttentionArgs, sliding_window),
    QUIRE_FIELD(AttentionArgs, scale),
    QUIRE_FIELD(AttentionArgs, soft_cap),
    QUIRE_STRUCT(NormArgs),
    QUIRE_FIELD(NormArgs, output),
    QUIRE_FIELD(NormArgs, x),
    QUIRE_FIELD(NormArgs, residual),
    QUIRE_FIELD(NormArgs, weight),
    QUIRE_FIELD(NormArgs, bias),
    QUIRE_FIELD(NormArgs, dtype),
    QUIRE_FIELD(NormArgs, threads),
    QUIRE_FIELD(NormArgs, rows),
    QUIRE_FIELD(NormArgs, hidden),
    QUIRE_FIELD(NormArgs, x_stride),
    QUIRE_FIELD(NormArgs, x_group),
    QUIRE_FIELD(NormArgs, x_group_stride),
    QUIRE_FIELD(NormArgs, residual_stride),
    QUIRE_FIELD(NormArgs, eps),
    QUIRE_STRUCT(SiluArgs),
    QUIRE_FIELD(SiluArgs, output),
    QUIRE_FIELD(SiluArgs, x),
    QUIRE_FIELD(SiluArgs, dtype),
    QUIRE_FIELD(SiluArgs, threads),
    QUIRE_FIELD(SiluArgs, rows),
    QUIRE_FIELD(SiluArgs, n),
    QUIRE_FIELD(SiluArgs, x_stride),
    QUIRE_STRUCT(PackArgs),
    QUIRE_FIELD(PackArgs, packed),
    QUIRE_FIELD(PackArgs, weight),
    QUIRE_FIELD(PackArgs, threads),
    QUIRE_FIELD(PackArgs, out_features),
    QUIRE_FIELD(PackArgs, in_bytes),
    QUIRE_FIELD(PackArgs, row_bytes),
    QUIRE_FIELD(PackArgs, gated),
    QUIRE_FIELD(PackArgs, word_bytes),
    QUIRE_STRUCT(CompressArgs),
    QUIRE_FIELD(CompressArgs, compressed),
    QUIRE_FIELD(CompressArgs, packed),
    QUIRE_FIELD(CompressArgs, num_exceptions),
    QUIRE_FIELD(CompressArgs, threads),
    QUIRE_FIELD(CompressArgs, panels),
    QUIRE_FIELD(CompressArgs, numbers),
    QUIRE_FIELD(CompressArgs, max_exceptions),
    QUIRE_STRUCT(QuantizeArgs),
    QUIRE_FIELD(QuantizeArgs, values),
    QUIRE_FIELD(QuantizeArgs, scales),
    QUIRE_FIELD(QuantizeArgs, x),
    QUIRE_FIELD(QuantizeArgs, dtype),
    QUIRE_FIELD(QuantizeArgs, threads),
    QUIRE_FIELD(QuantizeArgs, rows),
    QUIRE_FIELD(QuantizeArgs, n),
    QUIRE_FIELD(QuantizeArgs, x_stride),
    QUIRE_FIELD(QuantizeArgs, value_stride),
    QUIRE_STRUCT(ProductArgs),
    QUIRE_FIELD(ProductArgs, output),
    QUIRE_FIELD(ProductArgs, x),
    QUIRE_FIELD(ProductArgs, weight),
    QUIRE_FIELD(ProductArgs, bias),
    QUIRE_FIELD(ProductArgs, scales),
    QUIRE_FIELD(ProductArgs, x_scales),
    QUIRE_FIELD(ProductArgs, dtype),
    QUIRE_FIELD(ProductArgs, multiplied),
    QUIRE_FIELD(ProductArgs, output_dtype),
    QUIRE_FIELD(ProductArgs, activation),
    QUIRE_FIELD(ProductArgs, threads),
    QUIRE_FIELD(ProductArgs, num_tokens),
    QUIRE_FIELD(ProductArgs, out_features),
    QUIRE_FIELD(ProductArgs, in_features),
    QUIRE_FIELD(ProductArgs, x_stride),
    QUIRE_FIELD(ProductArgs, output_stride),
    QUIRE_STRUCT(Heads),
    QUIRE_FIELD(Heads, source),
    QUIRE_FIELD(Heads, target),
    QUIRE_FIELD(Heads, count),
    QUIRE_FIELD(Heads, source_token_stride),
    QUIRE_FIELD(Heads, source_head_stride),
    QUIRE_FIELD(Heads, target_token_stride),
    QUIRE_FIELD(Heads, target_head_stride),
    QUIRE_STRUCT(CacheSlots),
    QUIRE_FIELD(CacheSlots, kv_cache),
    QUIRE_FIELD(CacheSlots, slot_mapping),
    QUIRE_FIELD(CacheSlots, num_blocks),
    QUIRE_FIELD(CacheSlots, block_size),
    QUIRE_FIELD(CacheSlots, int8_line_bytes),
    QUIRE_STRUCT(RotaryArgs),
    QUIRE_FIELD(RotaryArgs, query),
    QUIRE_FIELD(RotaryArgs, key),
    QUIRE_FIELD(RotaryArgs, value),
    QUIRE_FIELD(RotaryArgs, cache),
    QUIRE_FIELD(RotaryArgs, positions),
    QUIRE_FIELD(RotaryArgs, cos_sin),
    QUIRE_FIELD(RotaryArgs, max_position),
    QUIRE_FIELD(RotaryArgs, dtype),
    QUIRE_FIELD(RotaryArgs, threads),
    QUIRE_FIELD(RotaryArgs, num_tokens),
    QUIRE_FIELD(RotaryArgs, head_dim),
    QUIRE_STRUCT(SharedGroup),
    QUIRE_FIELD(SharedGroup, memory),
    QUIRE_FIELD(SharedGroup, rank),
    QUIRE_FIELD(SharedGroup, size),
    QUIRE_FIELD(SharedGroup, slot_bytes),
    QUIRE_STRUCT(AllReduceArgs),
    QUIRE_FIELD(AllReduceArgs, x),
    QUIRE_FIELD(AllReduceArgs, group),
    QUIRE_FIELD(AllReduceArgs, dtype),
    QUIRE_FIELD(AllReduceArgs, threads),
    QUIRE_FIELD(AllReduceArgs, rows),
    QUIRE_FIELD(AllReduceArgs, n),
    QUIRE_STRUCT(AllGatherArgs),
    QUIRE_FIELD(AllGatherArgs, output),
    QUIRE_FIELD(AllGatherArgs, x),
    QUIRE_FIELD(AllGatherArgs, group),
    QUIRE_FIELD(AllGatherArgs, threads),
    QUIRE_FIELD(AllGatherArgs, rows),
    QUIRE_FIELD(AllGatherArgs, part),
    QUIRE_FIELD(AllGatherArgs, total),
    QUIRE_FIELD(AllGatherArgs, x_stride),
    QUIRE_STRUCT(RecordedOperation),
    QUIRE_FIELD(RecordedOperation, operation),
    QUIRE_FIELD(RecordedOperation, args),
    QUIRE_FIELD(RecordedOperation, lines_per_token),
    QUIRE_STRUCT(RunArgs),
    QUIRE_FIELD(RunArgs, operations),
    QUIRE_FIELD(RunArgs, num_operations),
    QUIRE_FIELD(RunArgs, threads),
    QUIRE_FIELD(RunArgs, num_tokens),
    QUIRE_FIELD(RunArgs, num_rows),
    QUIRE_CONSTANT(kFloat32),
    QUIRE_CONSTANT(kBFloat16),
    QUIRE_CONSTANT(kFloat16),
    QUIRE_CONSTANT(kFloats),
    QUIRE_CONSTANT(kInt8Weight),
    QUIRE_CONSTANT(kInt8),
    QUIRE_CONSTANT(kBf12Weight),
    QUIRE_CONSTANT(kPanel),
    QUIRE_CONSTANT(kWordsOfBlock),
    QUIRE_CONSTANT(Bf12Group::kNumbers),
    QUIRE_CONSTANT(sizeof(Bf12Group)),
    QUIRE_CONSTANT(sizeof(Bf12Head)),
    QUIRE_CONSTANT(sizeof(Bf12Exception)),
    QUIRE_CONSTANT(kMaxRanks),
    {nullptr, 0, 0},
};

}  // namespace
}  // namespace quire

const quire::Layout* quire_layout() { return quire::kLayout; }

int64_t quire_group_bytes(int64_t size, int64_t slot_bytes) { return quire::group_bytes(size, slot_bytes); }
