/* The part of the host dot that is written once per translation unit: vectors and the register tile.
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
/* Bytes of panels that a tile of many rows asks for at each step. */
#define DOT_ASKED(bf16) (DOT_LANES == 8 && !(bf16) ? 32 : 64)
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
 * many rows computes long enough to fetch, line by line, what follows: the next tile's rows and kc * DOT_ASKED(kind) bytes at next_w. */
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
#define DOT_FMADD(sum, x, y) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y))

/* Three rows of a tile, or two that also hold both halves of bf16: whole lines of a panel come at once, which memory serves best. Few
 * instructions stand beside the products, for a core may have to share its decoder: four steps are a turn, and sums stay in their
 * registers, which compilers of such loops do not see to. */
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
        _Pragma("GCC unroll 3") for (int r = 0; r < rows; r++) DOT_FMADD(acc[r][j], dot_splat(a[r * DOT_KC + (k)]), column); \
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

/* Four to six rows by two vectors of a bf16 panel, whose sums leave registers for both vectors, a mask and a number of a row. Halves are
 * made as they are used, those of odd steps by the instruction that reads them: widening a block ahead is faster for no number of tiles.
 * Every other line of a panel is no order in which processors prefetch, so each turn asks for what follows: a line of rows, two of panels. */
DOT_INLINE void dot_strip(int rows, const float *restrict a, const uint32_t *restrict w, int64_t kc, float *restrict c, int first,
                          const char *next_a, const char *next_w)
{
    dot_vf acc[6][2];
    dot_vu mask = 0xffff0000u + (dot_vu){0};
    __asm__("" : "+x"(mask)); /* in a register */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) acc[r][j] = first ? (dot_vf){0} : dot_load(c + r * DOT_NR + j * DOT_LANES);
#define DOT_STRIP_OF(pair, k)                                                                                          \
    {                                                                                                                  \
        const uint32_t *at = w + (pair) * DOT_NR;                                                                      \
        dot_vf column[2];                                                                                              \
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++)                                                            \
            if ((k) % 2)                                                                                               \
                __asm__("vandps %1, %2, %0" : "=x"(column[j]) : "m"(*(const dot_vu_any *)(at + j * DOT_LANES)), "x"(mask)); \
            else                                                                                                       \
                column[j] = dot_low(dot_load_u(at + j * DOT_LANES));                                                   \
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {                                                       \
            dot_vf x = dot_splat(a[r * DOT_KC + (k)]);                                                                 \
            _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) DOT_FMADD(acc[r][j], x, column[j]);                    \
        }                                                                                                              \
    }
    const float *end = a + kc / 4 * 4;
#pragma GCC unroll 1
    for (; a < end; a += 4, w += 2 * DOT_NR, next_a += 64, next_w += 128) {
        __builtin_prefetch(next_a, 0, 3);
        __builtin_prefetch(next_w, 0, 2), __builtin_prefetch(next_w + 64, 0, 2);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) DOT_STRIP_OF(u / 2, u)
    }
    int rest = kc % 4;
    if (rest > 0) DOT_STRIP_OF(0, 0)
    if (rest > 1) DOT_STRIP_OF(0, 1)
    if (rest > 2) DOT_STRIP_OF(1, 2)
#undef DOT_STRIP_OF
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) dot_save(c + r * DOT_NR + j * DOT_LANES, acc[r][j]);
}

/* dot_tile in sixteen registers; of more than three rows it also asks for what follows. */
DOT_INLINE void dot_tile(int mr, int np, int kind, const float *restrict a, const void *restrict w, int64_t stride,
                         int64_t kc, float *restrict c, int first, const char *next_a, const char *next_w)
{
    int most = kind == DOT_BF16 || mr == 4 ? 2 : 3;
    if (kind == DOT_BF16 && mr > 3)
        for (int s = 0; s < DOT_NR; s += DOT_STRIP, next_a += kc / 4 * 64, next_w += kc / 4 * 128)
            dot_strip(mr, a, (const uint32_t *)w + s, kc, c + s, first, next_a, next_w);
    else
#pragma GCC unroll 3
        for (int r = 0; r < mr; r += most, next_a += kc / 4 * 64, next_w += kc / 4 * 64)
            dot_lines(mr - r < most ? mr - r : most, np, kind, a + r * DOT_KC, w, stride, kc, c + r * DOT_NR, mr * DOT_NR, first, next_a,
                      mr > 3 ? next_w : 0);
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
