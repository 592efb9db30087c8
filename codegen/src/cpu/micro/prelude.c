/* Head of every host translation unit.
 *
 * Enters: nothing but the compiler's target macros. Leaves: what scalar.c is written in, and one
 * native vector type with an explicit fused multiply-add. Here so that kernels need no libm, no
 * -ffast-math and no headers beyond <stdint.h>.
 *
 * Intended flags include -ffp-contract=off: a product and a sum fuse only where FMA says so. Without a hardware FMA
 * the two round apart, so results are reproducible per target, not across targets. No slots.
 */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define OUTLINE static __attribute__((noinline, unused))
#ifdef __FMA__
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define FMAD(a, b, c) __builtin_fma(a, b, c)
#elif defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define FMAD(a, b, c) __builtin_fma(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#define FMAD(a, b, c) ((a) * (b) + (c))
#endif

INLINE uint32_t f32_bits(float x) { uint32_t u; __builtin_memcpy(&u, &x, 4); return u; }
INLINE float bits_f32(uint32_t u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
INLINE uint64_t f64_bits(double x) { uint64_t u; __builtin_memcpy(&u, &x, 8); return u; }
INLINE double bits_f64(uint64_t u) { double x; __builtin_memcpy(&x, &u, 8); return x; }

typedef int64_t index_t;
#define INF_F __builtin_inff()
#define NAN_F __builtin_nanf("")
#define INF_D __builtin_inf()
#define ABS_D(x) __builtin_fabs(x)
#define m_abs(x) __builtin_fabsf(x)
#define m_sqrt(x) __builtin_sqrtf(x)
#define m_floor(x) __builtin_floorf(x)
#define m_copysign(x, s) __builtin_copysignf(x, s)

/* One native vector of f32. VW is its width, V_REGS the number of vector registers. */
#if defined(__AVX512F__)
#define VW 16
#define V_REGS 32
#elif defined(__AVX__)
#define VW 8
#define V_REGS 16
#else
#define VW 4
#ifdef __aarch64__
#define V_REGS 32
#else
#define V_REGS 16
#endif
#endif
typedef float vf __attribute__((vector_size(4 * VW)));
typedef float vf_loose __attribute__((vector_size(4 * VW), aligned(4), may_alias));

INLINE vf v_load(const float *p) { return *(const vf_loose *)p; }
INLINE void v_store(float *p, vf x) { *(vf_loose *)p = x; }
INLINE vf v_splat(float x) { return x - (vf){0}; } /* x - 0 is x, also for -0 */

INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(__clang__) && (defined(__FMA__) || defined(__aarch64__))
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
    return __builtin_ia32_vfmaddps512_mask(a, b, c, (uint16_t)-1, 4);
#elif defined(__FMA__)
    return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__aarch64__)
    vf r;
    for (int i = 0; i < VW; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

/* The greater lane; b where either is a NaN. */
INLINE vf v_max(vf a, vf b) {
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_maxps512_mask(a, b, a, (uint16_t)-1, 4);
#elif defined(__AVX__) && !defined(__clang__)
    return __builtin_ia32_maxps256(a, b);
#elif defined(__SSE__) && !defined(__clang__)
    return __builtin_ia32_maxps(a, b);
#else /* clang knows this for the instruction; its own maximum drops a NaN */
    typedef int32_t lanes __attribute__((vector_size(4 * VW)));
    lanes greater = a > b;
    return (vf)(((lanes)a & greater) | ((lanes)b & ~greater));
#endif
}

/* Sum of the lanes, always as the same tree. */
INLINE float v_sum(vf x) {
    float t[VW];
    v_store(t, x);
    for (int w = VW / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}
