/* Blocks of 32 x 32 numbers for the matrix unit, or of 16 steps of words for `dot_bf16_pairs.c`, from row-major sides of a dot that
 * nobody packed ahead. Written once per translation unit, after `dot_amx.c`.
 *
 *   rows   dst[32 m][32 k], a left side's block: what tiles 4 and 5 load
 *   pairs  dst[16][32 n][2], a right side's block: pairs of k side by side, what tiles 6 and 7 load
 *
 * Numbers of bf16 are moved, never changed; beyond the ends of a side they are zero. A number of f32 is the sum of three of
 * bf16, exactly (but below 2^-110, where the last bits are lost): the nearest one, the nearest to the rest, and the rest. A sum
 * with a number that is not finite, or rounds to none (from 3.39e38 on), is NaN: zeros and signs of the other side's rests meet it.
 * Each is a block of its own, one after another. The matrix unit adds products in the order of k within a step, which is no
 * part of a sum's meaning, so that an f32 block pairs k with k + 16, and shuffles nothing.
 */
#if defined(DOT_AMX_ROWS) && defined(__AVX512BW__) || DOT_BF16_PAIRS
typedef uint16_t dot_h32 __attribute__((vector_size(64), may_alias));
typedef uint32_t dot_w16 __attribute__((vector_size(64), may_alias));
typedef uint64_t dot_q8 __attribute__((vector_size(64), may_alias));
typedef uint64_t dot_q8_any __attribute__((vector_size(64), aligned(2), may_alias));

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

#define DOT_EVEN128(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13)
#define DOT_ODD128(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15)

/* 16 x 16 words of 32 bits, transposed. */
DOT_INLINE void dot_transpose(dot_q8 *r)
{
    dot_q8 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) t[i] = DOT_LOW32(r[i], r[i + 1]), t[i + 1] = DOT_HIGH32(r[i], r[i + 1]);
    /* r[4 g + j] in its group of 16 bytes l: word 4 l + j of rows 4 g .. 4 g + 3. */
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = DOT_LOW64(t[i], t[i + 2]), r[i + 1] = DOT_HIGH64(t[i], t[i + 2]);
        r[i + 2] = DOT_LOW64(t[i + 1], t[i + 3]), r[i + 3] = DOT_HIGH64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        t[j] = DOT_EVEN128(r[j], r[j + 4]), t[j + 4] = DOT_ODD128(r[j], r[j + 4]);
        t[j + 8] = DOT_EVEN128(r[j + 8], r[j + 12]), t[j + 12] = DOT_ODD128(r[j + 8], r[j + 12]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        r[j] = DOT_EVEN128(t[j], t[j + 8]), r[j + 8] = DOT_ODD128(t[j], t[j + 8]);
        r[j + 4] = DOT_EVEN128(t[j + 4], t[j + 12]), r[j + 12] = DOT_ODD128(t[j + 4], t[j + 12]);
    }
}

DOT_INLINE dot_q8 dot_line(const uint16_t *at) { return *(const dot_q8_any *)at; }

/* The top left of a block, the rest zero. */
DOT_OUTLINE void dot_edge(uint16_t *edge, const uint16_t *src, int64_t ld, int64_t rows, int64_t columns)
{
    memset(edge, 0, 2048);
    for (int64_t r = 0; r < rows; r++) memcpy(edge + r * 32, src + r * ld, (size_t)columns * sizeof *edge);
}

/* src[m][k], row length ld. */
DOT_OUTLINE void dot_rows_mk(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t m, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (m < 32 || k < 32) dot_edge(edge, src, ld, m, k), src = edge, ld = 32;
    for (int r = 0; r < 32; r++) ((dot_q8 *)dst)[r] = dot_line(src + r * ld);
}

/* src[k][m], row length ld. */
DOT_OUTLINE void dot_rows_km(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t m, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (m < 32 || k < 32) dot_edge(edge, src, ld, k, m), src = edge, ld = 32;
    dot_q8 low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        dot_q8 even = dot_line(src + 2 * i * ld), odd = dot_line(src + (2 * i + 1) * ld);
        low[i] = DOT_LOW16(even, odd), high[i] = DOT_HIGH16(even, odd);
    }
    dot_transpose(low), dot_transpose(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        dot_q8 *to = (dot_q8 *)dst + i / 4 * 8 + i % 4;
        to[0] = low[i], to[4] = high[i];
    }
}

/* src[n][k], row length ld. */
DOT_OUTLINE void dot_pairs_nk(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t n, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (n < 32 || k < 32) dot_edge(edge, src, ld, n, k), src = edge, ld = 32;
    for (int half = 0; half < 2; half++) {
        dot_q8 r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = dot_line(src + (half * 16 + i) * ld);
        dot_transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) ((dot_q8 *)dst)[2 * i + half] = r[i];
    }
}

/* src[k][n], row length ld: two rows become one of pairs. */
DOT_OUTLINE void dot_pairs_kn(uint16_t *dst, const uint16_t *src, int64_t ld, int64_t n, int64_t k)
{
    uint16_t edge[1024] __attribute__((aligned(64)));
    if (n < 32 || k < 32) dot_edge(edge, src, ld, k, n), src = edge, ld = 32;
    for (int p = 0; p < 16; p++) {
        dot_q8 a = dot_line(src + 2 * p * ld), b = dot_line(src + (2 * p + 1) * ld);
        /* Alternating works within 16 bytes: the low eight go to the left columns, the high eight to the right. */
        a = __builtin_shufflevector(a, a, 0, 4, 1, 5, 2, 6, 3, 7);
        b = __builtin_shufflevector(b, b, 0, 4, 1, 5, 2, 6, 3, 7);
        ((dot_q8 *)dst)[2 * p] = DOT_LOW16(a, b), ((dot_q8 *)dst)[2 * p + 1] = DOT_HIGH16(a, b);
    }
}

#endif

#if defined(DOT_AMX_ROWS) && defined(__AVX512BW__)
#define DOT_PAIRS
#define DOT_PAIRS_STEPS 8 /* of 32 of k: two blocks of a panel, one in use and one in the making, stay in the first-level cache */
#define DOT_CELL 3072     /* numbers of a block in three pieces, one after another */
#define DOT_SPLIT_PARTS 8 /* of a block, between which the lines of the next one are asked for */

/* The pieces of x, each in the upper half of a word whose lower half is zero. The rest of a number that is not finite is NaN,
 * whatever rounding makes of its bits. */
DOT_INLINE void dot_split(dot_vu *restrict pieces, dot_vf x)
{
    pieces[0] = ((dot_vu)x + 0x8000u) & 0xffff0000u;
    dot_vf rest = x - (dot_vf)pieces[0];
    pieces[1] = ((dot_vu)rest + 0x8000u) & 0xffff0000u;
    pieces[2] = (dot_vu)(rest - (dot_vf)pieces[1]) & 0xffff0000u;
}

/* A line of each piece: 16 times the pair of a word of `low` and one of `high`. */
DOT_INLINE void dot_split_pairs(uint16_t *dst, dot_vf low, dot_vf high)
{
    dot_vu a[3], b[3];
    dot_split(a, low), dot_split(b, high);
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) *(dot_w16 *)(dst + i * 1024) = (dot_w16)(a[i] >> 16 | b[i]);
}

/* Part `part` of rows[32][k] of lines src[32][k], row length ld. */
DOT_INLINE void dot_split_along(uint16_t *dst, const float *src, int64_t ld, int part)
{
#pragma GCC unroll 4
    for (int r = part * 4; r < part * 4 + 4; r++)
        dot_split_pairs(dst + r * 32, dot_load(src + r * ld), dot_load(src + r * ld + 16));
}

/* The same of lines src[32 k][32 m]: four rows of 16 k are transposed at once. */
DOT_INLINE void dot_split_across(uint16_t *dst, const float *src, int64_t ld, int part)
{
    dot_vf low[4], high[4];
    dot_transpose4x4(low, src, 0, part * 4, ld), dot_transpose4x4(high, src, 0, 16 * ld + part * 4, ld);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) dot_split_pairs(dst + (part * 4 + i) * 32, low[i], high[i]);
}

/* Part `part` of pairs[16][32 n] of lines src[32 n][k]: four pairs of 16 columns. */
DOT_INLINE void dot_split_columns(uint16_t *dst, const float *src, int64_t ld, int part)
{
    int p = part / 2 * 4, half = part % 2 * 16;
    dot_vf low[4], high[4];
    dot_transpose4x4(low, src, 0, half * ld + p, ld), dot_transpose4x4(high, src, 0, half * ld + 16 + p, ld);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) dot_split_pairs(dst + (p + i) * 64 + half * 2, low[i], high[i]);
}

/* The same of lines src[32 k][n]. */
DOT_INLINE void dot_split_lines(uint16_t *dst, const float *src, int64_t ld, int part)
{
#pragma GCC unroll 2
    for (int p = part * 2; p < part * 2 + 2; p++) {
        const float *low = src + p * ld, *high = low + 16 * ld;
        dot_split_pairs(dst + p * 64, dot_load(low), dot_load(high));
        dot_split_pairs(dst + p * 64 + 32, dot_load(low + 16), dot_load(high + 16));
    }
}

/* A block of m rows (columns) by k, whose lines are so many, so long; meanwhile the 32 lines at `next` arrive. At an edge zeros
 * surround the numbers. */
#define DOT_SPLIT(name, way, lines, length)                                                                            \
    DOT_OUTLINE void name(uint16_t *dst, const float *src, int64_t ld, int64_t m, int64_t k, const float *next)        \
    {                                                                                                                  \
        float edge[1024] __attribute__((aligned(64)));                                                                 \
        int64_t apart = ld;                                                                                            \
        if (m < 32 || k < 32) {                                                                                        \
            memset(edge, 0, sizeof edge);                                                                              \
            for (int64_t r = 0; r < lines; r++) memcpy(edge + r * 32, src + r * ld, (size_t)length * sizeof *edge);    \
            src = edge, apart = 32;                                                                                    \
        }                                                                                                              \
        for (int part = 0; part < DOT_SPLIT_PARTS; part++) {                                                           \
            for (int r = 0; r < 32 / DOT_SPLIT_PARTS; r++, next += ld)                                                 \
                __builtin_prefetch(next, 0, 3), __builtin_prefetch(next + 16, 0, 3);                                   \
            way(dst, src, apart, part);                                                                                \
        }                                                                                                              \
    }
DOT_SPLIT(dot_rows_mk_f32, dot_split_along, m, k)    /* src[m][k], row length ld */
DOT_SPLIT(dot_rows_km_f32, dot_split_across, k, m)   /* src[k][m] */
DOT_SPLIT(dot_pairs_nk_f32, dot_split_columns, m, k) /* src[n][k] */
DOT_SPLIT(dot_pairs_kn_f32, dot_split_lines, k, m)   /* src[k][n] */
#undef DOT_SPLIT

/* A cell of a grid of lines of 32 by steps. */
struct dot_cell {
    int64_t line, step;
};

/* The n-th in the order of memory, whose lines go along the steps or across. */
DOT_INLINE struct dot_cell dot_cell_at(int along, int64_t n, int64_t lines, int64_t steps)
{
    return along ? (struct dot_cell){n / steps, n % steps} : (struct dot_cell){n % lines, n / lines};
}

/* A row of a tile of 32, its line in each of the blocks that follow one another from `dst`; zeros follow its k numbers. */
DOT_INLINE void dot_split_row(uint16_t *dst, const float *row, int64_t k)
{
    for (int64_t i = 0; i < k; i += 32, dst += DOT_CELL) dot_split_pairs(dst, dot_load(row + i), dot_load(row + i + 16));
}
#endif
