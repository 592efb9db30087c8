/* The panels of `dot.c` where the weight is stored as codes: in the place of `dot_panels.c`.
 *
 *   DOT_CODES, DOT_SCALES         addresses of packed panels of codes and of their scales
 *   DOT_CODE                      DOT_INT4, DOT_INT8 or DOT_FP8
 *   DOT_GROUP                     neighbours along the sum that share a scale, 16 or a multiple of 32, which divide K
 *   DOT_SCALE_TYPE                0: f32, 1: bf16, 2: f16
 *   DOT_OFFSETS (optional)        address of packed panels of offsets, of the same type
 */
#define DOT_AT(p, k) ((const uint8_t *)(DOT_CODES) + DOT_CODE_BYTES(DOT_CODE, (int64_t)(p) * DOT_K + (k)))
#define DOT_SCALED_AT(from, p, k)                                                                                      \
    ((const char *)(from) + ((int64_t)(p) * (DOT_K / DOT_GROUP) + (k) / DOT_GROUP) * DOT_NR * (DOT_SCALE_TYPE ? 2 : 4))
#define DOT_SCALE_AT(p, k) DOT_SCALED_AT(DOT_SCALES, p, k)
#ifdef DOT_OFFSETS
#define DOT_OFFSET_AT(p, k) DOT_SCALED_AT(DOT_OFFSETS, p, k)
#define DOT_SUMS_AT(m, k) (NAME(group_sums)(dims, (char *)packed, m) + (k) / DOT_GROUP)
#else
#define DOT_OFFSET_AT(p, k) ((const void *)0)
#define DOT_SUMS_AT(m, k) ((const float *)0)
#endif

#define DOT_ROW_OF(n, chains)                                                                                          \
    dot_codes_row(DOT_CODE, n, chains, packed, DOT_AT(p, 0), DOT_SCALE_AT(p, 0), DOT_SCALE_TYPE, DOT_OFFSET_AT(p, 0),  \
                  DOT_SUMS_AT(0, 0), DOT_K, DOT_GROUP, c)
#ifdef DOT_NO_MATRIX_UNIT
#define DOT_ROW(n) DOT_ROW_OF(n, 1)
#else
#define DOT_ROW(n)                                                                                                     \
    if (DOT_MATRIX_UNIT) {                                                                                             \
        DOT_CODES_FLUSH;                                                                                               \
        DOT_ROW_OF(n, 2);                                                                                              \
        DOT_CODES_UNFLUSH;                                                                                             \
    } else                                                                                                             \
        DOT_ROW_OF(n, 1)
#endif

/* One row (M = 1, a matrix-vector product): four panels at a time, of which memory serves several best. */
static void NAME(one_row)(void *const *bufs, const int64_t *dims, const float *packed, int64_t p, int64_t end)
{
    float c[4 * DOT_NR] __attribute__((aligned(64)));
    for (int64_t n; p < end; p += n) {
        n = end - p >= 4 ? 4 : end - p >= 2 ? 2 : 1;
        if (n == 4) { DOT_ROW(4); } else if (n == 2) { DOT_ROW(2); } else { DOT_ROW(1); }
        for (int64_t q = 0; q < n; q++) NAME(finish)(bufs, dims, 0, 1, p + q, c + q * DOT_NR);
    }
}
#undef DOT_ROW
#undef DOT_ROW_OF

/* End of the step of a sum that begins at k: of its group, or of a block of the packed rows. */
DOT_INLINE int64_t NAME(step_end)(int64_t k)
{
    int64_t group = (k / DOT_GROUP + 1) * DOT_GROUP, block = (k / DOT_KC + 1) * DOT_KC;
    return group < block ? group : block;
}

/* Tiles t .. t_end by panels p .. p_end: the values of a step rest in the first-level cache while all tiles use them. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const float *packed, int64_t t, int64_t t_end,
                             int64_t p, int64_t p_end)
{
    static dot_tile_fn *const tiles[] = DOT_TABLE(f32);
    float sums[DOT_TILES_PER_UNIT * DOT_MR * DOT_NR] __attribute__((aligned(64)));
    float parts[DOT_TILES_PER_UNIT * DOT_MR * DOT_NR] __attribute__((aligned(64)));
    float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
    int64_t m0 = NAME(row)(dims, t);
    for (int64_t q = p; q < p_end; q++)
        for (int64_t k = 0, end; k < DOT_K; k = end) {
            end = NAME(step_end)(k);
            dot_codes_block(DOT_CODE, w, DOT_AT(q, 0), k, end - k);
            for (int64_t i = t; i < t_end; i++) {
                int64_t m = NAME(row)(dims, i), mr = NAME(row)(dims, i + 1) - m, at = (m - m0) * DOT_NR;
                const float *a = packed + m * NAME(depth) + k / DOT_KC * DOT_KC * mr + k % DOT_KC;
                if (end == DOT_K) NAME(prefetch_rows)(bufs, dims, m, mr, q);
                tiles[mr - 1](a, w, 0, end - k, parts + at, k % DOT_GROUP == 0, a, w);
                if (end % DOT_GROUP == 0)
                    dot_codes_add(sums + at, parts + at, mr, DOT_SCALE_AT(q, k), DOT_SCALE_TYPE, k < DOT_GROUP,
                                  DOT_OFFSET_AT(q, k), DOT_SUMS_AT(m, k), DOT_K / DOT_GROUP);
                if (end == DOT_K) NAME(finish)(bufs, dims, m, mr, q, sums + at);
            }
        }
}

static void NAME(one_tile)(void *const *bufs, const int64_t *dims, const float *a, int64_t p, int64_t end)
{
    NAME(many_tiles)(bufs, dims, a, 0, 1, p, end);
}

#ifndef DOT_NO_MATRIX_UNIT
/* Units of the matrix unit: the values of a block of a panel are made once, and rest in the first-level cache while all rows of the
 * unit use them. */
static void NAME(matrix_units)(void *const *bufs, const int64_t *dims, char *packed, int64_t begin, int64_t end)
{
    enum { depth = DOT_GROUP % 512 == 0 || DOT_GROUP > 512 ? 512 : 512 / DOT_GROUP * DOT_GROUP, tile = DOT_AMX_ROWS * DOT_NR };
    float sums[DOT_MATRIX_TILES_PER_UNIT * tile] __attribute__((aligned(64)));
    float parts[DOT_MATRIX_TILES_PER_UNIT * tile] __attribute__((aligned(64)));
    uint32_t w[depth / 2 * DOT_NR] __attribute__((aligned(64)));
    int64_t tiles = NAME(tiles)(dims), blocks = NAME(row_blocks)(dims), groups = NAME(panel_groups)(dims);
    int rows_set = 0;
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u / groups, g = u % groups, t = b * tiles / blocks, wide = (b + 1) * tiles / blocks - t;
        for (int64_t q = NAME(panel)(dims, g), q_end = NAME(panel)(dims, g + 1); q < q_end; q++)
            for (int64_t k = 0, k_end; k < DOT_K; k = k_end) {
                k_end = k + depth < DOT_K ? k + depth : DOT_K;
                dot_codes_pairs(DOT_CODE, w, DOT_AT(q, 0), k, k_end - k);
                for (int64_t i = 0; i < wide; i++) {
                    int64_t m = (t + i) * DOT_AMX_ROWS;
                    int rows = (int)(DOT_M - m < DOT_AMX_ROWS ? DOT_M - m : DOT_AMX_ROWS);
                    const uint16_t *a = (const uint16_t *)packed + m * DOT_K + k * rows;
                    float *part = parts + i * tile, *sum = sums + i * tile;
                    if (rows != rows_set) dot_amx_configure(rows_set = rows);
                    for (int64_t s = k, s_end; s < k_end; s = s_end) {
                        s_end = (s / DOT_GROUP + 1) * DOT_GROUP;
                        if (s_end > k_end) s_end = k_end;
                        dot_amx_open(rows, part, s % DOT_GROUP == 0);
                        for (int64_t l = s; l < s_end; l += 32, a += rows * 32) {
                            dot_amx_sides(rows, a, w + (l - k) / 2 * DOT_NR, 1);
                            DOT_AMX_DOT(0, 4, 6); DOT_AMX_DOT(1, 4, 7);
                            if (rows > 16) { DOT_AMX_DOT(2, 5, 6); DOT_AMX_DOT(3, 5, 7); }
                        }
                        dot_amx_close(rows, part);
                        if (s_end % DOT_GROUP == 0) {
                            DOT_CODES_FLUSH;
                            dot_codes_add(sum, part, rows, DOT_SCALE_AT(q, s), DOT_SCALE_TYPE, s < DOT_GROUP,
                                          DOT_OFFSET_AT(q, s), DOT_SUMS_AT(m, s), DOT_K / DOT_GROUP);
                            DOT_CODES_UNFLUSH;
                        }
                    }
                    if (k_end == DOT_K) NAME(finish)(bufs, dims, m, rows, q, sum);
                }
            }
    }
    dot_amx_release();
    dot_fence();
}
#endif

