/* Blocks of the left side of a dot, dst[mr][DOT_KC] f32, from the layouts a runtime tensor may have; `dot_core.c` has the
 * like for panels of the right side. Written once per translation unit. */

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

/* src[k][m], row length ld: transposed four by four. */
DOT_INLINE void dot_block_km(float *dst, const void *src, int bf16, int64_t ld, int64_t mr, int64_t kc)
{
    int64_t k4 = kc & ~(int64_t)3, m4 = mr & ~(int64_t)3;
    for (int64_t k = 0; k < k4; k += 4) {
        for (int i = 0; i < 4; i++) {
            const char *far = (const char *)src + (k + DOT_FAR_LINES + i) * ld * (bf16 ? 2 : 4);
            __builtin_prefetch(far, 0, 3), __builtin_prefetch(far + (mr - 1) * (bf16 ? 2 : 4), 0, 3);
        }
        for (int64_t m = 0; m < m4; m += 4) {
            dot_v4 r0 = dot_widen4(src, bf16, k * ld + m), r1 = dot_widen4(src, bf16, (k + 1) * ld + m);
            dot_v4 r2 = dot_widen4(src, bf16, (k + 2) * ld + m), r3 = dot_widen4(src, bf16, (k + 3) * ld + m);
            dot_v4 a = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), b = __builtin_shufflevector(r0, r1, 2, 6, 3, 7);
            dot_v4 c = __builtin_shufflevector(r2, r3, 0, 4, 1, 5), d = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
            float *to = dst + m * DOT_KC + k;
            *(dot_v4_any *)to = __builtin_shufflevector(a, c, 0, 1, 4, 5);
            *(dot_v4_any *)(to + DOT_KC) = __builtin_shufflevector(a, c, 2, 3, 6, 7);
            *(dot_v4_any *)(to + 2 * DOT_KC) = __builtin_shufflevector(b, d, 0, 1, 4, 5);
            *(dot_v4_any *)(to + 3 * DOT_KC) = __builtin_shufflevector(b, d, 2, 3, 6, 7);
        }
    }
    for (int64_t m = 0; m < mr; m++)
        for (int64_t k = m < m4 ? k4 : 0; k < kc; k++) dst[m * DOT_KC + k] = dot_widen(src, bf16, k * ld + m);
}
