// The kernels that every instruction set provides. Their files, which CMakeLists.txt lists, are compiled once for each,
// in a namespace of its name, QUIRE_ISA. They use nothing of the standard library that the linker could share between
// them: a processor without AVX-512 must never run code that was compiled for AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/api.h"

namespace quire {

// Tokens of a context that one unit of decoding reads. A row's result is always combined from units of this length, so
// it depends neither on the other rows of the batch nor on the number of threads.
inline constexpr int64_t kChunk = 256;
// Rows that a unit decodes, at most: its scratch memory grows with them.
inline constexpr int32_t kMaxDecoded = 8;
// Query rows (tokens times heads that share keys) that prefill computes at once, and keys that it reads at once.
inline constexpr int64_t kQueryRows = 128;
inline constexpr int64_t kKeyTile = 64;
// Rows of scratch memory are padded to this many elements, enough for any vector and matrix tile.
inline constexpr int64_t kPad = 32;

// Columns of a packed weight that are stored together, and words of a token that a block of them is multiplied with. A
// word has 32 bits: a float, two 16-bit numbers, or four int8 values.
inline constexpr int64_t kPanel = 32;
inline constexpr int64_t kWordsOfBlock = 16;

// A piece of attention that one thread computes.
struct Unit {
  int32_t row;
  int32_t num_rows;    // decode: rows that are one sequence, from `row` on; their chunks are the same
  int32_t head_begin;  // of the key/value heads
  int32_t head_end;
  int32_t begin;  // decode: first and last token of the context; prefill: first and last new token of the row
  int32_t end;
  // Partial results of a decode over several chunks, [num_rows, Hq], for each query head a state: [maximum, sum, D
  // weighted sums]. Null where the unit covers its whole rows and writes the output.
  float* states;
};

// Queries `begin` to `end` - 1 of one head of a text, which one thread computes.
struct TextUnit {
  int32_t first_token;  // of the text, in the batch
  int32_t length;       // of the text
  int32_t head;
  int32_t begin;
  int32_t end;
};

// Tokens that have adapters, slot by slot, in their order. A slot has tokens `begin` to `end` - 1.
struct TokensOfSlot {
  int64_t slot, begin, end;
};
struct TokensBySlot {
  const int64_t* tokens;
  const TokensOfSlot* slots;
  int64_t num_slots;
  // The next operation, whose data the product prefetches; null if it is not known.
  const ShrinkArgs* next;
};

// A piece of `shrink` that one thread computes: some lines of an A, by tokens `begin` to `end` - 1 of TokensBySlot.
struct ShrinkUnit {
  const LowRankPart* part;
  int64_t line, begin, end;
};

// The new tokens of a sequence whose state an operation moves on (states/pages.h): one row of the batch or several.
struct StateRow {
  int32_t row;  // its line in the tables
  int32_t first_token;
  int32_t num_tokens;
  int32_t num_kept;  // tokens that change the pages: the first ones
  bool is_new;       // the state before the first token is zero
};

// Unnamed, so that each file has its own copy: see above.
namespace {

inline int64_t padded(int64_t size, int64_t multiple = kPad) { return (size + multiple - 1) / multiple * multiple; }

inline bool is_gated(const ProductArgs& args) { return args.activation >= kSiluAndMul; }

// Panels of a product: a gated panel has 16 columns of gates, then the 16 columns that they are multiplied with.
inline int64_t num_panels(int64_t out_features, bool gated) {
  return gated ? padded(out_features / 2, kPanel / 2) / (kPanel / 2) : padded(out_features, kPanel) / kPanel;
}

inline int64_t num_panels(const ProductArgs& args) { return num_panels(args.out_features, is_gated(args)); }

// The units of a product: panel after panel for the first tokens, then for the next ones, so that the lines of tokens
// stay in the third cache.
constexpr int64_t kMaxTokens = 512;
inline int64_t num_units(const ProductArgs& args) {
  return (args.num_tokens + kMaxTokens - 1) / kMaxTokens * num_panels(args);
}

// The size of a unit of `shrink`: lines of an adapter's A, and tokens that have it.
inline constexpr int64_t kLinesOfUnit = 16, kTokensOfUnit = 8;

inline int64_t state_size(const AttentionArgs& args) { return args.head_dim + 2; }

// New tokens of a row that prefill computes at once.
inline int64_t query_tokens(const AttentionArgs& args) {
  const int64_t tokens = kQueryRows * args.num_kv_heads / args.num_heads;
  return tokens < 1 ? 1 : tokens;
}

// Divides one block of memory into pieces, each on cache lines of its own. Over null it only counts bytes.
class Arena {
 public:
  explicit Arena(std::byte* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    std::byte* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += padded(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }

  int64_t used() const { return used_; }

 private:
  std::byte* memory_;
  int64_t used_ = 0;
};

}  // namespace

// The element types in the order of Dtype.
template <class Function>
struct ByDtype {
  Function of[3];
};

struct IsaKernels {
  ByDtype<int64_t (*)(const AttentionArgs&, int64_t num_rows)> decode_scratch;  // bytes of a unit's
  ByDtype<int64_t (*)(const AttentionArgs&)> prefill_scratch;
  ByDtype<void (*)(const AttentionArgs&, const Unit&, std::byte* scratch)> decode;
  ByDtype<void (*)(const AttentionArgs&, const Unit&, std::byte* scratch)> prefill;
  // Output of the unit's rows and heads, from the states of all its chunks, [chunks, num_rows, Hq]. Overwrites the
  // states of the first chunk.
  ByDtype<void (*)(const AttentionArgs&, const Unit&, float* states, int64_t chunks)> merge;
  ByDtype<void (*)(const TextAttentionArgs&, const TextUnit* begin, const TextUnit* end, std::byte* scratch)>
      attend_texts;
  ByDtype<int64_t (*)(const TextAttentionArgs&)> texts_scratch;  // bytes
  // Lines begin to end of the operation.
  ByDtype<void (*)(const NormArgs&, int64_t begin, int64_t end)> rms_norm;
  ByDtype<void (*)(const NormArgs&, int64_t begin, int64_t end)> layer_norm;
  ByDtype<void (*)(const SiluArgs&, int64_t begin, int64_t end)> silu_and_mul;
  ByDtype<void (*)(const MultiplyArgs&, int64_t begin, int64_t end)> multiply;
  ByDtype<void (*)(const RotaryArgs&, int64_t begin, int64_t end)> rotary;
  ByDtype<void (*)(const QuantizeArgs&, int64_t begin, int64_t end)> quantize;
  ByDtype<void (*)(const ShrinkArgs&, const int64_t* tokens, const ShrinkUnit* begin, const ShrinkUnit* end)> shrink;
  // n elements of `count` parts, at most kMaxRanks, summed to `to`, which may be one of the parts.
  ByDtype<void (*)(void* to, const void* const* parts, int64_t count, int64_t n)> sum;
  // Units begin to end; `packed` holds the tokens where packed_bytes is not 0.
  void (*product)(const ProductArgs&, const TokensBySlot&, int64_t begin, int64_t end, std::byte* scratch,
                  const std::byte* packed);
  int64_t (*product_scratch)(const ProductArgs&);  // bytes
  // Packs blocks begin to end of all tokens in the order in which they are multiplied.
  void (*pack_tokens)(const ProductArgs&, int64_t begin, int64_t end, std::byte* packed);
  int64_t (*packed_bytes)(const ProductArgs&);  // 0: tokens are multiplied as they are
  // Tokens begin to end: sums of the outputs of their experts. The output of place i of all tokens' places is in row
  // rows[i] of `outputs`, [T * num_chosen, hidden]. `shared_weights` are [T], or null for 1.
  ByDtype<void (*)(const ExpertsArgs&, const void* outputs, const int64_t* rows, const float* shared_weights,
                   int64_t begin, int64_t end)>
      add_experts;
  // Units begin to end of rows times heads times spans of `groups` groups of columns.
  ByDtype<void (*)(const RecurrenceArgs&, const StateRow* rows, int64_t groups, int64_t begin, int64_t end,
                   std::byte* scratch)>
      recurrence;
  // Groups of channels begin to end, of all rows.
  ByDtype<void (*)(const ConvArgs&, const StateRow* rows, int64_t num_rows, int64_t begin, int64_t end,
                   std::byte* scratch)>
      conv;
  ByDtype<void (*)(const ScanArgs&, const StateRow* rows, int64_t num_rows, int64_t begin, int64_t end,
                   std::byte* scratch)>
      scan;
  // Tokens begin to end.
  ByDtype<void (*)(const GatesArgs&, int64_t begin, int64_t end)> gates;
  ByDtype<void (*)(const GatedNormArgs&, int64_t begin, int64_t end)> gated_norm;
  // Rows begin to end.
  void (*draw)(const DrawArgs&, int64_t begin, int64_t end, std::byte* scratch);
  int64_t (*draw_scratch)(const DrawArgs&);  // bytes
};

struct Context {
  IsaKernels kernels;
  OpenMp openmp;
};

}  // namespace quire
