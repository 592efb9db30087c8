/* Head of every CUDA program.
 *
 * Enters: BLOCK, the threads of a block, and index_t, wide enough for every index of the kernel. Leaves: what scalar.c is
 * written in. Here so that programs need no headers: NVRTC compiles them without a toolkit.
 *
 * Intended flags include --fmad=false: a product and a sum fuse only where FMA says so, as on the host.
 */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INLINE static __device__ __forceinline__
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define FMAD(a, b, c) __fma_rn(a, b, c)
#define INF_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
#define INF_D __longlong_as_double(0x7ff0000000000000LL)
#define INT64_MAX 0x7fffffffffffffffLL
#define INT64_MIN (-INT64_MAX - 1)
#define ABS_D(x) fabs(x)
#define m_abs(x) fabsf(x)
#define m_sqrt(x) __fsqrt_rn(x)
#define m_floor(x) floorf(x)
#define m_copysign(x, s) copysignf(x, s)
INLINE uint32_t f32_bits(float x) { return __float_as_uint(x); }
INLINE float bits_f32(uint32_t u) { return __uint_as_float(u); }
INLINE uint64_t f64_bits(double x) { return (uint64_t)__double_as_longlong(x); }
INLINE double bits_f64(uint64_t u) { return __longlong_as_double((long long)u); }

/* Floats of shared memory that the launch asked for. */
struct alignas(16) dynamic_shared { float x[4]; };
#define DYNAMIC_SHARED(name)                  \
    extern __shared__ dynamic_shared room[];  \
    float *const name = (float *)room

#define NATIVE_HALVES
INLINE float bf16_to_f32(uint16_t h) { return bits_f32((uint32_t)h << 16); }
INLINE uint16_t f32_to_bf16(float x) {
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
INLINE float f16_to_f32(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
INLINE uint16_t f32_to_f16(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
