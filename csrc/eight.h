// Eight tokens in double. Included by bodies of for_each_isa.h, inside their namespace: no include guard. Vectors are of
// one length at every level and nothing is fused, so that all levels give the same bits. They are passed by reference:
// returning them would be another calling convention at each level.
typedef double v8 __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) void load8(const double* p, v8& x) { __builtin_memcpy(&x, p, sizeof(x)); }
static inline __attribute__((always_inline)) void load8(const float* p, v8& x) {
#if PPO_FAST_ISA >= 2
  x = _mm512_cvtps_pd(_mm256_loadu_ps(p));
#else
  typedef float f8 __attribute__((vector_size(32)));
  f8 narrow;
  __builtin_memcpy(&narrow, p, sizeof(narrow));
  x = __builtin_convertvector(narrow, v8);
#endif
}

// Rounds x to the memory's type, in place as well.
static inline __attribute__((always_inline)) void store8(double* p, v8& x) { __builtin_memcpy(p, &x, sizeof(x)); }
static inline __attribute__((always_inline)) void store8(float* p, v8& x) {
#if PPO_FAST_ISA >= 2
  const __m256 narrow = _mm512_cvtpd_ps(x);
  _mm256_storeu_ps(p, narrow);
  x = _mm512_cvtps_pd(narrow);
#else
  typedef float f8 __attribute__((vector_size(32)));
  const f8 narrow = __builtin_convertvector(x, f8);
  __builtin_memcpy(p, &narrow, sizeof(narrow));
  x = __builtin_convertvector(narrow, v8);
#endif
}

// Whether eight tokens are all live.
static inline __attribute__((always_inline)) bool all_live8(const bool* mask) {
  uint64_t live;
  __builtin_memcpy(&live, mask, 8);
  return live == 0x0101010101010101u;
}
