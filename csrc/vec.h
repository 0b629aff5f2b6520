// A vector of W float32 lanes for the instruction set PPO_FAST_ISA, and the few operations that need more than C++.
// Included by bodies of for_each_isa.h, inside their namespace: no include guard, no standard headers.
//
// Vectors are the compiler's own (vector_size), so + - * / comparisons and `condition ? a : b` work lane by lane. The
// same templates run on a bare double, whose overloads stand here too: float64 tensors go that way, one lane at a time,
// with the C library's exponentials. vmax and vmin return their second argument where either is NaN.

#define PPO_FAST_FN static inline __attribute__((always_inline, unused))
#define PPO_FAST_METHOD inline __attribute__((always_inline))

constexpr int W = PPO_FAST_ISA == 2 ? 16 : PPO_FAST_ISA == 1 ? 8 : 4;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef double vd __attribute__((vector_size(4 * W)));

template <class V> struct Scalar { using type = float; };
template <> struct Scalar<double> { using type = double; };
template <> struct Scalar<vd> { using type = double; };
template <class V> constexpr int lanes = sizeof(V) / sizeof(typename Scalar<V>::type);

template <class V> PPO_FAST_FN V splat(double x) {
  if constexpr (lanes<V> == 1) {
    return x;
  } else {
    return static_cast<float>(x) - V{};  // minus zero changes no value, not even -0
  }
}

template <class To, class From> PPO_FAST_FN To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

// Whole vectors of memory as they lie.
template <class V> PPO_FAST_FN V load(const void* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
template <class V> PPO_FAST_FN void store(void* p, V x) { __builtin_memcpy(p, &x, sizeof(x)); }

PPO_FAST_FN vf fma(vf a, vf b, vf c) {
#if PPO_FAST_ISA == 2
  return _mm512_fmadd_ps(a, b, c);
#elif PPO_FAST_ISA == 1
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
PPO_FAST_FN double fma(double a, double b, double c) { return a * b + c; }

PPO_FAST_FN vf vmax(vf a, vf b) {
#if PPO_FAST_ISA == 2
  return _mm512_max_ps(a, b);
#elif PPO_FAST_ISA == 1
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
PPO_FAST_FN vf vmin(vf a, vf b) {
#if PPO_FAST_ISA == 2
  return _mm512_min_ps(a, b);
#elif PPO_FAST_ISA == 1
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
PPO_FAST_FN double vmax(double a, double b) { return a > b ? a : b; }
PPO_FAST_FN double vmin(double a, double b) { return a < b ? a : b; }

// Lanes in order, in double.
PPO_FAST_FN double sum_lanes(vf x) {
  double total = 0;
  for (int i = 0; i < W; ++i) total += x[i];
  return total;
}
PPO_FAST_FN double sum_lanes(double x) { return x; }

// A sum in double for each lane of V.
template <class V> struct WideSum {  // float32 lanes: two vectors of half as many doubles
  vd low, high;
};
template <> struct WideSum<double> {
  double low;
};
PPO_FAST_FN void add(WideSum<vf>& sum, vf x) {
#if PPO_FAST_ISA == 2
  sum.low += _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  sum.high += _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
#elif PPO_FAST_ISA == 1
  sum.low += _mm256_cvtps_pd(_mm256_castps256_ps128(x));
  sum.high += _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
#else
  sum.low += vd{x[0], x[1]};
  sum.high += vd{x[2], x[3]};
#endif
}
PPO_FAST_FN void add(WideSum<double>& sum, double x) { sum.low += x; }

// Lanes in order.
PPO_FAST_FN double total(const WideSum<vf>& sum) {
  double total = 0;
  for (int i = 0; i < W / 2; ++i) total += sum.low[i];
  for (int i = 0; i < W / 2; ++i) total += sum.high[i];
  return total;
}
PPO_FAST_FN double total(const WideSum<double>& sum) { return sum.low; }

PPO_FAST_FN float max_lanes(vf x) {
  float top = x[0];
  for (int i = 1; i < W; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
PPO_FAST_FN double max_lanes(double x) { return x; }

// ---------------------------------------------------------------------------------------- 16-bit formats, as raw bits

#if PPO_FAST_ISA == 0
// float16 in the low half of each lane. Its subnormals are built without float32 subnormals, so that flush-to-zero
// modes don't reach them.
PPO_FAST_FN vf half_to_float(vu h) {
  const vu sign = (h & 0x8000u) << 16;
  const vu magnitude = (h & 0x7fffu) << 13;
  const vu exponent = magnitude & 0x0f800000u;
  const vu normal = magnitude + (112u << 23);
  const vu special = normal + (112u << 23);  // infinity and NaN
  const vf subnormal = bits<vf>(magnitude + (113u << 23)) - bits<vf>(vu{} + (113u << 23));
  vu result = exponent == 0x0f800000u ? special : normal;
  result = exponent == 0u ? bits<vu>(subnormal) : result;
  return bits<vf>(result | sign);
}

// Rounds to nearest even, into the low half of each lane.
PPO_FAST_FN vu float_to_half(vf x) {
  const vu u = bits<vu>(x);
  const vu magnitude = u & 0x7fffffffu;
  const vu sign = (u >> 16) & 0x8000u;
  const vu normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const vu subnormal = bits<vu>(bits<vf>(magnitude) + 0.5f) - 0x3f000000u;
  const vu nan_bits = vu{} + 0x7e00u, infinity_bits = vu{} + 0x7c00u;
  vu result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? infinity_bits : result;
  result = magnitude > 0x7f800000u ? nan_bits : result;
  return result | sign;
}
#endif

// bfloat16, rounded to nearest even, in the high half of each lane; the low half is not cleared.
PPO_FAST_FN vu float_to_bfloat(vf x) {
  const vu u = bits<vu>(x);
  const vu nan_bits = vu{} + 0x7fc00000u;
  const vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return x == x ? rounded : nan_bits;
}

// --------------------------------------------------------------------------------------------------- loads and stores

// load1 widens one vector of consecutive elements. load2 fills two vectors from 2W of them, store2 puts them back. For
// 16-bit formats lane i of the two may hold elements 2i and 2i + 1, which saves shuffles; only sums, maxima and the
// matching store2 may rely on the content.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "even elements are taken from the low half of a 32-bit lane");

template <class T> struct Lanes { using type = vf; };
template <> struct Lanes<double> { using type = double; };

typedef uint16_t vh __attribute__((vector_size(2 * W)));

PPO_FAST_FN vf load1(const float* p) { return load<vf>(p); }
PPO_FAST_FN double load1(const double* p) { return load<double>(p); }  // maybe at an odd address
PPO_FAST_FN vf load1(const torch::headeronly::BFloat16* p) {
  return bits<vf>(__builtin_convertvector(load<vh>(p), vu) << 16);
}
PPO_FAST_FN vf load1(const torch::headeronly::Half* p) {
#if PPO_FAST_ISA == 2
  return _mm512_cvtph_ps(load<__m256i>(p));
#elif PPO_FAST_ISA == 1
  return _mm256_cvtph_ps(load<__m128i>(p));
#else
  return half_to_float(__builtin_convertvector(load<vh>(p), vu));
#endif
}
// The same of n < lanes elements; the other lanes are zero.
template <class T> PPO_FAST_FN typename Lanes<T>::type load1_n(const T* p, int64_t n) {
  unsigned char elements[lanes<typename Lanes<T>::type> * sizeof(T)] = {};
  __builtin_memcpy(elements, p, static_cast<size_t>(n) * sizeof(T));
  return load1(reinterpret_cast<const T*>(elements));
}

PPO_FAST_FN void load2(const float* p, vf& a, vf& b) {
  a = load1(p);
  b = load1(p + W);
}
PPO_FAST_FN void load2(const double* p, double& a, double& b) {
  a = load1(p);
  b = load1(p + 1);
}
PPO_FAST_FN void load2(const torch::headeronly::BFloat16* p, vf& a, vf& b) {
  const vu both = load<vu>(p);
  a = bits<vf>(both << 16);
  b = bits<vf>(both & 0xffff0000u);
}
PPO_FAST_FN void load2(const torch::headeronly::Half* p, vf& a, vf& b) {
#if PPO_FAST_ISA >= 1
  a = load1(p);
  b = load1(p + W);
#else
  const vu both = load<vu>(p);
  a = half_to_float(both & 0xffffu);
  b = half_to_float(both >> 16);
#endif
}

// Whole vectors to memory, past the caches if kStream: then p is aligned to a vector.
template <bool kStream, class V> PPO_FAST_FN void put(void* p, V x) {
  static_assert(sizeof(V) == 4 * W);
#if PPO_FAST_ISA == 2
  if constexpr (kStream) return _mm512_stream_si512(static_cast<__m512i*>(p), bits<__m512i>(x));
#elif PPO_FAST_ISA == 1
  if constexpr (kStream) return _mm256_stream_si256(static_cast<__m256i*>(p), bits<__m256i>(x));
#endif
  __builtin_memcpy(p, &x, sizeof(x));
}
PPO_FAST_FN void stream_fence() {
#if PPO_FAST_ISA >= 1
  _mm_sfence();
#endif
}

template <bool kStream> PPO_FAST_FN void store2(float* p, vf a, vf b) {
  put<kStream>(p, a);
  put<kStream>(p + W, b);
}
template <bool kStream> PPO_FAST_FN void store2(double* p, double a, double b) {
  __builtin_memcpy(p, &a, sizeof(a));
  __builtin_memcpy(p + 1, &b, sizeof(b));
}
template <bool kStream> PPO_FAST_FN void store2(torch::headeronly::BFloat16* p, vf a, vf b) {
  put<kStream>(p, (float_to_bfloat(a) >> 16) | (float_to_bfloat(b) & 0xffff0000u));
}
template <bool kStream> PPO_FAST_FN void store2(torch::headeronly::Half* p, vf a, vf b) {
#if PPO_FAST_ISA == 2
  const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
  put<kStream>(p, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#elif PPO_FAST_ISA == 1
  const __m128i low = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
  put<kStream>(p, _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
#else
  put<false>(p, float_to_half(a) | (float_to_half(b) << 16));
#endif
}

// load2 and store2 of vectors that may end before: what is missing is zero.
template <class T, class V> PPO_FAST_FN void load_rest(const T* p, int64_t left, V& a, V& b) {
  constexpr int64_t step = 2 * lanes<V>;
  if (left >= step) return load2(p, a, b);
  alignas(64) unsigned char bytes[step * sizeof(T)] = {};
  __builtin_memcpy(bytes, p, static_cast<size_t>(left) * sizeof(T));
  load2(reinterpret_cast<const T*>(bytes), a, b);
}
template <class T, class V> PPO_FAST_FN void store_rest(T* p, int64_t left, V a, V b) {
  constexpr int64_t step = 2 * lanes<V>;
  if (left >= step) return store2<false>(p, a, b);
  alignas(64) unsigned char bytes[step * sizeof(T)];
  store2<false>(reinterpret_cast<T*>(bytes), a, b);
  __builtin_memcpy(p, bytes, static_cast<size_t>(left) * sizeof(T));
}

// One vector of n <= lanes consecutive elements; lanes past n are zero.
template <class V> PPO_FAST_FN V load_n(const typename Scalar<V>::type* p, int64_t n) {
  V x = {};
  if (n >= lanes<V>) {
    __builtin_memcpy(&x, p, sizeof(x));
  } else {
    __builtin_memcpy(&x, p, static_cast<size_t>(n) * sizeof(*p));
  }
  return x;
}
template <class V> PPO_FAST_FN void store_n(typename Scalar<V>::type* p, V x, int64_t n) {
  if (n >= lanes<V>) {
    __builtin_memcpy(p, &x, sizeof(x));
  } else {
    __builtin_memcpy(p, &x, static_cast<size_t>(n) * sizeof(*p));
  }
}

// n <= lanes booleans as a lane mask; lanes past n are false.
template <class V> PPO_FAST_FN auto load_mask_n(const bool* p, int64_t n) {
  if constexpr (lanes<V> == 1) {
    return *p;
  } else {
    unsigned char bytes[W] = {};
    if (n >= W) {
      __builtin_memcpy(bytes, p, W);  // a constant size compiles to one load
    } else {
      __builtin_memcpy(bytes, p, static_cast<size_t>(n));
    }
    vi x;
#if PPO_FAST_ISA == 2
    x = bits<vi>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif PPO_FAST_ISA == 1
    x = bits<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
    for (int i = 0; i < W; ++i) x[i] = bytes[i];
#endif
    return x != 0;
  }
}

// Those n tokens of an input that are live; zero in place of the others, whatever they hold.
template <class V, class Mask> PPO_FAST_FN V load_live_n(Mask live, const typename Scalar<V>::type* p, int64_t n) {
  return live ? load_n<V>(p, n) : splat<V>(0);
}

// vf to memory past the caches; p is aligned to a vector.
PPO_FAST_FN void put_past_caches(float* p, vf x) { put<true>(p, x); }
PPO_FAST_FN void put_past_caches(double* p, vd x) { put<true>(p, x); }
