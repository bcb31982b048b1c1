// Scratch memory of the kernels on states, in floats unless said otherwise.
#pragma once

#include "runtime/isa.h"
#include "states/pages.h"

namespace quire {
namespace {

// Tokens that a kernel converts to floats at once, and then computes. More are not nearer to the processor.
inline constexpr int64_t kTokensAtOnce = 16;

// One head's tokens as floats, and a tile for each group of columns.
struct RecurrenceScratch {
  float *query, *key, *decayed_key;  // [kTokensAtOnce, key_dim]
  float* values;                     // [kTokensAtOnce, columns]; outputs in the end
  float* rest;                       // [groups, key_dim, kColumns]
  int64_t stride;                    // of lines of query, key and decayed_key

  RecurrenceScratch(const RecurrenceArgs& args, int64_t groups, Arena& arena) : stride(padded(args.key_dim)) {
    query = arena.take<float>(kTokensAtOnce * stride);
    key = arena.take<float>(kTokensAtOnce * stride);
    decayed_key = arena.take<float>(kTokensAtOnce * stride);
    values = arena.take<float>(kTokensAtOnce * groups * kColumns);
    rest = arena.take<float>(groups * args.key_dim * kColumns);
  }
};

struct ConvScratch {
  float* weights;  // [taps, kColumns]
  float* lines;    // [taps - 1 + kTokensAtOnce, kColumns]: columns of before, and of the tokens
  float* rest;     // [taps - 1, kColumns]

  ConvScratch(const ConvArgs& args, Arena& arena)
      : weights(arena.take<float>(args.taps * kColumns)),
        lines(arena.take<float>((args.taps - 1 + kTokensAtOnce) * kColumns)),
        rest(arena.take<float>((args.taps - 1) * kColumns)) {}
};

struct ScanScratch {
  float* a;      // [num_states, kColumns]
  float *b, *c;  // [num_states] of a token
  float* rest;   // [num_states, kColumns]

  ScanScratch(const ScanArgs& args, Arena& arena)
      : a(arena.take<float>(args.num_states * kColumns)),
        b(arena.take<float>(padded(args.num_states))),
        c(arena.take<float>(padded(args.num_states))),
        rest(arena.take<float>(args.num_states * kColumns)) {}
};

}  // namespace
}  // namespace quire
