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
