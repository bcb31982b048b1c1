// Which instruction sets this processor has, contexts for them, and the layout of the interface.
#include "isas.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "product/bf12.h"
#include "runtime/api.h"
#include "runtime/exchange.h"
#include "runtime/isa.h"

namespace quire {

// The instruction sets of this build; CMakeLists.txt lists them.
#define QUIRE_DECLARE(isa) \
  namespace isa {          \
  IsaKernels kernels();    \
  }
QUIRE_FOR_ISAS(QUIRE_DECLARE)

namespace {

#if defined(__aarch64__)
[[maybe_unused]] bool has_neon() { return true; }  // every processor

[[maybe_unused]] bool has_neon_dotprod() {
  constexpr unsigned long kDotProducts = 1 << 20;  // ASIMDDP
  return getauxval(AT_HWCAP) & kDotProducts;
}
#else
struct Registers {
  unsigned a, b, c, d;
};

// A feature bit of CPUID; compilers do not know names for all of them.
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

// Matrix units for bfloat16 and int8. A process also needs the system's permission to use them.
[[maybe_unused]] bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has_avx512_bf16() && has_feature(7, 0, &Registers::d, 24) && has_feature(7, 0, &Registers::d, 22) &&
         has_feature(7, 0, &Registers::d, 25) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

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
  // Computed once: the request for matrix units is a system call.
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

// Every field that a caller fills in. A caller refuses a library in which one is missing.
#define QUIRE_STRUCT(type) {#type, sizeof(type), 0}
#define F(type, name) {#type "." #name, offsetof(type, name), kind_of<decltype(type::name)>()}
#define QUIRE_CONSTANT(name) {#name, name, 0}
constexpr Layout kLayout[] = {
    // clang-format off
    QUIRE_STRUCT(AttentionArgs), F(AttentionArgs, output), F(AttentionArgs, query), F(AttentionArgs, kv_cache),
    F(AttentionArgs, block_tables), F(AttentionArgs, query_start_loc), F(AttentionArgs, seq_lens),
    F(AttentionArgs, alibi_slopes), F(AttentionArgs, sinks), F(AttentionArgs, dtype), F(AttentionArgs, threads),
    F(AttentionArgs, num_tokens), F(AttentionArgs, num_rows), F(AttentionArgs, num_heads),
    F(AttentionArgs, num_kv_heads), F(AttentionArgs, head_dim), F(AttentionArgs, block_size),
    F(AttentionArgs, num_blocks), F(AttentionArgs, block_stride), F(AttentionArgs, value_offset),
    F(AttentionArgs, query_token_stride), F(AttentionArgs, query_head_stride), F(AttentionArgs, table_stride),
    F(AttentionArgs, table_width), F(AttentionArgs, int8_line_bytes), F(AttentionArgs, sliding_window),
    F(AttentionArgs, scale), F(AttentionArgs, soft_cap),
    QUIRE_STRUCT(TextHeads), F(TextHeads, at), F(TextHeads, token_stride), F(TextHeads, head_stride),
    QUIRE_STRUCT(TextAttentionArgs), F(TextAttentionArgs, output), F(TextAttentionArgs, query),
    F(TextAttentionArgs, key), F(TextAttentionArgs, value), F(TextAttentionArgs, lengths), F(TextAttentionArgs, bias),
    F(TextAttentionArgs, dtype), F(TextAttentionArgs, threads), F(TextAttentionArgs, num_tokens),
    F(TextAttentionArgs, num_texts), F(TextAttentionArgs, num_heads), F(TextAttentionArgs, num_kv_heads),
    F(TextAttentionArgs, head_dim), F(TextAttentionArgs, bias_stride), F(TextAttentionArgs, window),
    F(TextAttentionArgs, scale),
    QUIRE_STRUCT(NormArgs), F(NormArgs, output), F(NormArgs, x), F(NormArgs, residual), F(NormArgs, weight),
    F(NormArgs, bias), F(NormArgs, dtype), F(NormArgs, threads), F(NormArgs, rows), F(NormArgs, hidden),
    F(NormArgs, x_stride), F(NormArgs, x_group), F(NormArgs, x_group_stride), F(NormArgs, residual_stride),
    F(NormArgs, output_stride), F(NormArgs, eps), F(NormArgs, offset),
    QUIRE_STRUCT(SiluArgs), F(SiluArgs, output), F(SiluArgs, x), F(SiluArgs, dtype), F(SiluArgs, threads),
    F(SiluArgs, rows), F(SiluArgs, n), F(SiluArgs, x_stride),
    QUIRE_STRUCT(MultiplyArgs), F(MultiplyArgs, output), F(MultiplyArgs, x), F(MultiplyArgs, y),
    F(MultiplyArgs, dtype), F(MultiplyArgs, threads), F(MultiplyArgs, rows), F(MultiplyArgs, n),
    F(MultiplyArgs, x_stride), F(MultiplyArgs, y_stride),
    QUIRE_STRUCT(Grouping), F(Grouping, pieces), F(Grouping, scale_dtype), F(Grouping, has_zeros),
    QUIRE_STRUCT(PackArgs), F(PackArgs, packed), F(PackArgs, weight), F(PackArgs, threads), F(PackArgs, out_features),
    F(PackArgs, in_bytes), F(PackArgs, row_bytes), F(PackArgs, gated), F(PackArgs, word_bytes),
    F(PackArgs, stored), F(PackArgs, scales), F(PackArgs, zeros), F(PackArgs, parts), F(PackArgs, table),
    F(PackArgs, grouping),
    QUIRE_STRUCT(LookUpArgs), F(LookUpArgs, output), F(LookUpArgs, rows), F(LookUpArgs, ids), F(LookUpArgs, threads),
    F(LookUpArgs, num_ids), F(LookUpArgs, num_rows), F(LookUpArgs, row_bytes), F(LookUpArgs, row_stride),
    F(LookUpArgs, stored),
    QUIRE_STRUCT(CompressArgs), F(CompressArgs, compressed), F(CompressArgs, packed), F(CompressArgs, num_exceptions),
    F(CompressArgs, threads), F(CompressArgs, panels), F(CompressArgs, numbers), F(CompressArgs, max_exceptions),
    QUIRE_STRUCT(QuantizeArgs), F(QuantizeArgs, values), F(QuantizeArgs, scales), F(QuantizeArgs, x),
    F(QuantizeArgs, dtype), F(QuantizeArgs, threads), F(QuantizeArgs, rows), F(QuantizeArgs, n),
    F(QuantizeArgs, x_stride), F(QuantizeArgs, value_stride),
    QUIRE_STRUCT(LowRankPart), F(LowRankPart, a), F(LowRankPart, b), F(LowRankPart, scale), F(LowRankPart, rank),
    F(LowRankPart, first_tile), F(LowRankPart, last_tile), F(LowRankPart, column),
    QUIRE_STRUCT(ShrinkArgs), F(ShrinkArgs, shrunk), F(ShrinkArgs, x), F(ShrinkArgs, parts), F(ShrinkArgs, slots),
    F(ShrinkArgs, dtype), F(ShrinkArgs, threads), F(ShrinkArgs, num_tokens), F(ShrinkArgs, num_slots),
    F(ShrinkArgs, num_parts), F(ShrinkArgs, max_rank), F(ShrinkArgs, in_features), F(ShrinkArgs, x_stride),
    F(ShrinkArgs, shrunk_stride),
    QUIRE_STRUCT(ProductArgs), F(ProductArgs, output), F(ProductArgs, x), F(ProductArgs, weight),
    F(ProductArgs, bias), F(ProductArgs, scales), F(ProductArgs, x_scales), F(ProductArgs, shrunk),
    F(ProductArgs, parts), F(ProductArgs, slots), F(ProductArgs, dtype),
    F(ProductArgs, stored), F(ProductArgs, output_dtype), F(ProductArgs, activation), F(ProductArgs, threads),
    F(ProductArgs, num_tokens), F(ProductArgs, out_features), F(ProductArgs, in_features), F(ProductArgs, x_stride),
    F(ProductArgs, output_stride), F(ProductArgs, grouping), F(ProductArgs, shrunk_stride), F(ProductArgs, num_slots),
    F(ProductArgs, num_parts),
    QUIRE_STRUCT(ChooseArgs), F(ChooseArgs, chosen), F(ChooseArgs, weights), F(ChooseArgs, outputs),
    F(ChooseArgs, correction), F(ChooseArgs, factors), F(ChooseArgs, dtype), F(ChooseArgs, threads),
    F(ChooseArgs, num_tokens), F(ChooseArgs, num_experts), F(ChooseArgs, num_chosen), F(ChooseArgs, output_stride),
    F(ChooseArgs, scoring), F(ChooseArgs, normalized), F(ChooseArgs, num_groups), F(ChooseArgs, num_chosen_groups),
    F(ChooseArgs, group_members), F(ChooseArgs, scale),
    QUIRE_STRUCT(ExpertsArgs), F(ExpertsArgs, output), F(ExpertsArgs, x), F(ExpertsArgs, x_scales),
    F(ExpertsArgs, chosen), F(ExpertsArgs, weights), F(ExpertsArgs, shared), F(ExpertsArgs, shared_gate),
    F(ExpertsArgs, inner), F(ExpertsArgs, down), F(ExpertsArgs, dtype), F(ExpertsArgs, threads),
    F(ExpertsArgs, num_tokens), F(ExpertsArgs, num_chosen), F(ExpertsArgs, num_experts), F(ExpertsArgs, x_stride),
    QUIRE_STRUCT(DrawArgs), F(DrawArgs, token_ids), F(DrawArgs, highest), F(DrawArgs, logits), F(DrawArgs, temperature),
    F(DrawArgs, top_k), F(DrawArgs, top_p), F(DrawArgs, min_score), F(DrawArgs, numbers), F(DrawArgs, threads),
    F(DrawArgs, rows), F(DrawArgs, vocab_size), F(DrawArgs, row_stride),
    QUIRE_STRUCT(Heads), F(Heads, source), F(Heads, target), F(Heads, count), F(Heads, source_token_stride),
    F(Heads, source_head_stride), F(Heads, target_token_stride), F(Heads, target_head_stride),
    QUIRE_STRUCT(CacheSlots), F(CacheSlots, kv_cache), F(CacheSlots, slot_mapping), F(CacheSlots, num_blocks),
    F(CacheSlots, block_stride), F(CacheSlots, value_offset), F(CacheSlots, block_size), F(CacheSlots, int8_line_bytes),
    QUIRE_STRUCT(RotaryArgs), F(RotaryArgs, query), F(RotaryArgs, key), F(RotaryArgs, value), F(RotaryArgs, cache),
    F(RotaryArgs, positions), F(RotaryArgs, cos_sin), F(RotaryArgs, max_position), F(RotaryArgs, dtype),
    F(RotaryArgs, threads), F(RotaryArgs, num_tokens), F(RotaryArgs, head_dim),
    QUIRE_STRUCT(StatePages), F(StatePages, pages), F(StatePages, tables), F(StatePages, query_start_loc),
    F(StatePages, seq_lens), F(StatePages, checkpoints), F(StatePages, checkpoint_tables), F(StatePages, num_kept),
    F(StatePages, num_rows), F(StatePages, num_blocks), F(StatePages, block_stride), F(StatePages, table_stride),
    F(StatePages, table_width), F(StatePages, checkpoint_stride), F(StatePages, num_checkpoints),
    F(StatePages, unit_bytes), F(StatePages, units_per_block), F(StatePages, first_unit),
    QUIRE_STRUCT(ConvArgs), F(ConvArgs, output), F(ConvArgs, x), F(ConvArgs, weight), F(ConvArgs, bias),
    F(ConvArgs, before), F(ConvArgs, after), F(ConvArgs, pages), F(ConvArgs, dtype), F(ConvArgs, weight_dtype),
    F(ConvArgs, threads), F(ConvArgs, num_tokens), F(ConvArgs, channels), F(ConvArgs, taps), F(ConvArgs, x_stride),
    F(ConvArgs, before_stride), F(ConvArgs, after_stride), F(ConvArgs, weight_channel_stride),
    F(ConvArgs, weight_tap_stride), F(ConvArgs, is_silu),
    QUIRE_STRUCT(RecurrenceArgs), F(RecurrenceArgs, output), F(RecurrenceArgs, query), F(RecurrenceArgs, key),
    F(RecurrenceArgs, value), F(RecurrenceArgs, decay), F(RecurrenceArgs, beta), F(RecurrenceArgs, skip),
    F(RecurrenceArgs, pages), F(RecurrenceArgs, dtype), F(RecurrenceArgs, threads), F(RecurrenceArgs, num_tokens),
    F(RecurrenceArgs, num_key_heads), F(RecurrenceArgs, num_heads), F(RecurrenceArgs, key_dim),
    F(RecurrenceArgs, value_dim), F(RecurrenceArgs, query_token_stride), F(RecurrenceArgs, query_head_stride),
    F(RecurrenceArgs, key_token_stride), F(RecurrenceArgs, key_head_stride), F(RecurrenceArgs, value_token_stride),
    F(RecurrenceArgs, value_head_stride), F(RecurrenceArgs, decay_token_stride), F(RecurrenceArgs, decay_head_stride),
    F(RecurrenceArgs, beta_token_stride), F(RecurrenceArgs, is_per_channel), F(RecurrenceArgs, is_delta),
    F(RecurrenceArgs, is_unit_norm), F(RecurrenceArgs, scale),
    QUIRE_STRUCT(ScanArgs), F(ScanArgs, output), F(ScanArgs, x), F(ScanArgs, dt), F(ScanArgs, a), F(ScanArgs, b),
    F(ScanArgs, c), F(ScanArgs, skip), F(ScanArgs, pages), F(ScanArgs, dtype), F(ScanArgs, threads),
    F(ScanArgs, num_tokens), F(ScanArgs, channels), F(ScanArgs, num_states), F(ScanArgs, x_stride),
    F(ScanArgs, dt_stride), F(ScanArgs, b_stride), F(ScanArgs, c_stride),
    QUIRE_STRUCT(GatesArgs), F(GatesArgs, decay), F(GatesArgs, beta), F(GatesArgs, a), F(GatesArgs, b),
    F(GatesArgs, a_log), F(GatesArgs, dt_bias), F(GatesArgs, dtype), F(GatesArgs, threads), F(GatesArgs, num_tokens),
    F(GatesArgs, num_heads), F(GatesArgs, head_channels), F(GatesArgs, a_stride), F(GatesArgs, b_stride),
    F(GatesArgs, dt_min), F(GatesArgs, dt_max), F(GatesArgs, beta_scale),
    QUIRE_STRUCT(GatedNormArgs), F(GatedNormArgs, output), F(GatedNormArgs, x), F(GatedNormArgs, gate),
    F(GatedNormArgs, weight), F(GatedNormArgs, dtype), F(GatedNormArgs, weight_dtype), F(GatedNormArgs, threads),
    F(GatedNormArgs, num_tokens), F(GatedNormArgs, hidden), F(GatedNormArgs, group_size), F(GatedNormArgs, weight_size),
    F(GatedNormArgs, x_stride), F(GatedNormArgs, gate_stride), F(GatedNormArgs, is_norm_first),
    F(GatedNormArgs, is_sigmoid), F(GatedNormArgs, eps),
    QUIRE_STRUCT(SharedGroup), F(SharedGroup, memory), F(SharedGroup, rank), F(SharedGroup, size),
    F(SharedGroup, slot_bytes),
    QUIRE_STRUCT(AllReduceArgs), F(AllReduceArgs, x), F(AllReduceArgs, group), F(AllReduceArgs, dtype),
    F(AllReduceArgs, threads), F(AllReduceArgs, rows), F(AllReduceArgs, n),
    QUIRE_STRUCT(AllGatherArgs), F(AllGatherArgs, output), F(AllGatherArgs, x), F(AllGatherArgs, group),
    F(AllGatherArgs, threads), F(AllGatherArgs, rows), F(AllGatherArgs, part), F(AllGatherArgs, total),
    F(AllGatherArgs, x_stride),
    QUIRE_STRUCT(RecordedOperation), F(RecordedOperation, operation), F(RecordedOperation, args),
    F(RecordedOperation, lines_per_token),
    QUIRE_STRUCT(RunArgs), F(RunArgs, operations), F(RunArgs, num_operations), F(RunArgs, threads),
    F(RunArgs, num_tokens), F(RunArgs, num_rows),
    QUIRE_CONSTANT(kFloat32), QUIRE_CONSTANT(kBFloat16), QUIRE_CONSTANT(kFloat16), QUIRE_CONSTANT(kPlain),
    QUIRE_CONSTANT(kInt8), QUIRE_CONSTANT(kBf12), QUIRE_CONSTANT(kQ4K),
    QUIRE_CONSTANT(kQ5K), QUIRE_CONSTANT(kQ6K), QUIRE_CONSTANT(kQ80), QUIRE_CONSTANT(kQ40), QUIRE_CONSTANT(kIq4Xs),
    QUIRE_CONSTANT(kQ41), QUIRE_CONSTANT(kQ50), QUIRE_CONSTANT(kQ51), QUIRE_CONSTANT(kIq4Nl),
    QUIRE_CONSTANT(kScaledInt4), QUIRE_CONSTANT(kScaledInt8), QUIRE_CONSTANT(kScaledFp8),
    QUIRE_CONSTANT(kMxfp4), QUIRE_CONSTANT(kNvfp4), QUIRE_CONSTANT(kTable4),
    QUIRE_CONSTANT(kSoftmax), QUIRE_CONSTANT(kSigmoid), QUIRE_CONSTANT(kPanel),
    QUIRE_CONSTANT(kWordsOfBlock), QUIRE_CONSTANT(Bf12Group::kNumbers), QUIRE_CONSTANT(sizeof(Bf12Group)),
    QUIRE_CONSTANT(sizeof(Bf12Head)), QUIRE_CONSTANT(sizeof(Bf12Exception)), QUIRE_CONSTANT(kMaxRanks),
    // clang-format on
    {nullptr, 0, 0},
};

}  // namespace
}  // namespace quire

const quire::Layout* quire_layout() { return quire::kLayout; }

int64_t quire_group_bytes(int64_t size, int64_t slot_bytes) { return quire::group_bytes(size, slot_bytes); }
