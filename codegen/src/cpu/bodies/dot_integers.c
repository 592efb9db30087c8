/* The panels of `dot.c` where the weight is stored as integer codes and rows are rounded to integers: in the place of `dot_codes.c`, with
 * its slots and
 *
 *   DOT_ROUNDED                   neighbours of a row that share a scale, a multiple of 32 that divides DOT_GROUP
 *
 * Scratch: integers of the rows, tile after tile; then what dot_row_scales and those after it tell.
 */
#define DOT_CHUNK (DOT_ROUNDED % 64 ? 32 : 64)
#define DOT_PIECES (DOT_K / DOT_ROUNDED)
#define DOT_AT(p, k) ((const uint8_t *)(DOT_CODES) + DOT_CODE_BYTES(DOT_CODE, (int64_t)(p) * DOT_K + (k)))
#define DOT_SCALED_AT(from, p, k)                                                                                      \
    ((const char *)(from) + ((int64_t)(p) * (DOT_K / DOT_GROUP) + (k) / DOT_GROUP) * DOT_NR * (DOT_SCALE_TYPE ? 2 : 4))
#define DOT_SCALE_AT(p, k) DOT_SCALED_AT(DOT_SCALES, p, k)
#define DOT_ROWS_AT(m) ((int8_t *)(scratch) + (m) * DOT_K)
#define DOT_ROW_SCALES(m) dot_row_scales(scratch, DOT_M, DOT_K, DOT_ROUNDED, m)
#define DOT_MINUS(m) dot_row_minus(scratch, DOT_M, DOT_K, DOT_ROUNDED, m)
#ifdef DOT_OFFSETS
#define DOT_OFFSET_AT(p, k) DOT_SCALED_AT(DOT_OFFSETS, p, k)
#define DOT_SUMS_AT(m, k) (dot_row_sums(scratch, DOT_M, DOT_K, DOT_ROUNDED, DOT_GROUP, m) + (k) / DOT_GROUP)
#else
#define DOT_OFFSET_AT(p, k) ((const void *)0)
#define DOT_SUMS_AT(m, k) ((float *)0)
#endif
_Static_assert(DOT_ROUNDED <= DOT_ROUNDED_MOST && DOT_GROUP % DOT_ROUNDED == 0, "groups of rows divide those of weights");

static void NAME(pack_rows)(void *const *bufs, const int64_t *dims, char *scratch, int64_t t, int64_t r, int64_t r_end)
{
    int64_t m0 = NAME(row)(dims, t), mr = NAME(row)(dims, t + 1) - m0;
    for (; r < (r_end < mr ? r_end : mr); r++) {
        float row[DOT_K] __attribute__((aligned(64)));
        PROLOGUE_ROW(m0 + r, row);
        dot_round_row(DOT_CODE, row, DOT_K, DOT_ROUNDED, DOT_ROWS_AT(m0) + r * DOT_CHUNK, DOT_CHUNK, mr * DOT_CHUNK,
                      DOT_ROW_SCALES(m0 + r), DOT_MINUS(m0 + r), DOT_SUMS_AT(m0 + r, 0), DOT_GROUP);
    }
}

/* Rows m + r .. of the tile that begins at m and has `height`, by panels from p on. */
#define DOT_INTEGER_TILE(mr, np)                                                                                       \
    dot_integer_tile(DOT_CODE, mr, np, DOT_ROWS_AT(m) + r * DOT_CHUNK, height, DOT_CHUNK, DOT_ROW_SCALES(m + r),       \
                     DOT_MINUS(m + r), DOT_SUMS_AT(m + r, 0), DOT_AT(p, 0), DOT_SCALE_AT(p, 0), DOT_SCALE_TYPE,        \
                     DOT_OFFSET_AT(p, 0), DOT_K, DOT_GROUP, DOT_ROUNDED, c)

/* One row (M = 1, a matrix-vector product): panels of which memory serves several best. */
static void NAME(one_row)(void *const *bufs, const int64_t *dims, const float *scratch, int64_t p, int64_t end)
{
    enum { m = 0, r = 0, height = 1 };
    float c[DOT_INTEGER_PANELS * DOT_NR] __attribute__((aligned(64)));
    for (int64_t n; p < end; p += n) {
        n = end - p < DOT_INTEGER_PANELS ? 1 : DOT_INTEGER_PANELS;
        if (n == 1) DOT_INTEGER_TILE(1, 1); else DOT_INTEGER_TILE(1, DOT_INTEGER_PANELS);
        for (int64_t q = 0; q < n; q++) NAME(finish)(bufs, dims, 0, 1, p + q, c + q * DOT_NR);
    }
}

/* Tiles t .. t_end by panels p .. p_end; where there is a matrix unit, which takes rows together, the system has refused it. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const float *scratch, int64_t t, int64_t t_end,
                             int64_t p, int64_t p_end)
{
    float c[DOT_INTEGER_ROWS * DOT_NR] __attribute__((aligned(64)));
    for (; p < p_end; p++)
        for (int64_t i = t; i < t_end; i++) {
            int64_t m = NAME(row)(dims, i), height = NAME(row)(dims, i + 1) - m;
            for (int64_t r = 0, n; r < height; r += n) {
#ifdef DOT_NO_MATRIX_UNIT
                n = height - r < DOT_INTEGER_ROWS ? height - r : DOT_INTEGER_ROWS;
                DOT_BY_HEIGHT(n, DOT_INTEGER_TILE);
#else
                n = 1;
                DOT_INTEGER_TILE(1, 1);
#endif
                NAME(finish)(bufs, dims, m + r, n, p, c);
            }
        }
}

static void NAME(one_tile)(void *const *bufs, const int64_t *dims, const float *scratch, int64_t p, int64_t end)
{
    NAME(many_tiles)(bufs, dims, scratch, 0, 1, p, end);
}

#ifndef DOT_NO_MATRIX_UNIT
/* `count` groups of the rows from m on, whose sums are in `parts`, that begin at k. */
DOT_INLINE void NAME(add_groups)(void *const *bufs, const int64_t *dims, char *scratch, int64_t m, int64_t rows, int64_t q,
                                 int64_t k, int count, const int32_t *parts, float *pieces, float *sums)
{
    const float *scales = DOT_ROW_SCALES(m) + k / DOT_ROUNDED;
#if DOT_GROUP == DOT_ROUNDED
    dot_add_groups(sums, parts, count, rows, scales, DOT_PIECES, DOT_SCALE_AT(q, k), DOT_SCALE_TYPE, DOT_OFFSET_AT(q, k),
                   DOT_SUMS_AT(m, k), k == 0);
#else
    dot_add_pieces(pieces, parts, count, rows, scales, DOT_PIECES, k % DOT_GROUP == 0);
    if ((k + count * DOT_ROUNDED) % DOT_GROUP == 0)
        dot_codes_add(sums, pieces, rows, DOT_SCALE_AT(q, k), DOT_SCALE_TYPE, k < DOT_GROUP, DOT_OFFSET_AT(q, k),
                      DOT_SUMS_AT(m, k), DOT_K / DOT_GROUP);
#endif
}

/* Units of the matrix unit: a block of a panel rests in the first-level cache while all rows of the unit use it. */
static void NAME(matrix_units)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    enum { batch = DOT_AMX_PARTS * DOT_ROUNDED, depth = batch < 512 ? 512 / batch * batch : batch, tile = DOT_AMX_ROWS * DOT_NR };
    float sums[DOT_MATRIX_TILES_PER_UNIT * tile] __attribute__((aligned(64)));
    float pieces[DOT_GROUP == DOT_ROUNDED ? 1 : DOT_MATRIX_TILES_PER_UNIT * tile] __attribute__((aligned(64)));
    int32_t parts[DOT_AMX_PARTS * tile] __attribute__((aligned(64)));
    int8_t w[DOT_CODE == DOT_INT4 ? depth * DOT_NR : 1] __attribute__((aligned(64)));
    int64_t tiles = NAME(tiles)(dims), blocks = NAME(row_blocks)(dims), groups = NAME(panel_groups)(dims);
    int rows_set = 0;
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u / groups, g = u % groups, t = b * tiles / blocks, wide = (b + 1) * tiles / blocks - t;
        for (int64_t q = NAME(panel)(dims, g), q_end = NAME(panel)(dims, g + 1); q < q_end; q++)
            for (int64_t k = 0, k_end; k < DOT_K; k = k_end) {
                k_end = k + depth < DOT_K ? k + depth : DOT_K;
                const int8_t *panel = DOT_CODE == DOT_INT4 ? w : (const int8_t *)DOT_AT(q, k);
                if (DOT_CODE == DOT_INT4) dot_signed_codes(w, DOT_AT(q, 0), k, k_end - k);
                for (int64_t i = 0; i < wide; i++) {
                    int64_t m = (t + i) * DOT_AMX_ROWS;
                    int rows = (int)(DOT_M - m < DOT_AMX_ROWS ? DOT_M - m : DOT_AMX_ROWS), count = 0;
                    float *piece = pieces + (DOT_GROUP == DOT_ROUNDED ? 0 : i * tile), *sum = sums + i * tile;
                    if (rows != rows_set) dot_amx_configure_integers(rows_set = rows, DOT_CHUNK);
                    for (int64_t s = k, from = k; s < k_end;) {
                        dot_amx_integer_group(rows, DOT_CHUNK, DOT_ROWS_AT(m) + s * rows, panel + (s - k) * DOT_NR, DOT_ROUNDED,
                                              parts + count++ * tile);
                        s += DOT_ROUNDED;
                        int whole = DOT_GROUP != DOT_ROUNDED && s % DOT_GROUP == 0;
                        if (count == DOT_AMX_PARTS)
                            NAME(add_groups)(bufs, dims, scratch, m, rows, q, from, DOT_AMX_PARTS, parts, piece, sum);
                        else if (whole || s == k_end)
                            NAME(add_groups)(bufs, dims, scratch, m, rows, q, from, count, parts, piece, sum);
                        else
                            continue;
                        count = 0, from = s;
                    }
                    if (k_end == DOT_K) NAME(finish)(bufs, dims, m, rows, q, sum);
                }
            }
    }
    dot_amx_release();
    dot_fence();
}
#endif
#undef DOT_INTEGER_TILE
#undef DOT_CHUNK
#undef DOT_PIECES
#undef DOT_ROWS_AT
#undef DOT_ROW_SCALES
#undef DOT_MINUS
