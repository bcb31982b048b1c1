// The arithmetic that one core does at most: products whose operands stay in registers, of bfloat16, or of float32
// where the instruction set has none, or of int8.
// `quire_peak(rounds)` does `rounds` rounds of them and returns the number of floating-point operations of one round.
// `quire_read(memory, bytes)` reads memory as fast as one core does, a multiple of 512 bytes, and returns what it read.
#include <immintrin.h>

typedef long Line __attribute__((vector_size(64), aligned(64), may_alias));

long quire_read(const char* memory, long bytes) {
  Line all[8] = {0};
  for (const char* at = memory; at < memory + bytes; at += sizeof all)
    _Pragma("GCC unroll 8") for (int j = 0; j < 8; ++j) {
      __builtin_prefetch(at + j * sizeof(Line) + 4096);
      all[j] |= ((const Line*)at)[j];
    }
  for (int j = 1; j < 8; ++j) all[0] |= all[j];
  return all[0][0] | all[0][7];
}

#if defined(PEAK_AMX)
#if defined(PEAK_INT8)
#define MULTIPLY _tile_dpbusd
#define FLOPS (2 * 16 * 16 * 64)
#else
#define MULTIPLY _tile_dpbf16ps
#define FLOPS (2 * 16 * 16 * 32)
#endif
#include <sys/syscall.h>
#include <unistd.h>
long quire_peak(long rounds) {
  static const struct {
    unsigned char palette, start, zeros[14];
    unsigned short bytes[16];
    unsigned char rows[16];
  } __attribute__((aligned(64))) shape = {
      1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
  _tile_loadconfig(&shape);
  for (long i = 0; i < rounds; ++i) {
    MULTIPLY(0, 4, 6);
    MULTIPLY(1, 4, 7);
    MULTIPLY(2, 5, 6);
    MULTIPLY(3, 5, 7);
  }
  _tile_release();
  return 4 * FLOPS;
}
#else
#define SUMS 12
#if defined(PEAK_INT8)
typedef __m512i Sum;
#define STEP(sum) sum = _mm512_dpbusd_epi32(sum, a, b)
#define OPERANDS __m512i a = _mm512_set1_epi32((int)rounds), b = a
#define FLOPS 128
#elif defined(PEAK_BF16)
typedef __m512 Sum;
#define STEP(sum) sum = _mm512_dpbf16_ps(sum, a, b)
#define OPERANDS __m512bh a = (__m512bh)_mm512_set1_epi32((int)rounds), b = a
#define FLOPS 64
#elif defined(PEAK_AVX512)
typedef __m512 Sum;
#define STEP(sum) sum = _mm512_fmadd_ps(a, b, sum)
#define OPERANDS __m512 a = _mm512_set1_ps((float)rounds), b = a
#define FLOPS 32
#else
typedef __m256 Sum;
#define STEP(sum) sum = _mm256_fmadd_ps(a, b, sum)
#define OPERANDS __m256 a = _mm256_set1_ps((float)rounds), b = a
#define FLOPS 16
#endif
long quire_peak(long rounds) {
  OPERANDS;
  Sum sums[SUMS] = {0};
  for (long i = 0; i < rounds; ++i) {
    _Pragma("GCC unroll 12") for (int j = 0; j < SUMS; ++j) {
      STEP(sums[j]);
      __asm__ volatile("" : "+v"(sums[j]));  // no two of them are one
    }
  }
  return SUMS * FLOPS;
}
#endif
