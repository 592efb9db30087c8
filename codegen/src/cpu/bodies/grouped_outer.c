/* Sums of outer products by groups of rows: out[e * M + m, n] = epilogue(sum over the rows r of group e of A(r, m) * B(r, n)).
 * Included once per kernel, after `dot_core.c` and `dot_blocks.c`; the emitter defines the slots before and undefines them
 * after.
 *
 *   NAME(x)                         prefixes a symbol of this kernel
 *   GROUPS, DOT_M, DOT_N            literals; OFFSETS: i32 [GROUPS + 1], ascending from 0 to the rows
 *   LOAD_A(dst, m, mr, k0, kc)      writes A(k0 .. k0 + kc, m .. m + mr) to dst[mr][DOT_KC]
 *   DOT_PAIRED                      DOT_BF16_PAIRS where A and B are bf16 values, and LOAD_A and LOAD_PANEL those of `dot_bf16_pairs.c`; else 0
 *   LOAD_PANEL(dst, n0, n, k0, kc)  writes B(k0 .. k0 + kc, n0 .. n0 + n) to dst[kc][32], zeros beyond n
 *   FETCH_PANEL(n0, n, k0, kc, part, parts)   prefetches a part of the same block
 *   EPILOGUE(m, n0, acc, valid)     consumes columns n0 .. n0 + valid of row m of the result
 *   PREFETCH(m, n0)                 prefetches what it reads and writes
 *
 * A unit is a block of rows of one matrix by a group of panels; a group without rows gives zeros. Rows ascend in one
 * accumulator, so that the bits do not depend on the threads. Where `grouped_amx.c` came before and the system admits the
 * matrix unit, that is the way taken.
 */
enum {
    NAME(deep) = DOT_KC << DOT_PAIRED, /* rows of the group in a block */
    NAME(panels) = (DOT_N + DOT_NR - 1) / DOT_NR,
    NAME(height) = 12 * DOT_MR,
    NAME(blocks) = (DOT_M + NAME(height) - 1) / NAME(height),
    NAME(width) = 8, /* panels of a group */
    NAME(groups) = (NAME(panels) + NAME(width) - 1) / NAME(width),
};

/* Rows m0 .. m_end of matrix e by panels p .. p_end. */
static void NAME(unit)(void *const *bufs, const int64_t *dims, int64_t e, int64_t m0, int64_t m_end, int64_t p,
                       int64_t p_end)
{
    static dot_tile_fn *const table[] = DOT_TABLE_FOR(DOT_PAIRED);
    float c[NAME(width) * NAME(height) * DOT_NR] __attribute__((aligned(64)));
    float a[NAME(height) * DOT_KC] __attribute__((aligned(64)));
    float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
    int64_t begin = (OFFSETS)[e], end = (OFFSETS)[e + 1], rows = m_end - m0, tiles = (rows + DOT_MR - 1) / DOT_MR;
    if (begin == end) memset(c, 0, sizeof c);
    for (int64_t k = begin; k < end; k += NAME(deep)) {
        int64_t kc = end - k < NAME(deep) ? end - k : NAME(deep), steps = (kc + DOT_PAIRED) >> DOT_PAIRED;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t m = t * rows / tiles, mr = (t + 1) * rows / tiles - m;
            LOAD_A(a + m * DOT_KC, m0 + m, mr, k, kc);
        }
        for (int64_t q = p; q < p_end; q++) {
            int64_t n0 = q * DOT_NR;
            int valid = DOT_N - n0 < DOT_NR ? (int)(DOT_N - n0) : DOT_NR;
            LOAD_PANEL(w, n0, valid, k, kc);
            int64_t next_k = q + 1 < p_end ? k : k + NAME(deep), next_n = (q + 1 < p_end ? q + 1 : p) * DOT_NR;
            int64_t next_kc = end - next_k < NAME(deep) ? end - next_k : NAME(deep);
            int next_valid = DOT_N - next_n < DOT_NR ? (int)(DOT_N - next_n) : DOT_NR;
            for (int64_t t = 0; t < tiles; t++) {
                if (next_k < end) FETCH_PANEL(next_n, next_valid, next_k, next_kc, t, tiles);
                int64_t m = t * rows / tiles, mr = (t + 1) * rows / tiles - m;
                const float *at = a + m * DOT_KC;
                if (k + kc == end)
                    for (int64_t r = 0; r < mr; r++) PREFETCH(e * DOT_M + m0 + m + r, n0);
                table[mr - 1](at, w, 0, steps, c + ((q - p) * rows + m) * DOT_NR, k == begin, at, at);
            }
        }
    }
    for (int64_t q = p; q < p_end; q++) {
        int64_t n0 = q * DOT_NR;
        int valid = DOT_N - n0 < DOT_NR ? (int)(DOT_N - n0) : DOT_NR;
        const float *from = c + (q - p) * rows * DOT_NR;
        for (int64_t m = 0; m < rows; m++) EPILOGUE(e * DOT_M + m0 + m, n0, from + m * DOT_NR, valid);
    }
}

#ifdef GROUPED_MATRIX_UNIT
#ifdef GROUPED_SPLIT
enum { NAME(high) = NAME(amx_highest), NAME(amx_groups) = (NAME(panels) + NAME(amx_widest) - 1) / NAME(amx_widest) };
#else
enum { NAME(high) = NAME(amx_near) / NAME(amx_whole), NAME(amx_groups) = NAME(groups) };
#endif
enum { NAME(tiles) = (DOT_M + 31) / 32, NAME(amx_blocks) = (NAME(tiles) + NAME(high) - 1) / NAME(high) };

/* Units are the like; a block's rows in tiles of 32. */
static void NAME(matrix_units)(void *const *bufs, const int64_t *dims, int64_t begin, int64_t end)
{
    enum { tiles = NAME(tiles), blocks = NAME(amx_blocks), groups = NAME(amx_groups) };
    char near[NAME(amx_bytes)] __attribute__((aligned(64)));
    dot_amx_configure(32);
    for (int64_t u = begin; u < end; u++) {
        int64_t g = u % groups, b = u / groups % blocks, e = u / groups / blocks;
        int64_t first = (OFFSETS)[e], count = (OFFSETS)[e + 1] - first;
        int64_t at[4] = {b * tiles / blocks, (b + 1) * tiles / blocks, g * NAME(panels) / groups,
                         (g + 1) * NAME(panels) / groups};
        NAME(amx_part)(bufs, dims, 0, near, u > begin && g > 0, e, first, count, count, at);
    }
    dot_amx_release();
    dot_fence();
}

int64_t NAME(units0)(const int64_t *dims)
{
    int64_t units = GROUPED_MATRIX_UNIT ? NAME(amx_blocks) * NAME(amx_groups) : NAME(blocks) * NAME(groups);
    return GROUPS * units;
}
#else
int64_t NAME(units0)(const int64_t *dims) { return (int64_t)GROUPS * NAME(blocks) * NAME(groups); }
#endif

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
#ifdef GROUPED_MATRIX_UNIT
    if (GROUPED_MATRIX_UNIT) {
        NAME(matrix_units)(bufs, dims, begin, end);
        return;
    }
#endif
    for (int64_t u = begin; u < end; u++) {
        int64_t g = u % NAME(groups), b = u / NAME(groups) % NAME(blocks), e = u / NAME(groups) / NAME(blocks);
        NAME(unit)(bufs, dims, e, b * DOT_M / NAME(blocks), (b + 1) * DOT_M / NAME(blocks),
                   g * NAME(panels) / NAME(groups), (g + 1) * NAME(panels) / NAME(groups));
    }
    dot_fence();
}
#undef GROUPED_MATRIX_UNIT
#undef GROUPED_SPLIT
#undef GROUPED_TILES
#undef GROUPED_PANELS
