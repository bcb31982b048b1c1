// The kernels of the instruction set that this file is compiled for, in one table.
#include "runtime/isa.h"

namespace quire::QUIRE_ISA {

extern const decltype(IsaKernels::decode_scratch) decode_scratch;
extern const decltype(IsaKernels::prefill_scratch) prefill_scratch;
extern const decltype(IsaKernels::decode) decode_kernels;
extern const decltype(IsaKernels::prefill) prefill_kernels;
extern const decltype(IsaKernels::merge) merge_kernels;
extern const decltype(IsaKernels::attend_texts) attend_texts_kernels;
extern const decltype(IsaKernels::texts_scratch) texts_scratch;
extern const decltype(IsaKernels::rms_norm) rms_norm_kernels;
extern const decltype(IsaKernels::layer_norm) layer_norm_kernels;
extern const decltype(IsaKernels::silu_and_mul) silu_and_mul_kernels;
extern const decltype(IsaKernels::multiply) multiply_kernels;
extern const decltype(IsaKernels::rotary) rotary_kernels;
extern const decltype(IsaKernels::quantize) quantize_kernels;
extern const decltype(IsaKernels::shrink) shrink_kernels;
extern const decltype(IsaKernels::sum) sum_kernels;
void product(const ProductArgs& args, const TokensBySlot& by_slot, int64_t begin, int64_t end, std::byte* scratch,
             const std::byte* packed);
int64_t product_scratch(const ProductArgs& args);
void pack_tokens(const ProductArgs& args, int64_t begin, int64_t end, std::byte* packed);
int64_t packed_bytes(const ProductArgs& args);
extern const decltype(IsaKernels::add_experts) add_experts_kernels;
extern const decltype(IsaKernels::recurrence) recurrence_kernels;
extern const decltype(IsaKernels::conv) conv_kernels;
extern const decltype(IsaKernels::scan) scan_kernels;
extern const decltype(IsaKernels::gates) gates_kernels;
extern const decltype(IsaKernels::gated_norm) gated_norm_kernels;
void draw(const DrawArgs& args, int64_t begin, int64_t end, std::byte* scratch);
int64_t draw_scratch(const DrawArgs& args);

IsaKernels kernels() {
  return {decode_scratch, prefill_scratch,  decode_kernels,     prefill_kernels,
          merge_kernels, attend_texts_kernels, texts_scratch,
          rms_norm_kernels, layer_norm_kernels, silu_and_mul_kernels,
          multiply_kernels, rotary_kernels, quantize_kernels, shrink_kernels,     sum_kernels,
          product,        product_scratch,  pack_tokens,        packed_bytes,
          add_experts_kernels, recurrence_kernels, conv_kernels, scan_kernels, gates_kernels, gated_norm_kernels, draw,
          draw_scratch};
}

}  // namespace quire::QUIRE_ISA
