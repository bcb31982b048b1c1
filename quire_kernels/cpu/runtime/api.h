// The C interface of the library: quire_kernels/cpu/library.py loads and checks it, and bindings.py calls it.
//
// Every operation takes a context and one struct. All fields have 8 bytes, so no struct has padding. Words as in
// quire_kernels/ops.py: T tokens, R rows, H heads, D head size, B block size. Strides count elements, and the last
// dimension of every tensor is contiguous. Nothing allocated here outlives a call, except the context.
#pragma once

#include <cstdint>

#define QUIRE_API extern "C" __attribute__((visibility("default")))

namespace quire {

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The result of a call. Index tensors are checked before anything is written.
enum Status : int32_t {
  kOk = 0,
  kBadBlock = 1,     // a block id is not in the pool
  kBadLengths = 2,   // query_start_loc and seq_lens contradict each other or the shapes
  kBadSlot = 3,      // a slot is not in the pool
  kBadPosition = 4,  // a position is not in the table of cosines and sines
  kNoMemory = 5,
  kBadId = 6,  // an id is not the index of a row
  kBadSlotOfAdapter = 7,
  kBadExpert = 8,      // a number is not an expert's
  kBadCheckpoint = 9,  // a number is not that of a line of checkpoint_tables
};

// The OpenMP runtime that torch has loaded, as the addresses of three of its functions.
struct OpenMp {
  void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);  // GOMP_parallel
  int (*thread_num)();                                                                          // omp_get_thread_num
  int (*num_threads)();                                                                         // omp_get_num_threads
};

struct AttentionArgs {
  void* output;                    // [T, Hq, D] contiguous
  const void* query;               // [T, Hq, D]
  const void* kv_cache;            // [2, num_blocks, Hkv, B, D], 1 for 2 of latents, int8 lines for D
  const int32_t* block_tables;     // [R, table_width]
  const int32_t* query_start_loc;  // [R + 1]
  const int32_t* seq_lens;         // [R]
  const float* alibi_slopes;       // [Hq] or null
  const float* sinks;              // [Hq] or null
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t num_blocks;
  int64_t block_stride;  // elements from a block to the next one, at least Hkv * B * D; blocks are contiguous
  int64_t value_offset;  // elements from a key to its value; 0 of latents, which are both
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t table_stride;
  int64_t table_width;
  int64_t int8_line_bytes;  // bytes of a line of int8 values and their scale in a pool of int8; else 0
  int64_t sliding_window;   // tokens that one sees, itself included; the longest context where there is no window
  double scale;
  double soft_cap;  // 0 where scores are not capped
};

// Heads of tokens. Strides are elements from a token and from a head to the next one.
struct TextHeads {
  const void* at;
  int64_t token_stride;
  int64_t head_stride;
};

// Attention in both directions within texts that lie one after the other.
struct TextAttentionArgs {
  void* output;            // [T, Hq, D] contiguous
  TextHeads query;         // [T, Hq, D]
  TextHeads key;           // [T, Hkv, D]
  TextHeads value;         // [T, Hkv, D]
  const int32_t* lengths;  // [num_texts], of T tokens in all
  const float* bias;       // [Hq, bias_stride], in the middle of a line the bias of a token's own score; or null
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_texts;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t bias_stride;
  int64_t window;  // the largest distance at which tokens see each other
  double scale;
};

struct NormArgs {
  void* output;        // [rows, hidden]
  const void* x;       // [rows / x_group, x_group, hidden]
  void* residual;      // [rows, hidden] to add x to, in place; null for a plain norm
  const void* weight;  // [hidden]; null for 1
  const void* bias;    // [hidden]; null for 0
  int64_t dtype;
  int64_t threads;
  int64_t rows;
  int64_t hidden;
  int64_t x_stride;
  int64_t x_group;         // rows of x that lie x_stride apart: the heads of a token
  int64_t x_group_stride;  // from the first of them to the first of the next
  int64_t residual_stride;
  int64_t output_stride;
  double eps;
  double offset;  // added to the weight of an RMS norm
};

struct SiluArgs {
  void* output;   // [rows, n] contiguous
  const void* x;  // [rows, 2n]
  int64_t dtype;
  int64_t threads;
  int64_t rows;
  int64_t n;
  int64_t x_stride;
};

// output = x * y
struct MultiplyArgs {
  void* output;   // [rows, n] contiguous
  const void* x;  // [rows, n]
  const void* y;  // [rows, n]; y_stride 0 for [n]
  int64_t dtype;
  int64_t threads;
  int64_t rows;
  int64_t n;
  int64_t x_stride;
  int64_t y_stride;
};

// The function that a product applies to its sums before it rounds them.
enum Activation : int64_t {
  kIdentity = 0,
  kRelu = 1,
  kSilu = 2,
  kGeluTanh = 3,
  kGelu = 4,
  // For weights that were packed as gated: activation(gate) * up.
  kSiluAndMul = 5,
  kGeluTanhAndMul = 6,
  kGeluAndMul = 7,
  kClampedSwiglu = 8,  // GPT-OSS's: (clamped up + 1) * quick GELU of the clamped gate
};

// The groups of inputs that have a scale, if codes and scales of a weight are separate (coded.h); else all zeros.
struct Grouping {
  int64_t pieces;       // of 32 inputs in a group; the last group of a row may have fewer
  int64_t scale_dtype;  // a Dtype
  int64_t has_zeros;    // whether each group has a code that stands for 0; else it is the one in the middle
};

// Packs the rows of a weight into panels of kPanel columns (pack_weight.cpp).
struct PackArgs {
  void* packed;        // [panels, in_features padded to whole blocks, kPanel]
  const void* weight;  // [out_features, in_features]; gated: the gates' rows, then as many rows of ups
  int64_t threads;
  int64_t out_features;
  int64_t in_bytes;   // of a row
  int64_t row_bytes;  // from one row to the next
  int64_t gated;
  int64_t word_bytes;    // bytes of the weight that a word of a token is multiplied with: 4, 2 or 1
  int64_t stored;        // StoredAs, if the weight is coded (coded.h); its rows are rows of the file
  const void* scales;    // [out_features, groups], if they are separate from the codes
  const uint8_t* zeros;  // [out_features, groups] codes, or null
  const void* parts;     // [out_features, parts of a row], scales of a byte for the parts of MXFP4 and NVFP4
  const float* table;    // [16], the numbers of codes of kTable4
  Grouping grouping;
};

// Writes rows of a coded weight as bfloat16.
struct LookUpArgs {
  void* output;      // [num_ids, in_features]
  const void* rows;  // as in the file
  const int64_t* ids;
  int64_t threads;
  int64_t num_ids;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t row_stride;  // bytes from one row to the next
  int64_t stored;
};

// Compresses packed weights of bfloat16 to 12 bits a number (bf12.h).
struct CompressArgs {
  void* compressed;         // [panels] compressed ones, then room for max_exceptions
  const void* packed;       // [panels, numbers]
  int64_t* num_exceptions;  // of the weight; where it exceeds max_exceptions, `compressed` is not filled
  int64_t threads;
  int64_t panels;
  int64_t numbers;  // of a panel
  int64_t max_exceptions;
};

// How a packed weight is stored. An int8 or coded weight is multiplied with int8 tokens where these have scales.
enum StoredAs : int64_t {
  kPlain = 0,  // numbers of the dtype
  kInt8 = 1,   // int8 values, and a scale for each output
  kBf12 = 2,   // bfloat16 numbers in 12 bits (bf12.h)
  // As a GGUF file has them (coded.h)
  kQ4K = 3,
  kQ5K = 4,
  kQ6K = 5,
  kQ80 = 6,
  kQ40 = 7,
  kIq4Xs = 8,
  kQ41 = 9,
  kQ50 = 10,
  kQ51 = 11,
  kIq4Nl = 12,
  // Codes, and scales of groups of any size
  kScaledInt4 = 13,
  kScaledInt8 = 14,
  kScaledFp8 = 15,
  kMxfp4 = 16,
  kNvfp4 = 17,
  kTable4 = 18,
};

inline constexpr bool is_coded(int64_t stored) { return stored >= kQ4K; }

// Rounds lines of numbers to int8 values, each line with its scale, as quire_kernels/int8.py does.
struct QuantizeArgs {
  int8_t* values;  // [rows, value_stride], zeros after the values of a line
  float* scales;   // [rows]; NaN for a line that is not finite
  const void* x;   // [rows, n]
  int64_t dtype;
  int64_t threads;
  int64_t rows;
  int64_t n;
  int64_t x_stride;
  int64_t value_stride;
};

// The product that an adapter adds to some columns of another product: B (scale A x).
struct LowRankPart {
  const void* a;  // [rank / 4, blocks, 4, cache line] (low_rank.h)
  const void* b;  // [tiles, words of rank, 16]
  double scale;
  int64_t rank;        // a multiple of 4; 0 where there is none
  int64_t first_tile;  // of the weight, of 16 columns
  int64_t last_tile;   // one after it
  int64_t column;      // of scale A x in a line of `shrunk`
};

// shrunk = scale A x of each token's adapter, of the dtype that products read: bfloat16, else float.
struct ShrinkArgs {
  void* shrunk;              // [T, num_parts * max_rank]
  const void* x;             // [T, in_features]
  const LowRankPart* parts;  // [num_slots, num_parts]; slot 0 is for tokens without an adapter
  const int64_t* slots;      // [T]
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_slots;
  int64_t num_parts;
  int64_t max_rank;
  int64_t in_features;  // whole blocks of lines: the caller pads x with zeros
  int64_t x_stride;
  int64_t shrunk_stride;
};

// output = activation(x W^T + bias), summed in float or exactly. An int8 value is multiplied by the scale of its line.
struct ProductArgs {
  void* output;           // [T, out_features], half as many where it is gated
  const void* x;          // [T, in_features]
  const void* weight;     // packed
  const void* bias;       // [out_features] numbers, or null
  const float* scales;    // [out_features] of the weight, or null
  const float* x_scales;  // [T], or null
  // The low-rank addends, as in ShrinkArgs; null if there are none.
  const void* shrunk;
  const LowRankPart* parts;
  const int64_t* slots;
  int64_t dtype;   // of the numbers
  int64_t stored;  // a StoredAs
  int64_t output_dtype;
  int64_t activation;
  int64_t threads;
  int64_t num_tokens;
  int64_t out_features;
  int64_t in_features;  // whole blocks of lines: the caller pads x with zeros
  int64_t x_stride;
  int64_t output_stride;
  Grouping grouping;  // of a coded weight
  int64_t shrunk_stride;
  int64_t num_slots;
  int64_t num_parts;
};

// How a router's outputs become scores.
enum Scoring : int64_t { kSoftmax = 0, kSigmoid = 1 };

// A router's choice of experts for each token: the experts with the highest scores, or sums of score and correction,
// the best first. Where there are several groups of neighbours, groups are chosen first, by the sum of their best
// members.
struct ChooseArgs {
  int64_t* chosen;          // [T, num_chosen]
  float* weights;           // [T, num_chosen]
  const void* outputs;      // [T, num_experts], of the router
  const float* correction;  // [num_experts] or null
  const float* factors;     // [num_experts] or null, of the weights of an expert
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_chosen;
  int64_t output_stride;
  int64_t scoring;     // a Scoring
  int64_t normalized;  // whether a token's weights are divided by their sum
  int64_t num_groups;
  int64_t num_chosen_groups;
  int64_t group_members;  // that count for a group
  double scale;           // of the weights
};

// The experts of a layer, each two products. The output is the sum of weight * down(inner(x)) over a token's experts,
// in float and in the order of the choice; outputs of products have the dtype. Only chosen experts are read.
struct ExpertsArgs {
  void* output;             // [T, hidden] contiguous
  const void* x;            // [T, in_features], as `inner` reads it
  const float* x_scales;    // [T], or null: then inner features are not rounded to int8 either
  const int64_t* chosen;    // [T, num_chosen]
  const float* weights;     // [T, num_chosen]
  const void* shared;       // [T, hidden] contiguous, added last, or null
  const void* shared_gate;  // [T]: its weight is the sigmoid; null for 1
  // [num_experts]; tokens, outputs and their strides are not read. All have one shape and dtype.
  const ProductArgs* inner;
  const ProductArgs* down;
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t num_experts;
  int64_t x_stride;
};

// Draws a token for each row.
struct DrawArgs {
  int64_t* token_ids;   // [rows]
  float* highest;       // [rows]: the highest logit. NaN where one is NaN or infinity; then, as for -infinity, token 0
  const float* logits;  // [rows, vocab_size]
  const float* temperature;  // [rows]; 0 takes the likeliest token, of several the first
  const int64_t* top_k;      // [rows]; 0 for none
  const double* top_p;       // [rows]
  const float* min_score;    // [rows]: the lowest difference to the highest logit, over temperature, that is kept
  const double* numbers;     // [rows], from 0 to below 1: which share of the sum over tokens passes at the drawn one
  int64_t threads;
  int64_t rows;
  int64_t vocab_size;
  int64_t row_stride;
};

// Heads of T tokens, read from one place and written to another, which may be the same.
struct Heads {
  const void* source;
  void* target;
  int64_t count;
  int64_t source_token_stride;
  int64_t source_head_stride;
  int64_t target_token_stride;
  int64_t target_head_stride;
};

// The destinations of the keys and values of new tokens.
struct CacheSlots {
  void* kv_cache;               // as in AttentionArgs
  const int64_t* slot_mapping;  // [T]
  int64_t num_blocks;
  int64_t block_stride;
  int64_t value_offset;
  int64_t block_size;
  int64_t int8_line_bytes;
};

struct RotaryArgs {
  Heads query;
  Heads key;         // its target is used where there is no cache, and for rotated keys that are rounded to int8
  Heads value;       // only its source is used, and only where there is a cache
  CacheSlots cache;  // kv_cache null: none
  const int64_t* positions;  // [T]; null: nothing is rotated, keys and values only go to the cache
  const float* cos_sin;      // [max_position, D]: cosines, then sines
  int64_t max_position;
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t head_dim;
};

// Where the states of layers are that keep one of a fixed size for each sequence: quire_kernels/states.py has the
// rules.
struct StatePages {
  void* pages;                       // [num_blocks, bytes of a block]
  const int32_t* tables;             // [R, table_width]
  const int32_t* query_start_loc;    // [R + 1]
  const int32_t* seq_lens;           // [R]
  const int32_t* checkpoints;        // [T], -1 or a line of checkpoint_tables
  const int32_t* checkpoint_tables;  // [num_checkpoints, table_width]
  const int32_t* num_kept;           // [R] or null
  int64_t num_rows;
  int64_t num_blocks;
  int64_t block_stride;  // bytes
  int64_t table_stride;
  int64_t table_width;
  int64_t checkpoint_stride;
  int64_t num_checkpoints;
  int64_t unit_bytes;
  int64_t units_per_block;
  int64_t first_unit;  // of the layer
};

// output = activation(sum over taps of weight * (x * before) + bias) * after
struct ConvArgs {
  void* output;        // [T, channels] contiguous
  const void* x;       // [T, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels] or null
  const void* before;  // [T, channels] or null
  const void* after;   // [T, channels] or null
  StatePages pages;
  int64_t dtype;
  int64_t weight_dtype;  // of weight and bias: dtype or kFloat32
  int64_t threads;
  int64_t num_tokens;
  int64_t channels;
  int64_t taps;
  int64_t x_stride;
  int64_t before_stride;
  int64_t after_stride;
  int64_t weight_channel_stride;
  int64_t weight_tap_stride;
  int64_t is_silu;
};

// For each token: S = decay * S; S += key u^T, where u = beta * (value - S^T key) or beta * value; output = S^T query.
struct RecurrenceArgs {
  void* output;        // [T, num_heads, value_dim] contiguous
  const void* query;   // [T, num_key_heads, key_dim]
  const void* key;     // [T, num_key_heads, key_dim]
  const void* value;   // [T, num_heads, value_dim]
  const float* decay;  // [T, num_heads], or [T, num_heads, key_dim]
  const float* beta;   // [T, num_heads]; null for 1
  const float* skip;   // [num_heads]: skip * value is added to the output; or null
  StatePages pages;
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t decay_token_stride;
  int64_t decay_head_stride;
  int64_t beta_token_stride;
  int64_t is_per_channel;  // decay
  int64_t is_delta;
  int64_t is_unit_norm;  // of queries and keys
  double scale;          // of queries
};

// For each token: S[n] = e^(dt * a[n]) * S[n] + dt * x * b[n]; output = sum of S[n] * c[n], + skip * x.
struct ScanArgs {
  void* output;       // [T, channels] contiguous
  const void* x;      // [T, channels]
  const float* dt;    // [T, channels]
  const float* a;     // [channels, num_states] contiguous
  const void* b;      // [T, num_states]
  const void* c;      // [T, num_states]
  const float* skip;  // [channels] or null
  StatePages pages;
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t channels;
  int64_t num_states;
  int64_t x_stride;
  int64_t dt_stride;
  int64_t b_stride;
  int64_t c_stride;
};

// step = softplus(a + dt_bias), from dt_min to dt_max; decay = e^(-e^a_log * step); beta = beta_scale * sigmoid(b), or
// step.
struct GatesArgs {
  float* decay;          // [T, num_heads, head_channels] contiguous
  float* beta;           // [T, num_heads] contiguous
  const void* a;         // [T, num_heads, head_channels], a line contiguous
  const void* b;         // [T, num_heads]; null: beta is step
  const float* a_log;    // [num_heads]
  const float* dt_bias;  // [num_heads, head_channels]
  int64_t dtype;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_channels;
  int64_t a_stride;
  int64_t b_stride;
  double dt_min;
  double dt_max;
  double beta_scale;
};

// output = rms_norm(x) * weight * activation(gate), or rms_norm(x * activation(gate)) * weight, over groups of x.
struct GatedNormArgs {
  void* output;        // [T, hidden] contiguous
  const void* x;       // [T, hidden]
  const void* gate;    // [T, hidden]
  const void* weight;  // [weight_size], of each weight_size numbers; null: x * activation(gate)
  int64_t dtype;
  int64_t weight_dtype;  // dtype or kFloat32
  int64_t threads;
  int64_t num_tokens;
  int64_t hidden;
  int64_t group_size;
  int64_t weight_size;  // group_size or hidden
  int64_t x_stride;
  int64_t gate_stride;
  int64_t is_norm_first;
  int64_t is_sigmoid;  // the activation; else silu
  double eps;
};

// One of the processes of a machine that have mapped the same memory (exchange.h).
struct SharedGroup {
  void* memory;  // quire_group_bytes, on a cache line, all zeros at first
  int64_t rank;
  int64_t size;        // at most kMaxRanks
  int64_t slot_bytes;  // whole cache lines; the same for all
};

inline constexpr int64_t kMaxRanks = 64;

// x becomes the sum over all processes, in float and in the order of ranks, so it is bitwise the same for all.
struct AllReduceArgs {
  void* x;  // [rows, n] contiguous
  SharedGroup group;
  int64_t dtype;
  int64_t threads;
  int64_t rows;
  int64_t n;
};

// The parts of all processes side by side, in the order of ranks. Widths are bytes: elements of any type are copied.
struct AllGatherArgs {
  void* output;   // [rows, total] contiguous
  const void* x;  // [rows, width of this process's part]
  SharedGroup group;
  int64_t threads;
  int64_t rows;
  int64_t part;  // width of each part; the last one ends at total, and there may be ranks that have none
  int64_t total;
  int64_t x_stride;
};

enum Operation : int64_t {
  kPagedAttention = 0,
  kRmsNorm = 1,
  kLayerNorm = 2,
  kGate = 3,
  kRotary = 4,
  kProduct = 5,
  kQuantize = 6,
  kAllReduce = 7,
  kAllGather = 8,
  kShrink = 9,
  kChoose = 10,
  kExperts = 11,
  kMultiply = 12,
  kCausalConv = 13,
  kLinearRecurrence = 14,
  kSelectiveScan = 15,
  kGates = 16,
  kGatedNorm = 17,
  kTextAttention = 18,
};

// One operation of a recording. Its tensors have room for the largest number of tokens that it will run with.
struct RecordedOperation {
  int64_t operation;        // an Operation
  const void* args;         // as for the operation by itself; its numbers of tokens, lines and rows are not read
  int64_t lines_per_token;  // 1, or the heads of a norm of each head
};

// Operations one after the other, in one parallel region.
struct RunArgs {
  const RecordedOperation* operations;
  int64_t num_operations;
  int64_t threads;
  int64_t num_tokens;
  int64_t num_rows;
};

// An entry that library.py checks: a field of a struct, a whole struct, or a constant.
struct Layout {
  const char* name;  // "Struct.field", "Struct" or "kConstant"; null after the last
  int64_t value;     // offset of a field, size of a struct, value of a constant
  int64_t kind;      // of a field: 'p' pointer, 'q' whole number, 'd' double, 's' struct; else 0
};

struct Context;

}  // namespace quire

// The instruction sets that were built and that this processor has, best first, separated by spaces.
QUIRE_API const char* quire_isas();
// A context for one of them, or null where it is not among them. quire_close frees it.
QUIRE_API quire::Context* quire_open(const char* isa, const quire::OpenMp* openmp);
QUIRE_API void quire_close(quire::Context* context);
// All structs, fields and constants that callers use: callers recognize a library that was built from another api.h.
QUIRE_API const quire::Layout* quire_layout();
// Bytes of memory that a group of `size` processes takes.
QUIRE_API int64_t quire_group_bytes(int64_t size, int64_t slot_bytes);

QUIRE_API int32_t quire_paged_attention(const quire::Context* context, const quire::AttentionArgs* args);
QUIRE_API int32_t quire_text_attention(const quire::Context* context, const quire::TextAttentionArgs* args);
QUIRE_API int32_t quire_rms_norm(const quire::Context* context, const quire::NormArgs* args);
QUIRE_API int32_t quire_layer_norm(const quire::Context* context, const quire::NormArgs* args);
QUIRE_API int32_t quire_silu_and_mul(const quire::Context* context, const quire::SiluArgs* args);
QUIRE_API int32_t quire_multiply(const quire::Context* context, const quire::MultiplyArgs* args);
// rotary, reshape_and_cache, or both at once.
QUIRE_API int32_t quire_rotary(const quire::Context* context, const quire::RotaryArgs* args);
// Bytes of a panel of a coded weight.
QUIRE_API int64_t quire_coded_panel_bytes(int64_t stored, int64_t in_features, const quire::Grouping* grouping);
QUIRE_API int32_t quire_pack_weight(const quire::Context* context, const quire::PackArgs* args);
QUIRE_API int32_t quire_look_up(const quire::Context* context, const quire::LookUpArgs* args);
QUIRE_API int32_t quire_compress_weight(const quire::Context* context, const quire::CompressArgs* args);
QUIRE_API int32_t quire_quantize(const quire::Context* context, const quire::QuantizeArgs* args);
QUIRE_API int32_t quire_draw(const quire::Context* context, const quire::DrawArgs* args);
QUIRE_API int32_t quire_shrink(const quire::Context* context, const quire::ShrinkArgs* args);
QUIRE_API int32_t quire_product(const quire::Context* context, const quire::ProductArgs* args);
QUIRE_API int32_t quire_choose(const quire::Context* context, const quire::ChooseArgs* args);
QUIRE_API int32_t quire_experts(const quire::Context* context, const quire::ExpertsArgs* args);
QUIRE_API int32_t quire_causal_conv(const quire::Context* context, const quire::ConvArgs* args);
QUIRE_API int32_t quire_linear_recurrence(const quire::Context* context, const quire::RecurrenceArgs* args);
QUIRE_API int32_t quire_selective_scan(const quire::Context* context, const quire::ScanArgs* args);
QUIRE_API int32_t quire_gates(const quire::Context* context, const quire::GatesArgs* args);
QUIRE_API int32_t quire_gated_norm(const quire::Context* context, const quire::GatedNormArgs* args);
// Return when all processes of the group have called them.
QUIRE_API int32_t quire_all_reduce(const quire::Context* context, const quire::AllReduceArgs* args);
QUIRE_API int32_t quire_all_gather(const quire::Context* context, const quire::AllGatherArgs* args);
QUIRE_API int32_t quire_run(const quire::Context* context, const quire::RunArgs* args);
