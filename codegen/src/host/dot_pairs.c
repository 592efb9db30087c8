/* Blocks of 32 x 32 bf16 for the matrix unit, from row-major sides of a dot that nobody packed ahead. Written once per
 * translation unit, after `dot_core.c`.
 *
 *   rows   dst[32 m][32 k], a left side's block: what tiles 4 and 5 load
 *   pairs  dst[16][32 n][2], a right side's block: pairs of k side by side, what tiles 6 and 7 load
 *
 * Numbers are moved, never changed; beyond the ends of a side they are zero.
 */
#if defined(DOT_AMX_ROWS) && defined(__AVX512BW__)
#define DOT_PAIRS

typedef uint16_t dot_h32 __attribute__((vector_size(64), may_alias));
typedef uint32_t dot_w16 __attribute__((vector_size(64), may_alias));
typedef uint64_t dot_q8 __attribute__((vector_size(64), may_alias));
typedef uint64_t dot_q8_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint64_t dot_q2_any __attribute__((vector_size(16), aligned(2), may_alias));

/* In each group of 16 bytes: the elements of the lower (upper) halves of a and b, alternating. */
#define DOT_LOW16(a, b)                                                                                                \
    (dot_q8) __builtin_shufflevector((dot_h32)(a), (dot_h32)(b), 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, \
                                     43, 16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59)
#define DOT_HIGH16(a, b)                                                                                               \
    (dot_q8) __builtin_shufflevector((dot_h32)(a), (dot_h32)(b), 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46,   \
                                     15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63)
#define DOT_LOW32(a, b)                                                                                                \
    (dot_q8) __builtin_shufflevector((dot_w16)(a), (dot_w16)(b), 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, \
                                     29)
#define DOT_HIGH32(a, b)                                                                                               \
    (dot_q8) __builtin_shufflevector((dot_w16)(a), (dot_w16)(b), 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30,   \
                                     15, 31)
#define DOT_LOW64(a, b) __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define DOT_HIGH64(a, b) __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)

/* 16 bytes of each of four rows. */
DOT_INLINE dot_q8 dot_four(const uint16_t *a, int64_t step)
{
    dot_q2_any r0 = *(const dot_q2_any *)a, r1 = *(const dot_q2_any *)(a + step);
    dot_q2_any r2 = *(const dot_q2_any *)(a + 2 * step), r3 = *(const dot_q2_any *)(a + 3 * step);
    return (dot_q8){r0[0], r0[1], r1[0], r1[1], r2[0], r2[1], r3[0], r3[1]};
}

/* The top left of a block, the rest zero. */
DOT_OUTLINE void dot_edge(uint16_t *edge, const uint16_t *src, int64_t ld, int64_t rows, int64_t columns)
{
    memset(edge, 0, 2048);
    for (int64_t r = 0; r < rows; r++) memcpy(edge + r * 32, src + r * ld, (size_t)columns * sizeof *edge);
}

/* The lines of a result that are about to be written, but not those that go past the caches. */
DOT_INLINE void dot_ahead(const void *to, int bytes, int64_t whole)
{
    if (whole >= DOT_FAR_OUT) return;
    __builtin_prefetch(to, 1, 3);
    if (bytes > 64) __builtin_prefetch((const char *)to + 64, 1, 3);
}

/* src[m][k], row length ld. */
DOT_OUTLINE void dot_rows_mk(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t m, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (m < 32 || k < 32) dot_edge(edge, src, ld, m, k), src = edge, ld = 32;
    for (int r = 0; r < 32; r++) ((dot_q8 *)dst)[r] = *(const dot_q8_any *)(src + r * ld);
}

/* src[k][m], row length ld: eight by eight are transposed within 16 bytes. */
DOT_OUTLINE void dot_rows_km(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t m, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (m < 32 || k < 32) dot_edge(edge, src, ld, k, m), src = edge, ld = 32;
    for (int i = 0; i < 32; i += 8) {
        dot_q8 a[8], b[8];
        dot_q8 *to = (dot_q8 *)dst + i;
        for (int j = 0; j < 8; j++) a[j] = dot_four(src + j * ld + i, 8 * ld);
        for (int j = 0; j < 8; j += 2) b[j] = DOT_LOW16(a[j], a[j + 1]), b[j + 1] = DOT_HIGH16(a[j], a[j + 1]);
        for (int j = 0; j < 8; j += 4)
            for (int h = 0; h < 2; h++) {
                a[j + 2 * h] = DOT_LOW32(b[j + h], b[j + h + 2]);
                a[j + 2 * h + 1] = DOT_HIGH32(b[j + h], b[j + h + 2]);
            }
        for (int j = 0; j < 4; j++) to[2 * j] = DOT_LOW64(a[j], a[j + 4]), to[2 * j + 1] = DOT_HIGH64(a[j], a[j + 4]);
    }
}

/* src[n][k], row length ld: four by four pairs are transposed within 16 bytes. */
DOT_OUTLINE void dot_pairs_nk(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t n, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (n < 32 || k < 32) dot_edge(edge, src, ld, n, k), src = edge, ld = 32;
    for (int half = 0; half < 2; half++)
        for (int p = 0; p < 16; p += 4) {
            const uint16_t *from = src + half * 16 * ld + 2 * p;
            dot_q8 a[4], b[4];
            dot_q8 *to = (dot_q8 *)dst + 2 * p + half;
            for (int j = 0; j < 4; j++) a[j] = dot_four(from + j * ld, 4 * ld);
            b[0] = DOT_LOW32(a[0], a[1]), b[1] = DOT_HIGH32(a[0], a[1]);
            b[2] = DOT_LOW32(a[2], a[3]), b[3] = DOT_HIGH32(a[2], a[3]);
            to[0] = DOT_LOW64(b[0], b[2]), to[2] = DOT_HIGH64(b[0], b[2]);
            to[4] = DOT_LOW64(b[1], b[3]), to[6] = DOT_HIGH64(b[1], b[3]);
        }
}

/* src[k][n], row length ld: two rows become one of pairs. */
DOT_OUTLINE void dot_pairs_kn(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t n, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (n < 32 || k < 32) dot_edge(edge, src, ld, k, n), src = edge, ld = 32;
    for (int p = 0; p < 16; p++) {
        dot_q8 a = *(const dot_q8_any *)(src + 2 * p * ld), b = *(const dot_q8_any *)(src + (2 * p + 1) * ld);
        /* Alternating works within 16 bytes: the low eight go to the left columns, the high eight to the right. */
        a = __builtin_shufflevector(a, a, 0, 4, 1, 5, 2, 6, 3, 7);
        b = __builtin_shufflevector(b, b, 0, 4, 1, 5, 2, 6, 3, 7);
        ((dot_q8 *)dst)[2 * p] = DOT_LOW16(a, b), ((dot_q8 *)dst)[2 * p + 1] = DOT_HIGH16(a, b);
    }
}
#endif
