/* One product of rows in groups: out[m, n] = epilogue(m, n, sum over k of A(m, k) * W_e(n, k)), e the group of row m. Included
 * once per kernel, after `dot_core.c` and `dot_blocks.c`, whose tiles and packing it uses; the emitter defines the slots before
 * and undefines them after.
 *
 *   NAME(x)                         prefixes a symbol of this kernel
 *   ROWS                            rows of all groups, a runtime expression over `dims`; GROUPS, DOT_N and DOT_K are literals
 *   OFFSETS                         i32 [GROUPS + 1], ascending from 0 to ROWS
 *   PROLOGUE_ROW(m, row)            writes A(m, 0..K) as f32 to `row`
 *   EPILOGUE(m, n0, acc, valid)     consumes columns n0 .. n0 + valid of row m, n0 a multiple of 32, valid in 1..=32
 *   PREFETCH(m, n0)                 prefetches what it reads and writes
 *   DOT_PAIRED                      DOT_BF16_PAIRS where A and the matrices are bf16 values, and LOAD_PANEL is that of `dot_bf16_pairs.c`; else 0
 *   one source of the matrices:
 *     DOT_WEIGHT_F32 / DOT_WEIGHT_BF16   address of packed panels, those of a group one after another
 *     DOT_CODES and the slots of `dot_codes.c` beside it, or of `dot_integers.c`: panels of codes and of their scales; N is a multiple of 32 then
 *     LOAD_PANEL(dst, e, n0, n, k0, kc)  writes columns n0 .. n0 + n of matrix e to dst[kc][32], zeros beyond n, and
 *     FETCH_PANEL(e, n0, n, k0, kc, part, parts)   prefetches a part of the same block
 *
 * Rows of a group are cut into blocks, blocks into tiles of near-equal height. Units are counted by what there may be at
 * most, for how many rows a group has is data; those beyond the last block return at once. Phase 0 packs the rows of a block
 * into scratch, phase 1 multiplies blocks by groups of panels. Every output has one accumulator, k ascending, so that a
 * row's bits depend neither on the other rows nor on the threads. Where `grouped_amx.c` came before and the system admits the
 * matrix unit, that is the way taken; scratch then holds the rows as bf16.
 */
enum {
    NAME(panels) = (DOT_N + DOT_NR - 1) / DOT_NR,
    NAME(sum) = (DOT_K + DOT_PAIRED) >> DOT_PAIRED,         /* steps of a sum */
    NAME(depth) = (NAME(sum) + DOT_KC - 1) / DOT_KC * DOT_KC, /* floats, or bf16 pairs, a packed row occupies */
    NAME(block) = 12 * DOT_MR,
};
#ifdef GROUPED_MATRIX_UNIT
enum { NAME(depth32) = (DOT_K + 31) / 32 };
#define GROUPED_HEIGHT (GROUPED_MATRIX_UNIT ? GROUPED_TILES * 32 : NAME(block))
#define GROUPED_WIDTH (GROUPED_MATRIX_UNIT ? GROUPED_PANELS : NAME(panels))
#else
#define GROUPED_HEIGHT NAME(block)
#define GROUPED_WIDTH NAME(panels)
#endif
_Static_assert(DOT_K > 0 && DOT_N > 0 && DOT_K <= 1 << 17, "K must lie in 1..=131072: a row is staged on the stack");

#define GROUPED_FEW 16    /* rows that one thread packs: waking others costs more */
#define GROUPED_UNITS 64  /* enough for a few threads to balance */

#ifdef DOT_ROUNDED
/* Scratch: integers of the rows, tile after tile; then what dot_row_scales and those after it tell. */
#define GROUPED_TALL DOT_INTEGER_ROWS
#define GROUPED_CHUNK (DOT_ROUNDED % 64 ? 32 : 64)
#define GROUPED_ROWS_AT(m) ((int8_t *)(scratch) + (m) * DOT_K)
#define GROUPED_ROW_SCALES(m) dot_row_scales(scratch, ROWS, DOT_K, DOT_ROUNDED, m)
#define GROUPED_MINUS(m) dot_row_minus(scratch, ROWS, DOT_K, DOT_ROUNDED, m)
#ifdef DOT_OFFSETS
#define GROUPED_SUMS(m) dot_row_sums(scratch, ROWS, DOT_K, DOT_ROUNDED, DOT_GROUP, m)
#else
#define GROUPED_SUMS(m) ((float *)0)
#endif
_Static_assert(DOT_ROUNDED <= DOT_ROUNDED_MOST && DOT_GROUP % DOT_ROUNDED == 0, "groups of rows divide those of weights");
#else
#define GROUPED_TALL DOT_MR /* most rows of a tile */
#ifdef DOT_OFFSETS
/* Sums of the groups of a row lie behind the packed rows. */
#define GROUPED_SUMS(m) ((float *)(scratch) + ROWS * NAME(depth) + (m) * (DOT_K / DOT_GROUP))
#endif
#endif

/* Most blocks that these rows may make. */
static int64_t NAME(blocks)(const int64_t *dims)
{
    return ROWS / GROUPED_HEIGHT + (ROWS < GROUPS ? ROWS : GROUPS);
}

struct NAME(rows) {
    int64_t group, first, count, tiles;
};

/* Block b, and how many blocks its group has after it; no rows beyond the last block. */
static struct NAME(rows) NAME(find)(void *const *bufs, int64_t b)
{
    const int32_t *offsets = OFFSETS;
    for (int64_t e = 0; e < GROUPS; e++) {
        int64_t n = offsets[e + 1] - offsets[e], blocks = (n + GROUPED_HEIGHT - 1) / GROUPED_HEIGHT;
        if (b < blocks) {
            int64_t first = b * n / blocks, count = (b + 1) * n / blocks - first;
            return (struct NAME(rows)){e, offsets[e] + first, count, (count + GROUPED_TALL - 1) / GROUPED_TALL};
        }
        b -= blocks;
    }
    return (struct NAME(rows)){0};
}

/* The packed rows of a block. */
static const float *NAME(packed)(const char *scratch, const struct NAME(rows) *r)
{
    return (const float *)scratch + r->first * NAME(depth);
}

/* First row of tile t of a block, counted from the block's. */
static int64_t NAME(row)(const struct NAME(rows) *r, int64_t t) { return t * r->count / r->tiles; }

#ifdef GROUPED_SPLIT
/* The first tile of block b in scratch: tiles are whole, so that each block may take one more than its rows fill. */
static int64_t NAME(tile)(int64_t b, int64_t first) { return first / 32 + b; }
#endif

int64_t NAME(units0)(const int64_t *dims) { return ROWS <= GROUPED_FEW ? ROWS > 0 : NAME(blocks)(dims); }

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    if (ROWS <= GROUPED_FEW) begin = 0, end = NAME(blocks)(dims);
    for (int64_t b = begin; b < end; b++) {
        struct NAME(rows) r = NAME(find)(bufs, b);
        for (int64_t t = 0; t < r.tiles; t++) {
            int64_t m0 = NAME(row)(&r, t), mr = NAME(row)(&r, t + 1) - m0;
            float *tile = (float *)scratch + (r.first + m0) * NAME(depth);
            for (int64_t i = 0; i < mr; i++) {
                float row[(DOT_K + 31) / 32 * 32] __attribute__((aligned(64)));
                PROLOGUE_ROW(r.first + m0 + i, row);
#if defined(DOT_ROUNDED)
                int64_t m = r.first + m0 + i;
                dot_round_row(DOT_CODE, row, DOT_K, DOT_ROUNDED, GROUPED_ROWS_AT(m - i) + i * GROUPED_CHUNK, GROUPED_CHUNK,
                              mr * GROUPED_CHUNK, GROUPED_ROW_SCALES(m), GROUPED_MINUS(m), GROUPED_SUMS(m), DOT_GROUP);
                continue;
#elif defined(DOT_OFFSETS)
                dot_sum_groups(GROUPED_SUMS(r.first + m0 + i), row, 0, DOT_K, DOT_GROUP);
#endif
#if defined(GROUPED_SPLIT)
                if (GROUPED_MATRIX_UNIT) {
                    uint16_t *cells = (uint16_t *)scratch + (NAME(tile)(b, r.first) + (m0 + i) / 32) * NAME(depth32) * DOT_CELL;
                    memset(row + DOT_K, 0, sizeof row - DOT_K * sizeof *row);
                    dot_split_row(cells + (m0 + i) % 32 * 32, row, DOT_K);
                    continue;
                }
#elif defined(GROUPED_MATRIX_UNIT)
                if (GROUPED_MATRIX_UNIT) {
                    NAME(amx_keep_row)((uint16_t *)scratch + (r.first + m0 + i) * DOT_K, row);
                    continue;
                }
#endif
                for (int64_t k = 0; k < NAME(sum); k += DOT_KC)
                    dot_keep(tile + k * mr + i * DOT_KC, row + (k << DOT_PAIRED), DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
            }
        }
    }
}

static int64_t NAME(panel_groups)(const int64_t *dims)
{
    int64_t blocks = NAME(blocks)(dims), wanted = (GROUPED_UNITS + blocks - 1) / blocks;
    int64_t least = (NAME(panels) + GROUPED_WIDTH - 1) / GROUPED_WIDTH;
    if (wanted < 4) wanted = 4;
    if (wanted < least) wanted = least;
    return wanted < NAME(panels) ? wanted : NAME(panels);
}

int64_t NAME(units1)(const int64_t *dims) { return ROWS > 0 ? NAME(blocks)(dims) * NAME(panel_groups)(dims) : 0; }

/* Rows of a result lie far apart, so that each line of it waits for memory unless a tile computes meanwhile. */
DOT_INLINE void NAME(prefetch_rows)(void *const *bufs, const int64_t *dims, int64_t m0, int64_t rows, int64_t panel)
{
    for (int64_t r = 0; r < rows; r++) PREFETCH(m0 + r, panel * DOT_NR);
}

/* A function of its own, into which the epilogue is inlined once: its constants are made once for several rows. */
DOT_OUTLINE void NAME(finish)(void *const *bufs, const int64_t *dims __attribute__((unused)), int64_t m0,
                              int64_t rows, int64_t panel, const float *c)
{
    int64_t n0 = panel * DOT_NR;
    int valid = DOT_N - n0 < DOT_NR ? (int)(DOT_N - n0) : DOT_NR;
    for (int64_t r = 0; r < rows; r++, c += DOT_NR) EPILOGUE(m0 + r, n0, c, valid);
}

#if defined(DOT_WEIGHT_F32)
#define GROUPED_NARROW 0
#define GROUPED_WORDS ((int64_t)DOT_K * DOT_NR)
#define GROUPED_AT(e, p, k)                                                                                            \
    ((const float *)(DOT_WEIGHT_F32) + ((e) * NAME(panels) + (p)) * GROUPED_WORDS + (k) * DOT_NR)
#define GROUPED_DIRECT(x) dot_f32_##x
#define GROUPED_TABLE DOT_TABLE(f32)
#elif defined(DOT_WEIGHT_BF16)
#define GROUPED_NARROW 1
#define GROUPED_WORDS ((int64_t)(DOT_K + 1) / 2 * DOT_NR)
#define GROUPED_AT(e, p, k)                                                                                            \
    ((const uint32_t *)(DOT_WEIGHT_BF16) + ((e) * NAME(panels) + (p)) * GROUPED_WORDS + ((k) << DOT_PAIRED) / 2 * DOT_NR)
#if DOT_PAIRED
#define GROUPED_DIRECT(x) dot_pair_##x
#define GROUPED_TABLE DOT_TABLE(pair)
#else
#define GROUPED_DIRECT(x) dot_bf16_##x
#define GROUPED_TABLE DOT_TABLE(bf16)
#endif
#endif

/* Whether tiles read panels where they lie, and do not widen a block of them first. */
#if defined(DOT_WEIGHT_F32) || defined(DOT_WEIGHT_BF16) && (DOT_PAIRED || DOT_LANES == 8)
#define GROUPED_IN_PLACE 1
#define GROUPED_BY GROUPED_TABLE
#else
#define GROUPED_IN_PLACE 0
#define GROUPED_BY DOT_TABLE_FOR(DOT_PAIRED)
#endif

#ifdef GROUPED_AT
/* One tile: panels are used once, so they are read where they lie, whatever their type; of a single row
 * DOT_ROW_PANELS at a time. */
static void NAME(one_tile)(void *const *bufs, const int64_t *dims, const float *a, const struct NAME(rows) *r, int64_t p,
                           int64_t end)
{
    static dot_tile_fn *const direct[] = GROUPED_TABLE;
    float c[DOT_MR * DOT_NR] __attribute__((aligned(64)));
    for (; DOT_ROW_PANELS > 1 && r->count == 1 && p + DOT_ROW_PANELS <= end; p += DOT_ROW_PANELS) {
#if DOT_ROW_PANELS == 4
        GROUPED_DIRECT(1x4)(a, GROUPED_AT(r->group, p, 0), GROUPED_WORDS, NAME(sum), c, 1, a, a);
#else
        GROUPED_DIRECT(1x2)(a, GROUPED_AT(r->group, p, 0), GROUPED_WORDS, NAME(sum), c, 1, a, a);
#endif
        for (int q = 0; q < DOT_ROW_PANELS; q++) NAME(finish)(bufs, dims, r->first, 1, p + q, c + q * DOT_NR);
    }
    for (; p < end; p++) {
        for (int64_t k = 0; k < NAME(sum); k += DOT_KC) {
            int64_t kc = NAME(sum) - k < DOT_KC ? NAME(sum) - k : DOT_KC;
            const void *next_w = DOT_LANES == 8 && GROUPED_NARROW ? (const void *)GROUPED_AT(r->group, p, k + kc) : a;
            direct[r->count - 1](a + k * r->count, GROUPED_AT(r->group, p, k), 0, kc, c, k == 0, a, next_w);
        }
        NAME(finish)(bufs, dims, r->first, r->count, p, c);
    }
}
#endif

#ifdef DOT_CODES
#define GROUPED_PANEL_AT(e, p) (((int64_t)(e) * NAME(panels) + (p)) * DOT_K)
#define GROUPED_CODES_AT(e, p, k) ((const uint8_t *)(DOT_CODES) + DOT_CODE_BYTES(DOT_CODE, GROUPED_PANEL_AT(e, p) + (k)))
#define GROUPED_SCALED_AT(from, e, p, k)                                                                               \
    ((const char *)(from) + (GROUPED_PANEL_AT(e, p) + (k)) / DOT_GROUP * DOT_NR * (DOT_SCALE_TYPE ? 2 : 4))
#ifdef DOT_OFFSETS
#define GROUPED_OFFSETS_AT(e, p, k) GROUPED_SCALED_AT(DOT_OFFSETS, e, p, k)
#define GROUPED_SUMS_AT(m, k) (GROUPED_SUMS(r->first + (m)) + (k) / DOT_GROUP)
#else
#define GROUPED_OFFSETS_AT(e, p, k) ((const void *)0)
#define GROUPED_SUMS_AT(m, k) ((const float *)0)
#endif
#endif

#if defined(DOT_ROUNDED)
#define GROUPED_TILE_OF(rows, n)                                                                                       \
    dot_integer_tile(DOT_CODE, rows, n, GROUPED_ROWS_AT(m), rows, GROUPED_CHUNK, GROUPED_ROW_SCALES(m), GROUPED_MINUS(m),  \
                     GROUPED_SUMS(m), GROUPED_CODES_AT(e, p, 0), GROUPED_SCALED_AT(DOT_SCALES, e, p, 0), DOT_SCALE_TYPE, \
                     GROUPED_OFFSETS_AT(e, p, 0), DOT_K, DOT_GROUP, DOT_ROUNDED, c)

/* A block by panels p .. end: a panel rests near while all tiles use it. Of a row alone some at a time, of which memory serves several best. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const char *scratch, const struct NAME(rows) *r, int64_t p,
                             int64_t end)
{
    float c[DOT_INTEGER_ROWS * DOT_NR] __attribute__((aligned(64)));
    int64_t e = r->group;
    for (int64_t n; p < end; p += n) {
        n = r->count == 1 && end - p >= DOT_INTEGER_PANELS ? DOT_INTEGER_PANELS : 1;
        for (int64_t t = 0; t < r->tiles; t++) {
            int64_t m = r->first + NAME(row)(r, t), mr = r->first + NAME(row)(r, t + 1) - m;
            if (n > 1)
                GROUPED_TILE_OF(1, DOT_INTEGER_PANELS);
            else
                DOT_BY_HEIGHT(mr, GROUPED_TILE_OF);
            for (int64_t q = 0; q < n; q++) NAME(finish)(bufs, dims, m, mr, p + q, c + q * DOT_NR);
        }
    }
}
#elif defined(DOT_CODES)
#define GROUPED_ROW_OF(n)                                                                                              \
    dot_codes_row(DOT_CODE, n, 1, packed, GROUPED_CODES_AT(e, p, 0), GROUPED_SCALED_AT(DOT_SCALES, e, p, 0), DOT_SCALE_TYPE, \
                  GROUPED_OFFSETS_AT(e, p, 0), GROUPED_SUMS_AT(0, 0), DOT_K, DOT_GROUP, c)

/* A block of a single row by panels p .. end, some at a time where vectors are wide enough that little is written out for each. */
static void NAME(one_row)(void *const *bufs, const int64_t *dims, const char *scratch, const struct NAME(rows) *r, int64_t p,
                          int64_t end)
{
    const float *packed = NAME(packed)(scratch, r);
    float c[4 * DOT_NR] __attribute__((aligned(64)));
    int64_t e = r->group;
    for (int64_t n; p < end; p += n) {
        n = DOT_LANES >= 8 && end - p >= 4 ? 4 : 1;
        if (n == 4) GROUPED_ROW_OF(4);
        else GROUPED_ROW_OF(1);
        for (int64_t q = 0; q < n; q++) NAME(finish)(bufs, dims, r->first, 1, p + q, c + q * DOT_NR);
    }
}

/* A block by panels p .. end: the values of a group, or of what of it a block of the packed rows has, rest in the first-level cache
 * while all tiles use them. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const char *scratch, const struct NAME(rows) *r,
                             int64_t p, int64_t p_end)
{
    const float *packed = NAME(packed)(scratch, r);
    static dot_tile_fn *const tiles[] = DOT_TABLE(f32);
    float sums[NAME(block) * DOT_NR] __attribute__((aligned(64)));
    float parts[NAME(block) * DOT_NR] __attribute__((aligned(64)));
    float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
    int64_t e = r->group;
    if (r->count == 1) {
        NAME(one_row)(bufs, dims, scratch, r, p, p_end);
        return;
    }
    for (; p < p_end; p++)
        for (int64_t k = 0, end; k < DOT_K; k = end) {
            int64_t group = (k / DOT_GROUP + 1) * DOT_GROUP, block = (k / DOT_KC + 1) * DOT_KC;
            end = group < block ? group : block;
            dot_codes_block(DOT_CODE, w, GROUPED_CODES_AT(e, p, 0), k, end - k);
            for (int64_t t = 0; t < r->tiles; t++) {
                int64_t m = NAME(row)(r, t), mr = NAME(row)(r, t + 1) - m, at = m * DOT_NR;
                const float *a = packed + m * NAME(depth) + k / DOT_KC * DOT_KC * mr + k % DOT_KC;
                if (end == DOT_K) NAME(prefetch_rows)(bufs, dims, r->first + m, mr, p);
                tiles[mr - 1](a, w, 0, end - k, parts + at, k % DOT_GROUP == 0, a, w);
                if (end % DOT_GROUP == 0)
                    dot_codes_add(sums + at, parts + at, mr, GROUPED_SCALED_AT(DOT_SCALES, e, p, k), DOT_SCALE_TYPE, k < DOT_GROUP,
                                  GROUPED_OFFSETS_AT(e, p, k), GROUPED_SUMS_AT(m, k), DOT_K / DOT_GROUP);
                if (end == DOT_K) NAME(finish)(bufs, dims, r->first + m, mr, p, sums + at);
            }
        }
}
#else
/* A block by panels p .. end: a block of a panel rests in the first-level cache while all tiles use it. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const char *scratch, const struct NAME(rows) *r,
                             int64_t p, int64_t end)
{
    const float *packed = NAME(packed)(scratch, r);
    static dot_tile_fn *const tiles[] = GROUPED_BY;
    float c[NAME(block) * DOT_NR] __attribute__((aligned(64)));
    for (; p < end; p++)
        for (int64_t k = 0; k < NAME(sum); k += DOT_KC) {
            int64_t kc = NAME(sum) - k < DOT_KC ? NAME(sum) - k : DOT_KC;
#if GROUPED_IN_PLACE
            const void *w = GROUPED_AT(r->group, p, k);
#else
            float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
#ifdef DOT_WEIGHT_BF16
            dot_panel_packed_bf16(w, GROUPED_AT(r->group, p, k), kc);
#else
            int64_t n0 = p * DOT_NR;
            int valid = DOT_N - n0 < DOT_NR ? (int)(DOT_N - n0) : DOT_NR;
            LOAD_PANEL(w, r->group, n0, valid, k << DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
            int64_t next_k = k + kc < NAME(sum) ? k + kc : 0, next_n = next_k > 0 ? n0 : n0 + DOT_NR;
            int64_t next_k0 = next_k << DOT_PAIRED, next_kc = dot_numbers(DOT_K, next_k, DOT_PAIRED);
            int next_valid = DOT_N - next_n < DOT_NR ? (int)(DOT_N - next_n) : DOT_NR;
#endif
#endif
            for (int64_t t = 0; t < r->tiles; t++) {
#ifdef FETCH_PANEL
                if (next_n < DOT_N) FETCH_PANEL(r->group, next_n, next_valid, next_k0, next_kc, t, r->tiles);
#endif
                int64_t m = NAME(row)(r, t), mr = NAME(row)(r, t + 1) - m;
                int64_t next = t + 1 < r->tiles ? t + 1 : 0, next_m = NAME(row)(r, next);
                const float *next_a = packed + next_m * NAME(depth) + k * (NAME(row)(r, next + 1) - next_m);
                float *to = c + m * DOT_NR;
                if (k + kc == NAME(sum)) NAME(prefetch_rows)(bufs, dims, r->first + m, mr, p);
                const void *next_w = next_a;
#if GROUPED_NARROW && DOT_LANES == 8
                enum { asked = DOT_ASKED(1) };
                if (t < 128 / asked) next_w = (const char *)GROUPED_AT(r->group, p, k + kc) + t * kc * asked;
#endif
                tiles[mr - 1](packed + m * NAME(depth) + k * mr, w, 0, kc, to, k == 0, next_a, next_w);
                if (k + kc == NAME(sum)) NAME(finish)(bufs, dims, r->first + m, mr, p, to);
            }
        }
}
#endif

#ifdef GROUPED_MATRIX_UNIT
static void NAME(matrix_units)(void *const *bufs, const int64_t *dims, const char *scratch, int64_t begin, int64_t end)
{
    char near[NAME(amx_bytes)] __attribute__((aligned(64)));
    int64_t groups = NAME(panel_groups)(dims);
    dot_amx_configure(32);
    for (int64_t u = begin; u < end; u++) {
        int64_t g = u % groups;
        struct NAME(rows) r = NAME(find)(bufs, u / groups);
        if (r.count == 0) break;
        int64_t at[4] = {0, (r.count + 31) / 32, g * NAME(panels) / groups, (g + 1) * NAME(panels) / groups};
        const char *rows = scratch;
#ifdef GROUPED_SPLIT
        rows += NAME(tile)(u / groups, r.first) * NAME(depth32) * DOT_CELL * 2;
#endif
        NAME(amx_part)(bufs, dims, rows, near, u > begin && g > 0, r.group, r.first, r.count, DOT_K, at);
    }
    dot_amx_release();
    dot_fence();
}
#endif

void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    int64_t groups = NAME(panel_groups)(dims);
#ifdef GROUPED_MATRIX_UNIT
    if (GROUPED_MATRIX_UNIT) {
        NAME(matrix_units)(bufs, dims, scratch, begin, end);
        return;
    }
#endif
    for (int64_t u = begin; u < end; u++) {
        int64_t g = u % groups;
        struct NAME(rows) r = NAME(find)(bufs, u / groups);
        if (r.count == 0) break;
        int64_t p = g * NAME(panels) / groups, p_end = (g + 1) * NAME(panels) / groups;
#ifdef GROUPED_AT
        if (r.tiles == 1) {
            NAME(one_tile)(bufs, dims, NAME(packed)(scratch, &r), &r, p, p_end);
            continue;
        }
#endif
        NAME(many_tiles)(bufs, dims, scratch, &r, p, p_end);
    }
    dot_fence();
}

#undef GROUPED_FEW
#undef GROUPED_UNITS
#undef GROUPED_WORDS
#undef GROUPED_AT
#undef GROUPED_SUMS
#undef GROUPED_PANEL_AT
#undef GROUPED_CODES_AT
#undef GROUPED_SCALED_AT
#undef GROUPED_OFFSETS_AT
#undef GROUPED_SUMS_AT
#undef GROUPED_ROW_OF
#undef GROUPED_TILE_OF
#undef GROUPED_TALL
#undef GROUPED_CHUNK
#undef GROUPED_ROWS_AT
#undef GROUPED_ROW_SCALES
#undef GROUPED_MINUS
#undef GROUPED_DIRECT
#undef GROUPED_TABLE
#undef GROUPED_IN_PLACE
#undef GROUPED_NARROW
#undef GROUPED_BY
#undef GROUPED_MATRIX_UNIT
#undef GROUPED_SPLIT
#undef GROUPED_TILES
#undef GROUPED_PANELS
#undef GROUPED_HEIGHT
#undef GROUPED_WIDTH
