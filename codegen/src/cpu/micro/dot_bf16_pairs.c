/* Blocks of both sides of a dot whose numbers are all bf16, from the layouts a runtime tensor may have. Where DOT_BF16_PAIRS, they
 * become words, dst[mr][DOT_KC] and dst[steps][32]: two numbers of the sum side by side, the last one's other half zero; else
 * f32, as `dot_blocks.c` has them. kc counts numbers. Written once per translation unit, after `dot_pairs.c`. */
#if DOT_BF16_PAIRS
typedef uint16_t dot_h16 __attribute__((vector_size(32)));

/* 16 numbers of a row, the first `mask` of them; the rest is zero and not read. */
DOT_INLINE dot_vu dot_some(const uint16_t *at, uint32_t mask)
{
    dot_h16 r;
    __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(r) : "m"(*(const dot_h16 *)at), "Yk"(mask));
    return __builtin_convertvector(r, dot_vu);
}

/* src[m][k], row length ld. */
DOT_INLINE void dot_both_mk(float *dst, const uint16_t *src, int64_t ld, int64_t mr, int64_t kc)
{
    for (int64_t r = 0; r < mr; r++, dst += DOT_KC) {
        if (kc % 2) *(dot_word *)(dst + kc / 2) = src[r * ld + kc - 1];
        memcpy(dst, src + r * ld, (size_t)(kc / 2) * sizeof *dst);
    }
}

/* src[k][m], row length ld; mr is at most 16. */
DOT_OUTLINE void dot_both_km(float *dst, const uint16_t *src, int64_t ld, int64_t mr, int64_t kc)
{
    uint32_t mask = (1u << mr) - 1;
    for (int64_t k = 0; k < kc; k += 32, dst += 16) {
        dot_q8 r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const uint16_t *at = src + (k + 2 * i) * ld;
            for (int j = 0; j < 2; j++) __builtin_prefetch(at + (2 * DOT_FAR_LINES + j) * ld, 0, 3);
            dot_vu even = dot_some(at, k + 2 * i < kc ? mask : 0), odd = dot_some(at + ld, k + 2 * i + 1 < kc ? mask : 0);
            r[i] = (dot_q8)(even | odd << 16);
        }
        dot_transpose(r);
        for (int64_t i = 0; i < mr; i++) *(dot_q8_any *)(dst + i * DOT_KC) = r[i];
    }
}

/* src[n][k], row length ld. A block of 32 x 32 is sixteen steps. */
DOT_INLINE void dot_both_panel_nk(float *dst, const uint16_t *src, int64_t ld, int64_t kc, int n)
{
    for (int64_t k = 0; k < kc; k += 32)
        dot_pairs_nk((uint16_t *)(dst + k / 2 * DOT_NR), src + k, ld, n, kc - k < 32 ? kc - k : 32);
}

/* src[k][n], row length ld. */
DOT_INLINE void dot_both_panel_kn(float *dst, const uint16_t *src, int64_t ld, int64_t kc, int n)
{
    for (int64_t k = 0; k < kc; k += 32)
        dot_pairs_kn((uint16_t *)(dst + k / 2 * DOT_NR), src + k * ld, ld, n, kc - k < 32 ? kc - k : 32);
}
#else
#define dot_both_mk(dst, src, ld, mr, kc) dot_block_mk(dst, src, 1, ld, mr, kc)
#define dot_both_km(dst, src, ld, mr, kc) dot_block_km(dst, src, 1, ld, mr, kc)
#define dot_both_panel_nk(dst, src, ld, kc, n) dot_panel_nk(dst, src, 1, ld, kc, n)
#define dot_both_panel_kn(dst, src, ld, kc, n) dot_panel_kn(dst, src, 1, ld, kc, n)
#endif
