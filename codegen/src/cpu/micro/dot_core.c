/* The part of the host dot that is written once per translation unit: vectors, the register tile, panel sources.
 *
 * Enters: packed activations, a block of a weight panel. Leaves: f32 accumulators. `dot.c` holds the loops around it.
 *
 * Every output has one accumulator and k ascends through explicit fused multiply-adds, so that the bits of a row depend
 * neither on the number of rows, nor on the height of the tile, nor on threads, nor on the vector width.
 *
 * Layouts
 *   activations  tile of mr rows: [ceil(K/DOT_KC)][mr][DOT_KC] f32; the last block is ragged, its row stride stays.
 *   f32 panels   [ceil(N/32)][K][32]
 *   bf16 panels  [ceil(N/32)][ceil(K/2)][32][2]: a 32-bit lane holds (k, k+1) of one column, hence a shift and a mask
 *                unpack two f32 vectors from one load, and the same bytes are what a matrix unit (AMX) reads.
 *   bf16 pairs   where an instruction adds both products of a pair (DOT_BF16_PAIRS) and both sides are bf16, activations are
 *                pairs as well, and a pair takes the place of an f32 everywhere above: a sum over K is one of ceil(K/2) steps.
 *   Columns beyond N and the odd k beyond K are zero.
 */
#include <stdint.h>
#include <string.h>

#define DOT_NR 32

#if defined(__AVX512F__)
#define DOT_LANES 16
#define DOT_MR 14
#define DOT_KC 256 /* a panel block of 256 x 32 f32 fills two thirds of a 48 KiB first-level cache */
#elif defined(__AVX2__) && defined(__FMA__)
#define DOT_LANES 8
#define DOT_MR 6
#define DOT_KC 128 /* one of 128 x 32 half of the 32 KiB that such processors have */
#else
#define DOT_LANES 4
#define DOT_MR 4
#define DOT_KC 256
#endif
/* Instructions that add the products of two pairs of bf16 to a sum: first those of odd k, then those of even k, each rounded
 * once; subnormals count as zero. A matrix unit is better still, and needs the sides in its own way. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(__AMX_BF16__)
#define DOT_BF16_PAIRS 1
#else
#define DOT_BF16_PAIRS 0
#endif
/* What one step of a sum reads of a side. */
#define DOT_F32 0
#define DOT_BF16 1 /* of the right side, widened in registers; the left side is f32 */
#define DOT_PAIR 2 /* of both sides, two bf16 in 32 bits */

/* Short tiles wait for memory: ask for the panel DOT_PREFETCH_BYTES bytes ahead; of several panels side by side, beyond their ends for those
 * that come next. Processors with bf16 pairs, and those whose tiles read whole lines (dot_lines), prefetch by themselves, and better; but
 * where vectors of 256 bits are computed by halves, widening bf16 leaves a row alone too little of a core's window to reach far
 * enough ahead. */
#define DOT_PREFETCH_ROWS 4
#define DOT_PREFETCHES (!DOT_BF16_PAIRS)
#define DOT_PREFETCH_BYTES 2048
#if defined(__znver1__)
#define DOT_LINES_PREFETCH 384
#else
#define DOT_LINES_PREFETCH 0
#endif
/* Panels side by side by a row alone: several hide the latency of additions, yet processors with bf16 pairs hide it behind their reads,
 * and read one run of memory fastest. */
#if DOT_BF16_PAIRS
#define DOT_ROW_PANELS 1
#elif DOT_LANES == 8
#define DOT_ROW_PANELS 2
#else
#define DOT_ROW_PANELS 4
#endif
/* Bytes that a tile of many rows asks for at each step. */
#define DOT_ASKED (DOT_LANES == 8 ? 32 : 64)
#define DOT_STRIP (2 * DOT_LANES) /* columns one pass of the tile holds in registers */

typedef float dot_vf __attribute__((vector_size(4 * DOT_LANES)));
typedef uint32_t dot_vu __attribute__((vector_size(4 * DOT_LANES)));
typedef float dot_vf_any __attribute__((vector_size(4 * DOT_LANES), aligned(4), may_alias));
typedef uint32_t dot_vu_any __attribute__((vector_size(4 * DOT_LANES), aligned(4), may_alias));

#define DOT_INLINE static inline __attribute__((always_inline, unused))
#define DOT_OUTLINE static __attribute__((noinline, unused))

DOT_INLINE dot_vf dot_splat(float x) { return x - (dot_vf){0}; } /* x - 0 keeps the sign of zero, x + 0 does not */

DOT_INLINE dot_vf dot_fma(dot_vf a, dot_vf b, dot_vf c)
{
#if defined(__clang__) && __has_builtin(__builtin_elementwise_fma) && (defined(__FMA__) || !defined(__x86_64__))
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__clang__)
    return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__FMA__) || !defined(__x86_64__)
    for (int i = 0; i < DOT_LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c; /* no such instruction: two roundings */
#endif
}

/* As dot_splat, of bits that are no number. */
DOT_INLINE dot_vf dot_splat_word(float x)
{
    union { float f; uint32_t u; } bits = {x};
    return (dot_vf)(bits.u + (dot_vu){0});
}

DOT_INLINE dot_vf dot_pair(dot_vf a, dot_vf b, dot_vf c)
{
#if DOT_BF16_PAIRS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
#endif
    return c;
}

DOT_INLINE dot_vf dot_low(dot_vu w) { return (dot_vf)(w << 16); }          /* k */
DOT_INLINE dot_vf dot_high(dot_vu w) { return (dot_vf)(w & 0xffff0000u); } /* k + 1 */
DOT_INLINE dot_vu dot_load_u(const void *p) { return *(const dot_vu_any *)p; }
DOT_INLINE dot_vf dot_load(const float *p) { return *(const dot_vf_any *)p; }
DOT_INLINE void dot_save(float *p, dot_vf v) { *(dot_vf_any *)p = v; }

/* One register tile: mr rows x np panels of 32 columns, `kc` steps. `stride` is a panel's length in 32-bit words.
 * c is [np][mr][32]; `first` starts from zero, else the accumulators go on from c. Literals: mr, np, kind. A tile of
 * many rows computes long enough to fetch, line by line, what follows: the next tile's rows and kc * DOT_ASKED bytes at next_w. */
#if DOT_LANES != 8
DOT_INLINE void dot_tile(int mr, int np, int kind, const float *restrict a, const void *restrict w, int64_t stride,
                         int64_t kc, float *restrict c, int first, const char *next_a, const char *next_w)
{
    int bf16 = kind == DOT_BF16;
    for (int s = 0; s < DOT_NR; s += DOT_STRIP) {
        const uint32_t *b = (const uint32_t *)w + s;
        dot_vf acc[DOT_MR][8];
#pragma GCC unroll 16
        for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * np; j++)
                acc[r][j] = first ? (dot_vf){0} : dot_load(c + (j / 2 * mr + r) * DOT_NR + s + j % 2 * DOT_LANES);
        int64_t k = 0;
#pragma GCC unroll 1
        for (; k + 1 + bf16 <= kc; k += 1 + bf16, b += DOT_NR) {
            dot_vf lo[8], hi[8];
            int64_t far = b - (const uint32_t *)w + DOT_PREFETCH_BYTES / 4;
            far = DOT_PREFETCH_BYTES / 4 + (np == 1 || far < stride ? 0 : (np - 1) * stride);
#pragma GCC unroll 8
            for (int j = 0; j < 2 * np; j++) {
                const uint32_t *at = b + j / 2 * stride + j % 2 * DOT_LANES;
                if (bf16) {
                    dot_vu both = dot_load_u(at);
                    lo[j] = dot_low(both), hi[j] = dot_high(both);
                } else {
                    lo[j] = dot_load((const float *)at);
                }
                if (DOT_PREFETCHES && mr <= DOT_PREFETCH_ROWS) __builtin_prefetch(at + far, 0, 3);
            }
            if (mr > DOT_PREFETCH_ROWS) {
                __builtin_prefetch(next_a + k * mr * 4, 0, 3);
                if (bf16) __builtin_prefetch(next_a + (k + 1) * mr * 4, 0, 3);
                __builtin_prefetch(next_w + k * 64, 0, 2);
            }
#pragma GCC unroll 16
            for (int r = 0; r < mr; r++) {
                dot_vf x = kind == DOT_PAIR ? dot_splat_word(a[r * DOT_KC + k]) : dot_splat(a[r * DOT_KC + k]);
#pragma GCC unroll 8
                for (int j = 0; j < 2 * np; j++)
                    acc[r][j] = kind == DOT_PAIR ? dot_pair(x, lo[j], acc[r][j]) : dot_fma(x, lo[j], acc[r][j]);
            }
            if (bf16)
#pragma GCC unroll 16
                for (int r = 0; r < mr; r++) {
                    dot_vf x = dot_splat(a[r * DOT_KC + k + 1]);
#pragma GCC unroll 8
                    for (int j = 0; j < 2 * np; j++) acc[r][j] = dot_fma(x, hi[j], acc[r][j]);
                }
        }
        if (bf16 && k < kc) /* odd K */
#pragma GCC unroll 16
            for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
                for (int j = 0; j < 2 * np; j++)
                    acc[r][j] = dot_fma(dot_splat(a[r * DOT_KC + k]),
                                        dot_low(dot_load_u(b + j / 2 * stride + j % 2 * DOT_LANES)), acc[r][j]);
#pragma GCC unroll 16
        for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * np; j++)
                dot_save(c + (j / 2 * mr + r) * DOT_NR + s + j % 2 * DOT_LANES, acc[r][j]);
    }
}

#else
/* Rows of a tile whose sums fit into sixteen registers: whole lines of a panel come at once, which memory serves best, and three rows use
 * each, or two that also hold both halves of bf16. Few instructions stand beside the products, for a core may have to share its decoder:
 * four steps are a turn, and sums stay in their registers, which compilers of such loops do not see to. */
DOT_INLINE void dot_lines(int rows, int np, int kind, const float *restrict a, const uint32_t *restrict w, int64_t stride, int64_t kc,
                          float *restrict c, int64_t apart, int first, const char *next_a, const char *next_w)
{
    enum { wide = DOT_NR / DOT_LANES };
    int narrow = kind == DOT_BF16, turn = narrow ? 2 : 4;
    dot_vf acc[3][2 * wide];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < np * wide; j++)
            acc[r][j] = first ? (dot_vf){0} : dot_load(c + j / wide * apart + r * DOT_NR + j % wide * DOT_LANES);
#define DOT_LINES_OF(line, k, half)                                                                                    \
    for (int j = 0; j < np * wide; j++) {                                                                              \
        dot_vu both = dot_load_u(w + (line) * DOT_NR + j / wide * stride + j % wide * DOT_LANES);                      \
        dot_vf column = !narrow ? (dot_vf)both : (half) ? dot_high(both) : dot_low(both);                              \
        _Pragma("GCC unroll 3") for (int r = 0; r < rows; r++)                                                         \
            __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc[r][j]) : "x"(dot_splat(a[r * DOT_KC + (k)])), "x"(column));    \
    }
    const float *end = a + kc / turn * turn;
#pragma GCC unroll 1
    for (; a < end; a += turn, w += (narrow ? 1 : turn) * DOT_NR) {
        if (next_w) {
            __builtin_prefetch(next_a, 0, 3), next_a += 64;
            __builtin_prefetch(next_w, 0, 2), next_w += 64;
        }
        if (DOT_LINES_PREFETCH && narrow && rows == 1)
            for (int p = 0; p < np; p++)
                for (int line = 0; line < DOT_NR; line += 16)
                    __builtin_prefetch((const char *)(w + p * stride + line) + DOT_LINES_PREFETCH, 0, 3);
#pragma GCC unroll 4
        for (int u = 0; u < turn; u++)
#pragma GCC unroll 8
            DOT_LINES_OF(narrow ? 0 : u, u, u)
    }
#pragma GCC unroll 1
    for (int64_t k = 0; k < kc % turn; k++)
#pragma GCC unroll 8
        DOT_LINES_OF(narrow ? 0 : k, k, 0)
#undef DOT_LINES_OF
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < np * wide; j++)
            dot_save(c + j / wide * apart + r * DOT_NR + j % wide * DOT_LANES, acc[r][j]);
}

/* The same tile of such rows: of more than three also asks for what follows, a line a turn. */
DOT_INLINE void dot_tile(int mr, int np, int kind, const float *restrict a, const void *restrict w, int64_t stride,
                         int64_t kc, float *restrict c, int first, const char *next_a, const char *next_w)
{
    int most = kind == DOT_BF16 || mr == 4 ? 2 : 3, asks = mr > 3 && kind != DOT_BF16;
#pragma GCC unroll 3
    for (int r = 0; r < mr; r += most, next_a += kc / 4 * 64, next_w += kc / 4 * 64)
        dot_lines(mr - r < most ? mr - r : most, np, kind, a + r * DOT_KC, w, stride, kc, c + r * DOT_NR, mr * DOT_NR, first, next_a,
                  asks ? next_w : 0);
}
#endif

#define DOT_FAR_OUT (4 << 20) /* bytes of output that no second-level cache keeps for the reader */

/* `bytes` (a literal) of a row of an output of `whole` bytes. A store that misses the caches waits for the line that it is
 * about to overwrite, hence lines of a large output go past them; dot_fence then precedes any reader. */
DOT_INLINE void dot_put(void *to, const void *from, int bytes, int64_t whole)
{
#if defined(__AVX512F__)
    typedef long long line __attribute__((vector_size(64), aligned(64), may_alias));
    if (whole >= DOT_FAR_OUT && bytes % 64 == 0 && (uintptr_t)to % 64 == 0) {
        for (int i = 0; i < bytes / 64; i++)
            __asm__ volatile("vmovntdq %1, %0" : "=m"(((line *)to)[i]) : "v"(((const line *)from)[i]));
        return;
    }
#endif
    (void)whole;
    memcpy(to, from, (size_t)bytes);
}

/* Prefetches `bytes` (a literal) at a place that an epilogue is going to read or write, but for what dot_put writes past the caches. */
DOT_INLINE void dot_prefetch(const void *at, int bytes, int64_t whole, int write)
{
#if defined(__AVX512F__)
    if (write && whole >= DOT_FAR_OUT) return;
#endif
    for (int i = 0; i < bytes; i += 64) {
        if (write)
            __builtin_prefetch((const char *)at + i, 1, 3);
        else
            __builtin_prefetch((const char *)at + i, 0, 3);
    }
}

DOT_INLINE void dot_fence(void)
{
#if defined(__AVX512F__)
    __asm__ volatile("sfence" ::: "memory");
#endif
}

#define DOT_TILE_ARGS                                                                                                  \
    const float *a, const void *w, int64_t stride, int64_t kc, float *c, int first, const void *next_a,                \
        const void *next_w
typedef void dot_tile_fn(DOT_TILE_ARGS);

#define DOT_TILE_OF(type, mr, np, kind)                                                                                \
    DOT_OUTLINE void dot_##type##_##mr##x##np(DOT_TILE_ARGS)                                                           \
    {                                                                                                                  \
        dot_tile(mr, np, kind, a, w, stride, kc, c, first, next_a, next_w);                                            \
    }
#if DOT_BF16_PAIRS
#define DOT_TILE(mr, np)                                                                                               \
    DOT_TILE_OF(f32, mr, np, DOT_F32) DOT_TILE_OF(bf16, mr, np, DOT_BF16) DOT_TILE_OF(pair, mr, np, DOT_PAIR)
#else
#define DOT_TILE(mr, np) DOT_TILE_OF(f32, mr, np, DOT_F32) DOT_TILE_OF(bf16, mr, np, DOT_BF16)
#endif
#if DOT_ROW_PANELS == 4
DOT_TILE(1, 4)
#endif
DOT_TILE(1, 2)
DOT_TILE(1, 1)
DOT_TILE(2, 1)
DOT_TILE(3, 1)
DOT_TILE(4, 1)
#if DOT_MR > 4
DOT_TILE(5, 1)
DOT_TILE(6, 1)
#endif
#if DOT_MR > 6
DOT_TILE(7, 1)
DOT_TILE(8, 1)
DOT_TILE(9, 1)
DOT_TILE(10, 1)
DOT_TILE(11, 1)
DOT_TILE(12, 1)
DOT_TILE(13, 1)
DOT_TILE(14, 1)
#define DOT_TABLE(type)                                                                                                \
    {dot_##type##_1x1, dot_##type##_2x1,  dot_##type##_3x1,  dot_##type##_4x1,  dot_##type##_5x1,                      \
     dot_##type##_6x1, dot_##type##_7x1,  dot_##type##_8x1,  dot_##type##_9x1,  dot_##type##_10x1,                     \
     dot_##type##_11x1, dot_##type##_12x1, dot_##type##_13x1, dot_##type##_14x1}
#elif DOT_MR > 4
#define DOT_TABLE(type)                                                                                                \
    {dot_##type##_1x1, dot_##type##_2x1, dot_##type##_3x1, dot_##type##_4x1, dot_##type##_5x1, dot_##type##_6x1}
#else
#define DOT_TABLE(type) {dot_##type##_1x1, dot_##type##_2x1, dot_##type##_3x1, dot_##type##_4x1}
#endif
/* Tiles of f32 sides, or of bf16 pairs. */
#define DOT_TABLE_FOR(paired) DOT_TABLE_FOR_(paired)
#define DOT_TABLE_FOR_(paired) DOT_TABLE_##paired
#define DOT_TABLE_0 DOT_TABLE(f32)
#define DOT_TABLE_1 DOT_TABLE(pair)

/* Blocks of a panel, [kc][32] f32, from the layouts a runtime tensor may have. `n` valid columns (1..=32). */

DOT_OUTLINE void dot_panel_packed_bf16(float *dst, const uint32_t *w, int64_t kc)
{
    int64_t k = 0;
    for (; k + 2 <= kc; k += 2, w += DOT_NR, dst += 2 * DOT_NR)
        for (int j = 0; j < DOT_NR; j += DOT_LANES) {
            dot_vu both = dot_load_u(w + j);
            dot_save(dst + j, dot_low(both)), dot_save(dst + DOT_NR + j, dot_high(both));
        }
    if (k < kc)
        for (int j = 0; j < DOT_NR; j += DOT_LANES) dot_save(dst + j, dot_low(dot_load_u(w + j)));
}

DOT_INLINE uint32_t dot_bits(float x)
{
    union { float f; uint32_t u; } bits = {x};
    return bits.u;
}

typedef uint32_t dot_word __attribute__((may_alias));

/* Numbers of a sum of `sum` in the block of depth that begins at step k; a step of bf16 pairs has two. */
DOT_INLINE int64_t dot_numbers(int64_t sum, int64_t k, int paired)
{
    int64_t rest = sum - (k << paired), most = DOT_KC << paired;
    return rest < most ? rest : most;
}

/* n numbers of a packed row: as they are, or, exactly, bf16 values as pairs. */
DOT_INLINE void dot_keep(float *dst, const float *row, int paired, int64_t n)
{
    if (!paired) {
        memcpy(dst, row, (size_t)n * sizeof *dst);
        return;
    }
    for (int64_t i = 0; i < n / 2; i++)
        ((dot_word *)dst)[i] = dot_bits(row[2 * i]) >> 16 | (dot_bits(row[2 * i + 1]) & 0xffff0000u);
    if (n % 2) ((dot_word *)dst)[n / 2] = dot_bits(row[n - 1]) >> 16;
}

DOT_INLINE float dot_widen(const void *src, int bf16, int64_t i)
{
    if (!bf16) return ((const float *)src)[i];
    union { uint32_t u; float f; } x = {(uint32_t)((const uint16_t *)src)[i] << 16};
    return x.f;
}

/* src[k][n], row length ld: a panel is a band of columns. */
DOT_INLINE void dot_panel_kn(float *dst, const void *src, int bf16, int64_t ld, int64_t kc, int n)
{
    for (int64_t k = 0; k < kc; k++, dst += DOT_NR) {
        if (n == DOT_NR)
            for (int j = 0; j < DOT_NR; j++) dst[j] = dot_widen(src, bf16, k * ld + j);
        else
            for (int j = 0; j < DOT_NR; j++) dst[j] = j < n ? dot_widen(src, bf16, k * ld + j) : 0;
    }
}

typedef float dot_v4 __attribute__((vector_size(16)));
typedef float dot_v4_any __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t dot_u4 __attribute__((vector_size(16)));
typedef uint16_t dot_h4_any __attribute__((vector_size(8), aligned(2), may_alias));

DOT_INLINE dot_v4 dot_widen4(const void *src, int bf16, int64_t i)
{
    if (!bf16) return *(const dot_v4_any *)((const float *)src + i);
    return (dot_v4)(__builtin_convertvector(*(const dot_h4_any *)((const uint16_t *)src + i), dot_u4) << 16);
}

/* The 4 x 4 blocks r[i][j], transposed. */
DOT_INLINE void dot_transpose4(dot_v4 r[4])
{
    dot_v4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    dot_v4 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

#if DOT_LANES == 16
typedef float dot_v8 __attribute__((vector_size(32)));

/* Four blocks of 4 x 4 side by side: block b is rows src + (4b + i) * ld. Row j of the result has src[4b + i][j] at 4b + i. */
DOT_INLINE void dot_transpose4x4(dot_vf r[4], const void *src, int bf16, int64_t at, int64_t ld)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        dot_v4 a = dot_widen4(src, bf16, at + i * ld), b = dot_widen4(src, bf16, at + (4 + i) * ld);
        dot_v4 c = dot_widen4(src, bf16, at + (8 + i) * ld), d = dot_widen4(src, bf16, at + (12 + i) * ld);
        dot_v8 low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
        dot_v8 high = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7);
        r[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
#define DOT_LANES_OF(x, y, i, j, k, l)                                                                                 \
    __builtin_shufflevector(x, y, i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12,  \
                            k + 12, l + 12)
    dot_vf a = DOT_LANES_OF(r[0], r[1], 0, 16, 1, 17), b = DOT_LANES_OF(r[0], r[1], 2, 18, 3, 19);
    dot_vf c = DOT_LANES_OF(r[2], r[3], 0, 16, 1, 17), d = DOT_LANES_OF(r[2], r[3], 2, 18, 3, 19);
    r[0] = DOT_LANES_OF(a, c, 0, 1, 16, 17), r[1] = DOT_LANES_OF(a, c, 2, 3, 18, 19);
    r[2] = DOT_LANES_OF(b, d, 0, 1, 16, 17), r[3] = DOT_LANES_OF(b, d, 2, 3, 18, 19);
#undef DOT_LANES_OF
}
#endif

/* src[n][k], row length ld, as a linear layer stores its weight: transposed by fours. */
DOT_INLINE void dot_panel_nk(float *dst, const void *src, int bf16, int64_t ld, int64_t kc, int n)
{
    int64_t k4 = kc & ~(int64_t)3;
    int n4 = n & ~3, n16 = 0;
    if (n < DOT_NR) memset(dst, 0, (size_t)kc * DOT_NR * sizeof *dst);
#if DOT_LANES == 16
    n16 = n & ~15;
    for (int64_t k = 0; k < k4; k += 4)
        for (int j = 0; j < n16; j += 16) {
            dot_vf r[4];
            dot_transpose4x4(r, src, bf16, j * ld + k, ld);
            for (int i = 0; i < 4; i++) dot_save(dst + (k + i) * DOT_NR + j, r[i]);
        }
#endif
    for (int64_t k = 0; k < k4; k += 4)
        for (int j = n16; j < n4; j += 4) {
            dot_v4 r[4];
            for (int i = 0; i < 4; i++) r[i] = dot_widen4(src, bf16, (j + i) * ld + k);
            dot_transpose4(r);
            for (int i = 0; i < 4; i++) *(dot_v4_any *)(dst + (k + i) * DOT_NR + j) = r[i];
        }
    for (int j = 0; j < n; j++)
        for (int64_t k = j < n4 ? k4 : 0; k < kc; k++) dst[k * DOT_NR + j] = dot_widen(src, bf16, j * ld + k);
}

/* Asks for part `part` of `parts` of a block that is packed next: rows of `bytes`, so far apart. A packer alone waits for
 * each line; tiles compute meanwhile. */
DOT_INLINE void dot_fetch(const void *src, int64_t apart, int64_t rows, int64_t bytes, int64_t part, int64_t parts)
{
    for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)src + r * apart + b, 0, 2);
}

DOT_INLINE void dot_fetch_nk(const void *src, int bf16, int64_t ld, int64_t kc, int n, int64_t part, int64_t parts)
{
    dot_fetch(src, ld << (2 - bf16), n, kc << (2 - bf16), part, parts);
}

DOT_INLINE void dot_fetch_kn(const void *src, int bf16, int64_t ld, int64_t kc, int n, int64_t part, int64_t parts)
{
    dot_fetch(src, ld << (2 - bf16), kc, (int64_t)n << (2 - bf16), part, parts);
}
