// Matrix units (AMX) in plain C++, so that code for them runs on processors with AVX-512 and without matrix units.
// Included before all else (-include) by a build of the CPU library that only tests use: tests/support/emulated_amx.py.
//
// Follows the operation sections of the instructions in Intel's Software Developer's Manual, volume 2: the state of
// tiles is each thread's own, what a processor would fault on ends the process, and products add in the documented
// order. Counts what is executed.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace quire {
namespace {
// For isas.cpp: the build is for the processor that it runs on.
[[maybe_unused]] bool has_amx_emulated() { return true; }
}  // namespace
}  // namespace quire

namespace emulated_amx {

// Instructions that a thread has executed, by the tile that they load, store, clear or add to.
struct Counts {
  int64_t loads[8], stores[8], zeros[8], products[8], configurations;
};

// The layout of memory of LDTILECFG.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_of_row[8];
  uint16_t reserved_bytes[8];
  uint8_t rows[8], reserved_rows[8];
};
static_assert(sizeof(Config) == 64);

struct State {
  Config config;
  alignas(64) unsigned char tiles[8][16][64];
  Counts counts;
};

inline State& state() {
  thread_local State of_thread = {};
  return of_thread;
}

inline void require(bool holds, const char* fault) {
  if (holds) return;
  std::fprintf(stderr, "emulated AMX: %s\n", fault);
  std::abort();
}

inline State& configured() {
  require(state().config.palette == 1, "#UD, tiles are not configured");
  return state();
}

inline void load_config(const void* memory) {
  State& s = state();
  ++s.counts.configurations;
  Config config;
  std::memcpy(&config, memory, sizeof(config));
  require(config.palette <= 1, "#GP, unknown palette");
  std::memset(s.tiles, 0, sizeof(s.tiles));
  if (config.palette == 0) {
    s.config = {};
    return;
  }
  for (const uint8_t byte : config.reserved) require(byte == 0, "#GP, reserved bytes of a configuration");
  for (int i = 0; i < 8; ++i) {
    require(config.reserved_bytes[i] == 0 && config.reserved_rows[i] == 0, "#GP, configuration of tiles 8 to 15");
    require(config.bytes_of_row[i] <= 64 && config.rows[i] <= 16, "#GP, a tile is too large");
    require((config.bytes_of_row[i] == 0) == (config.rows[i] == 0), "#GP, rows without bytes or bytes without rows");
  }
  s.config = config;
}

inline void store_config(void* memory) { std::memcpy(memory, &state().config, sizeof(Config)); }

inline void release() {
  const Config none = {};
  load_config(&none);
}

inline void zero(int tile) {
  State& s = configured();
  ++s.counts.zeros[tile];
  std::memset(s.tiles[tile], 0, sizeof(s.tiles[tile]));
}

inline void load(int tile, const void* base, int64_t stride) {
  State& s = configured();
  ++s.counts.loads[tile];
  require(s.config.rows[tile] > 0, "#UD, the tile has no rows");
  std::memset(s.tiles[tile], 0, sizeof(s.tiles[tile]));
  for (int row = 0; row < s.config.rows[tile]; ++row)
    std::memcpy(s.tiles[tile][row], static_cast<const char*>(base) + row * stride, s.config.bytes_of_row[tile]);
}

inline void store(int tile, void* base, int64_t stride) {
  State& s = configured();
  ++s.counts.stores[tile];
  require(s.config.rows[tile] > 0, "#UD, the tile has no rows");
  for (int row = 0; row < s.config.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, s.tiles[tile][row], s.config.bytes_of_row[tile]);
}

// The sizes that a product of tiles needs: C is [m, n], A [m, k] and B [k, n] words of 32 bits.
struct Sizes {
  int m, n, k;
};

inline Sizes begin_product(State& s, int c, int a, int b) {
  const Config& config = s.config;
  ++s.counts.products[c];
  require(c != a && c != b && a != b, "#UD, a product of a tile with itself");
  for (const int tile : {c, a, b}) require(config.bytes_of_row[tile] % 4 == 0, "#UD, bytes of a row");
  require(config.rows[c] > 0 && config.rows[c] == config.rows[a], "#UD, rows of C and A");
  require(config.bytes_of_row[c] == config.bytes_of_row[b], "#UD, columns of C and B");
  require(config.bytes_of_row[a] / 4 == config.rows[b], "#UD, columns of A and rows of B");
  return {config.rows[c], config.bytes_of_row[c] / 4, config.rows[b]};
}

inline void widen(const unsigned char* pairs, float* first, float* second, int count) {
  uint32_t words[16];
  std::memcpy(words, pairs, 64);
  for (int i = 0; i < count; ++i) {
    const uint32_t bits[2] = {words[i] << 16, words[i] & 0xffff0000u};
    std::memcpy(first + i, bits, 4);
    std::memcpy(second + i, bits + 1, 4);
  }
}

// The sums of one row of C: those of first and second numbers of pairs apart, by fused products.
__attribute__((noinline)) inline void add_row(float* c, const unsigned char* a, const float (&b)[2][16][16], int k) {
  float of_a[2][16], sums[2][16] = {};
  widen(a, of_a[0], of_a[1], 16);
  for (int at = 0; at < k; ++at)
    for (int which = 0; which < 2; ++which)
      for (int n = 0; n < 16; ++n) sums[which][n] = __builtin_fmaf(of_a[which][at], b[which][at][n], sums[which][n]);
  for (int n = 0; n < 16; ++n) c[n] += sums[0][n] + sums[1][n];
}

// TDPBF16PS: subnormal numbers count as 0 and become 0, rounding is to nearest even, MXCSR has no effect.
__attribute__((noinline)) inline void multiply_bf16(int c, int a, int b) {
  State& s = configured();
  const Sizes sizes = begin_product(s, c, a, b);
  constexpr unsigned kZeroSubnormals = 0x8040, kNoExceptions = 0x1f80;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kZeroSubnormals | kNoExceptions);
  float of_b[2][16][16];
  for (int at = 0; at < sizes.k; ++at) widen(s.tiles[b][at], of_b[0][at], of_b[1][at], 16);
  for (int m = 0; m < sizes.m; ++m) {
    float row[16];
    std::memcpy(row, s.tiles[c][m], 64);
    add_row(row, s.tiles[a][m], of_b, sizes.k);
    std::memset(s.tiles[c][m], 0, 64);
    std::memcpy(s.tiles[c][m], row, sizes.n * 4);
  }
  std::memset(s.tiles[c][sizes.m], 0, (16 - sizes.m) * 64);
  _mm_setcsr(before);
}

// TDPBSSD and its like: sums of four products each, without saturation.
template <class OfA, class OfB>
inline void multiply_bytes(int c, int a, int b) {
  State& s = configured();
  const Sizes sizes = begin_product(s, c, a, b);
  for (int m = 0; m < sizes.m; ++m)
    for (int n = 0; n < sizes.n; ++n) {
      uint32_t sum;
      std::memcpy(&sum, s.tiles[c][m] + 4 * n, 4);
      for (int at = 0; at < sizes.k; ++at)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<uint32_t>(static_cast<OfA>(s.tiles[a][m][4 * at + i]) *
                                       static_cast<OfB>(s.tiles[b][at][4 * n + i]));
      std::memcpy(s.tiles[c][m] + 4 * n, &sum, 4);
    }
  std::memset(s.tiles[c][sizes.m], 0, (16 - sizes.m) * 64);
}

}  // namespace emulated_amx

// Those of the thread that calls it; it may write them.
extern "C" __attribute__((visibility("default"), used)) inline emulated_amx::Counts* emulated_amx_counts() {
  return &emulated_amx::state().counts;
}

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(memory) emulated_amx::load_config(memory)
#define _tile_storeconfig(memory) emulated_amx::store_config(memory)
#define _tile_release() emulated_amx::release()
#define _tile_zero(tile) emulated_amx::zero(tile)
#define _tile_loadd(tile, base, stride) emulated_amx::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emulated_amx::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_amx::store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_amx::multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated_amx::multiply_bytes<int8_t, int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) emulated_amx::multiply_bytes<int8_t, uint8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) emulated_amx::multiply_bytes<uint8_t, int8_t>(c, a, b)
#define _tile_dpbuud(c, a, b) emulated_amx::multiply_bytes<uint8_t, uint8_t>(c, a, b)

#if !defined(__AMX_BF16__)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif
