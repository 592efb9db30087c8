/* One dot kernel: out[m, n] = epilogue(m, n, sum over k of A(m, k) * W(n, k)). Included once per kernel, after
 * `dot_core.c` and `dot_blocks.c`; the emitter defines the slots before and this text undefines them at its end.
 *
 *   NAME(x)                       prefixes a symbol of this kernel
 *   DOT_M                         rows, a runtime expression over `dims`; DOT_N and DOT_K are literals
 *   PROLOGUE_ROW(m, row)          writes A(m, 0..K) as f32 to `row`
 *   EPILOGUE(m, n0, acc, valid)   consumes columns n0 .. n0 + valid of row m, n0 a multiple of 32, valid in 1..=32
 *   PREFETCH(m, n0)               prefetches what it reads and writes
 *   one source of the weight:
 *     DOT_WEIGHT_F32 / DOT_WEIGHT_BF16   address of packed panels
 *   DOT_PAIRED                    DOT_BF16_PAIRS where every A(m, k) and the weight are bf16 values, else 0
 *   DOT_A_BF16 (optional)         the same, and K is a multiple of 32, which admits the matrix unit
 *   DOT_A_AT(m) (optional)        address of A(m, 0..K) where it lies in memory as bf16
 *
 * Slots see `bufs` and `dims`. The caller runs phase 0 over units0, then phase 1 over units1, with
 * `scratch` bytes aligned to 64 between them. Units are independent: any split over threads gives the same bits.
 */
enum {
    NAME(panels) = (DOT_N + DOT_NR - 1) / DOT_NR,
    NAME(sum) = (DOT_K + DOT_PAIRED) >> DOT_PAIRED, /* steps of a sum */
    NAME(blocks) = (NAME(sum) + DOT_KC - 1) / DOT_KC,
    NAME(depth) = NAME(blocks) * DOT_KC, /* floats, or bf16 pairs, a packed row occupies */
};
_Static_assert(DOT_K > 0 && DOT_N > 0 && DOT_K <= 1 << 17, "K must lie in 1..=131072: a row is staged on the stack");

#define DOT_ROWS_PER_UNIT (12 * DOT_MR)
#define DOT_PANELS_PER_UNIT 8
#define DOT_FEW_TILES 4 /* so few use a panel too seldom to keep it near: panels pass one after another, in the order of memory */
#define DOT_UNITS 32 /* enough for a few threads to balance, few enough to keep panels in cache */

#if defined(DOT_AMX_ROWS) && defined(DOT_A_BF16) || defined(DOT_ROUNDED) && DOT_AMX_INTEGERS
#define DOT_MATRIX_UNIT dot_amx
#define DOT_MATRIX_TILES_PER_UNIT                                                                                      \
    (DOT_K * 64 > DOT_AMX_NEAR / 4 ? 4 : DOT_K * 64 < DOT_AMX_NEAR / 32 ? 32 : DOT_AMX_NEAR / (DOT_K * 64))
#else
#define DOT_MATRIX_TILES_PER_UNIT 1
#define DOT_MATRIX_UNIT 0
#define DOT_NO_MATRIX_UNIT
#endif
#define DOT_BY_TILES (DOT_MATRIX_UNIT && DOT_M > 1) /* the matrix unit's; a row alone has dot_amx_row */
#if defined(DOT_ROUNDED) && defined(DOT_NO_MATRIX_UNIT) && DOT_INTEGER_ROWS == 7
#define DOT_HEIGHT DOT_INTEGER_ROWS
#else
#define DOT_HEIGHT DOT_MR
#endif
#define DOT_TILES_PER_UNIT (DOT_ROWS_PER_UNIT / DOT_HEIGHT)

static int64_t NAME(tiles)(const int64_t *dims)
{
    int64_t height = DOT_BY_TILES ? 32 : DOT_HEIGHT;
    return (DOT_M + height - 1) / height;
}

/* Tiles of near-equal height: a last tile of one or two rows would run at the speed of its panel loads. The matrix unit
 * has no such loss, and takes full tiles. */
static int64_t NAME(row)(const int64_t *dims, int64_t tile)
{
    if (DOT_BY_TILES) return tile * 32 < DOT_M ? tile * 32 : DOT_M;
    return tile * DOT_M / NAME(tiles)(dims);
}

/* A short input (small M) is packed by the caller alone: waking threads costs more. Of few tiles the rows are units. */
int64_t NAME(units0)(const int64_t *dims)
{
    if (DOT_M <= 4) return DOT_M > 0;
    return NAME(tiles)(dims) <= DOT_FEW_TILES ? DOT_M : NAME(tiles)(dims);
}

/* Packs rows r .. r_end of tile t. */
static void NAME(pack_rows)(void *const *bufs, const int64_t *dims, char *scratch, int64_t t, int64_t r, int64_t r_end);

#ifndef DOT_ROUNDED
static char *NAME(tile_at)(const int64_t *dims, char *scratch, int64_t m)
{
    return scratch + m * (DOT_BY_TILES ? DOT_K * (int64_t)sizeof(uint16_t) : NAME(depth) * (int64_t)sizeof(float));
}

/* Row r of a tile of mr rows: blocks of DOT_KC f32 or bf16 pairs, or for the matrix unit [K/32][mr][32] bf16. */
static void NAME(pack_row)(const int64_t *dims, char *tile, int64_t mr, int64_t r, const float *row)
{
    if (DOT_BY_TILES) {
        for (int64_t k = 0; k < DOT_K; k += 32) {
            uint16_t *restrict to = (uint16_t *)tile + k * mr + r * 32;
            for (int i = 0; i < 32; i++) to[i] = (uint16_t)(dot_bits(row[k + i]) >> 16); /* exact: a bf16 value */
        }
        return;
    }
    for (int64_t k = 0; k < NAME(sum); k += DOT_KC)
        dot_keep((float *)tile + k * mr + r * DOT_KC, row + (k << DOT_PAIRED), DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
}

#ifdef DOT_A_AT
/* As pack_row, for the matrix unit and for pairs. Reading the rows where they lie would save this pass, yet costs more: tiles load
 * best from adjacent lines. */
DOT_INLINE void NAME(copy_row)(const int64_t *dims, char *tile, int64_t mr, int64_t r, const uint16_t *row)
{
    if (DOT_BY_TILES)
        for (int64_t k = 0; k < DOT_K; k += 32) memcpy((uint16_t *)tile + k * mr + r * 32, row + k, 64);
    else
        for (int64_t k = 0; k < NAME(sum); k += DOT_KC)
            memcpy((float *)tile + k * mr + r * DOT_KC, row + 2 * k, (size_t)dot_numbers(DOT_K, k, 1) * sizeof *row);
}
#endif

#ifdef DOT_OFFSETS
/* Sums of the groups of rows lie behind the packed rows. */
static float *NAME(group_sums)(const int64_t *dims, char *scratch, int64_t m)
{
    return (float *)scratch + DOT_M * NAME(depth) + m * (DOT_K / DOT_GROUP);
}
#endif

static void NAME(pack_rows)(void *const *bufs, const int64_t *dims, char *scratch, int64_t t, int64_t r, int64_t r_end)
{
    int64_t m0 = NAME(row)(dims, t), mr = NAME(row)(dims, t + 1) - m0;
    char *tile = NAME(tile_at)(dims, scratch, m0);
    for (; r < (r_end < mr ? r_end : mr); r++) {
#ifdef DOT_A_AT
        if (DOT_BY_TILES || DOT_PAIRED) {
            NAME(copy_row)(dims, tile, mr, r, DOT_A_AT(m0 + r));
#ifdef DOT_OFFSETS
            dot_sum_groups(NAME(group_sums)(dims, scratch, m0 + r), DOT_A_AT(m0 + r), 1, DOT_K, DOT_GROUP);
#endif
            continue;
        }
#endif
        float row[DOT_K] __attribute__((aligned(64)));
        PROLOGUE_ROW(m0 + r, row);
        NAME(pack_row)(dims, tile, mr, r, row);
#ifdef DOT_OFFSETS
        dot_sum_groups(NAME(group_sums)(dims, scratch, m0 + r), row, 0, DOT_K, DOT_GROUP);
#endif
    }
}
#endif

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    int64_t tiles = NAME(tiles)(dims);
    if (DOT_M <= 4) begin = 0, end = DOT_M;
    if (tiles <= DOT_FEW_TILES) {
        for (int64_t t = 0; t < tiles; t++) {
            int64_t first = NAME(row)(dims, t), last = NAME(row)(dims, t + 1);
            if (begin < last && end > first)
                NAME(pack_rows)(bufs, dims, scratch, t, begin > first ? begin - first : 0, end - first);
        }
        return;
    }
    for (int64_t t = begin; t < (end < tiles ? end : tiles); t++) NAME(pack_rows)(bufs, dims, scratch, t, 0, DOT_M);
}

/* Units of a block of rows follow one another, so that a thread mostly takes rows that it packed, and that it wrote in the kernel before:
 * a line that another core wrote takes long to read. For that a block is cut in two where panels are read as they lie and both halves
 * have more than a few tiles. */
static int64_t NAME(row_blocks)(const int64_t *dims)
{
    int64_t tiles = DOT_BY_TILES ? DOT_MATRIX_TILES_PER_UNIT : DOT_TILES_PER_UNIT;
    int64_t blocks = (NAME(tiles)(dims) + tiles - 1) / tiles;
#if defined(DOT_WEIGHT_F32) || defined(DOT_WEIGHT_BF16)
    if (!DOT_BY_TILES && blocks == 1 && NAME(tiles)(dims) >= 2 * DOT_FEW_TILES + 2) return 2;
#endif
    return blocks;
}

static int64_t NAME(panel_groups)(const int64_t *dims)
{
    if (DOT_M == 1) return (NAME(panels) + 1) / 2;
    int64_t wanted = (DOT_UNITS + NAME(row_blocks)(dims) - 1) / NAME(row_blocks)(dims);
    int64_t least = DOT_BY_TILES ? 1 : (NAME(panels) + DOT_PANELS_PER_UNIT - 1) / DOT_PANELS_PER_UNIT;
    int64_t groups = least > wanted ? least : wanted;
    return groups < NAME(panels) ? groups : NAME(panels);
}

/* First panel of group g. Of a row alone two make groups, so that threads end together. */
static int64_t NAME(panel)(const int64_t *dims, int64_t g)
{
    if (DOT_M == 1) return 2 * g < NAME(panels) ? 2 * g : NAME(panels);
    return g * NAME(panels) / NAME(panel_groups)(dims);
}

int64_t NAME(units1)(const int64_t *dims)
{
    return DOT_M > 0 ? NAME(row_blocks)(dims) * NAME(panel_groups)(dims) : 0;
}

DOT_INLINE int NAME(valid)(int64_t panel)
{
    return DOT_N % DOT_NR && panel + 1 == NAME(panels) ? DOT_N % DOT_NR : DOT_NR;
}

/* Rows of a result lie far apart, so that each line of it waits for memory unless a tile computes meanwhile. */
DOT_INLINE void NAME(prefetch_rows)(void *const *bufs, const int64_t *dims, int64_t m0, int64_t rows, int64_t panel)
{
    for (int64_t r = 0; r < rows; r++) PREFETCH(m0 + r, panel * DOT_NR);
}

/* A function of its own, into which the epilogue is inlined once: its constants are made once for several rows. */
DOT_OUTLINE void NAME(finish)(void *const *bufs, const int64_t *dims __attribute__((unused)), int64_t m0,
                              int64_t rows, int64_t panel, const float *c)
{
    int valid = NAME(valid)(panel);
    for (int64_t r = 0; r < rows; r++, c += DOT_NR) EPILOGUE(m0 + r, panel * DOT_NR, c, valid);
}

