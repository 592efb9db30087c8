/* Blocks of the sides of a dot, f32, from the layouts a runtime tensor may have: of panels of the right side, [kc][32], and of the left side,
 * [mr][DOT_KC]. Written once per translation unit, behind `dot_core.c`. */

/* Of panels, with `n` valid columns (1..=32). */

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

/* Of the left side. */

/* src[m][k], row length ld. */
DOT_INLINE void dot_block_mk(float *dst, const void *src, int bf16, int64_t ld, int64_t mr, int64_t kc)
{
    for (int64_t r = 0; r < mr; r++, dst += DOT_KC) {
        if (!bf16)
            memcpy(dst, (const float *)src + r * ld, (size_t)kc * sizeof *dst);
        else
            for (int64_t k = 0; k < kc; k++) dst[k] = dot_widen(src, 1, r * ld + k);
    }
}

#define DOT_FAR_LINES 16 /* rows far apart come one by one: ask for them so many rows ahead */

/* src[k][m], row length ld: transposed by fours; rows that are left over go once more with some before them. */
DOT_INLINE void dot_block_km(float *dst, const void *src, int bf16, int64_t ld, int64_t mr, int64_t kc)
{
    enum { STEPS = DOT_LANES == 16 ? 16 : 4 };
    int64_t ks = mr < 4 ? 0 : kc & ~(int64_t)(STEPS - 1);
    for (int64_t k = 0; k < ks; k += STEPS) {
        for (int i = 0; i < STEPS; i++) {
            const char *far = (const char *)src + (k + DOT_FAR_LINES + i) * ld * (bf16 ? 2 : 4);
            __builtin_prefetch(far, 0, 3), __builtin_prefetch(far + (mr - 1) * (bf16 ? 2 : 4), 0, 3);
        }
        for (int64_t at = 0; at < mr; at += 4) {
            int64_t m = at + 4 <= mr ? at : mr - 4;
            float *to = dst + m * DOT_KC + k;
#if DOT_LANES == 16
            dot_vf r[4];
            dot_transpose4x4(r, src, bf16, k * ld + m, ld);
            for (int i = 0; i < 4; i++) dot_save(to + i * DOT_KC, r[i]);
#else
            dot_v4 r[4];
            for (int i = 0; i < 4; i++) r[i] = dot_widen4(src, bf16, (k + i) * ld + m);
            dot_transpose4(r);
            for (int i = 0; i < 4; i++) *(dot_v4_any *)(to + i * DOT_KC) = r[i];
#endif
        }
    }
    for (int64_t m = 0; m < mr; m++)
        for (int64_t k = ks; k < kc; k++) dst[m * DOT_KC + k] = dot_widen(src, bf16, k * ld + m);
}
