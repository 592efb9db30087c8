/* One dot kernel whose sides nobody packed ahead: out[m, n] = epilogue(m, n, sum over k of A(m, k) * B(k, n)), with every
 * size known only at run time. Included once per kernel, after `dot_core.c` and `dot_blocks.c`, whose tiles and packing it
 * uses; the emitter defines the slots before and this text undefines them at its end.
 *
 *   NAME(x)                       prefixes a symbol of this kernel
 *   DOT_M, DOT_N, DOT_K           rows, columns and length of the sums, expressions over `dims`
 *   DOT_BATCH                     optional: so many dots side by side, an expression; sources see `batch`, which of them it is,
 *                                 and rows of the result are those of all dots, one dot after another
 *   one source of the left side:
 *     PROLOGUE_ROW(m, row)          writes A(m, 0..DOT_ROW) as f32 to `row`; DOT_ROW is DOT_K as a literal
 *     LOAD_A(dst, m, mr, k0, kc)    writes A(m .. m + mr, k0 .. k0 + kc) to dst[mr][DOT_KC]
 *   DOT_PAIRED                      DOT_BF16_PAIRS where A and B are bf16 values, and LOAD_A and LOAD_PANEL those of `dot_bf16_pairs.c`; else 0
 *   LOAD_PANEL(dst, n0, n, k0, kc)  writes B(k0 .. k0 + kc, n0 .. n0 + n) to dst[kc][32], zeros beyond n
 *   FETCH_PANEL(n0, n, k0, kc, part, parts)   prefetches a part of the same block
 *   EPILOGUE(m, n0, acc, valid)   consumes columns n0 .. n0 + valid of row m, n0 a multiple of 32, valid in 1..=32
 *   PREFETCH(m, n0)               prefetches what it reads and writes
 *
 * Slots see `bufs` and `dims`. Phase 0 packs the left side into scratch, once; phase 1 packs blocks of panels where it uses
 * them, each shared by all tiles of a unit. Units are independent: any split over threads gives the same bits, those of the
 * packed dot on the same numbers. Where `dot_free_amx.c` or `dot_free_split.c` came before and the system admits the matrix
 * unit, that is the way taken; then scratch holds only the rows of a PROLOGUE_ROW, as bf16, or the cells of all rows.
 */
#define DOT_TILES_PER_UNIT ((512 + DOT_MR - 1) / DOT_MR) /* so many rows share a panel that packing it hardly counts */
#define DOT_PANELS_PER_UNIT 8
#define DOT_TILES_PER_PACK 4
#define DOT_UNITS 32
#ifndef DOT_MATRIX_UNIT
#define DOT_MATRIX_UNIT 0
#define DOT_NO_MATRIX_UNIT
#endif

#ifndef DOT_BATCH
#define DOT_BATCH 1
#endif
#define DOT_STEPS ((DOT_K + DOT_PAIRED) >> DOT_PAIRED)

static int64_t NAME(tiles)(const int64_t *dims) { return (DOT_M + DOT_MR - 1) / DOT_MR; }
static int64_t NAME(panels)(const int64_t *dims) { return (DOT_N + DOT_NR - 1) / DOT_NR; }

/* Tiles of near-equal height: a last tile of one or two rows would run at the speed of its panel loads. */
static int64_t NAME(row)(const int64_t *dims, int64_t tile) { return tile * DOT_M / NAME(tiles)(dims); }

/* Floats, or bf16 pairs, that a packed row occupies. */
static int64_t NAME(depth)(const int64_t *dims) { return (DOT_STEPS + DOT_KC - 1) / DOT_KC * DOT_KC; }

/* Units that pack the rows of one dot. */
static int64_t NAME(packs)(const int64_t *dims)
{
    return (NAME(tiles)(dims) + DOT_TILES_PER_PACK - 1) / DOT_TILES_PER_PACK;
}

int64_t NAME(units0)(const int64_t *dims)
{
#if defined(DOT_SPLIT_SIDES)
    if (DOT_MATRIX_UNIT) return NAME(amx_packs)(dims);
#elif !defined(PROLOGUE_ROW)
    if (DOT_MATRIX_UNIT) return 0;
#endif
    return DOT_BATCH * NAME(packs)(dims);
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
#ifdef DOT_SPLIT_SIDES
    if (DOT_MATRIX_UNIT) {
        NAME(amx_phase0)(bufs, dims, scratch, begin, end);
        return;
    }
#endif
    int64_t tiles = NAME(tiles)(dims), packs = NAME(packs)(dims);
    for (int64_t i = begin * DOT_TILES_PER_PACK; i < end * DOT_TILES_PER_PACK; i++) {
        int64_t batch = i / (packs * DOT_TILES_PER_PACK), t = i % (packs * DOT_TILES_PER_PACK);
        if (t >= tiles) continue;
        int64_t m0 = NAME(row)(dims, t), mr = NAME(row)(dims, t + 1) - m0;
        float *tile = (float *)scratch + (batch * DOT_M + m0) * NAME(depth)(dims);
#ifdef PROLOGUE_ROW
        for (int64_t r = 0; r < mr; r++) {
            float row[DOT_ROW] __attribute__((aligned(64)));
            PROLOGUE_ROW(m0 + r, row);
#if !defined(DOT_NO_MATRIX_UNIT) && !defined(DOT_SPLIT_SIDES)
            if (DOT_MATRIX_UNIT) {
                NAME(keep_row)((uint16_t *)scratch + (m0 + r) * DOT_ROW, row);
                continue;
            }
#endif
            for (int64_t k = 0; k < DOT_STEPS; k += DOT_KC)
                dot_keep(tile + k * mr + r * DOT_KC, row + (k << DOT_PAIRED), DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
        }
#else
        for (int64_t k = 0; k < DOT_STEPS; k += DOT_KC)
            LOAD_A(tile + k * mr, m0, mr, k << DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
#endif
    }
}

static int64_t NAME(row_blocks)(const int64_t *dims)
{
    return (NAME(tiles)(dims) + DOT_TILES_PER_UNIT - 1) / DOT_TILES_PER_UNIT;
}

static int64_t NAME(panel_groups)(const int64_t *dims)
{
    int64_t panels = NAME(panels)(dims), blocks = NAME(row_blocks)(dims);
    int64_t wanted = (DOT_UNITS + blocks - 1) / blocks;
    int64_t least = (panels + DOT_PANELS_PER_UNIT - 1) / DOT_PANELS_PER_UNIT;
    int64_t groups = least > wanted ? least : wanted;
    return groups < panels ? groups : panels;
}

int64_t NAME(units1)(const int64_t *dims)
{
    if (DOT_M <= 0 || DOT_N <= 0) return 0;
#ifndef DOT_NO_MATRIX_UNIT
    if (DOT_MATRIX_UNIT) return NAME(amx_count)(dims);
#endif
    return DOT_BATCH * NAME(row_blocks)(dims) * NAME(panel_groups)(dims);
}

/* Tiles t .. t_end by panels p .. p_end: a block of a panel rests in the first-level cache while all tiles use it; the left
 * side's block rests in the second level while all panels use it. Sums over nothing are zero. */
static void NAME(unit)(void *const *bufs, const int64_t *dims, const float *packed, int64_t batch, int64_t t,
                       int64_t t_end, int64_t p, int64_t p_end)
{
    static dot_tile_fn *const tiles[] = DOT_TABLE_FOR(DOT_PAIRED);
    float c[DOT_PANELS_PER_UNIT * DOT_TILES_PER_UNIT * DOT_MR * DOT_NR] __attribute__((aligned(64)));
    float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
    int64_t m0 = NAME(row)(dims, t), rows = NAME(row)(dims, t_end) - m0, depth = NAME(depth)(dims);
    packed += batch * DOT_M * depth;
    for (int64_t k = 0; k == 0 || k < DOT_STEPS; k += DOT_KC) {
        int64_t kc = DOT_STEPS - k < DOT_KC ? DOT_STEPS - k : DOT_KC;
        for (int64_t q = p; q < p_end; q++) {
            int64_t n0 = q * DOT_NR;
            int valid = DOT_N - n0 < DOT_NR ? (int)(DOT_N - n0) : DOT_NR;
            LOAD_PANEL(w, n0, valid, k << DOT_PAIRED, dot_numbers(DOT_K, k, DOT_PAIRED));
            int64_t next_k = q + 1 < p_end ? k : k + DOT_KC, next_n = (q + 1 < p_end ? q + 1 : p) * DOT_NR;
            int64_t next_k0 = next_k << DOT_PAIRED, next_kc = dot_numbers(DOT_K, next_k, DOT_PAIRED);
            int next_valid = DOT_N - next_n < DOT_NR ? (int)(DOT_N - next_n) : DOT_NR;
            for (int64_t i = t; i < t_end; i++) {
                if (next_k < DOT_STEPS) FETCH_PANEL(next_n, next_valid, next_k0, next_kc, i - t, t_end - t);
                int64_t m = NAME(row)(dims, i), mr = NAME(row)(dims, i + 1) - m;
                int64_t next = i + 1 < t_end ? i + 1 : t, next_m = NAME(row)(dims, next);
                const float *next_a = packed + next_m * depth + k * (NAME(row)(dims, next + 1) - next_m);
                float *to = c + ((q - p) * rows + m - m0) * DOT_NR;
                if (k + kc == DOT_STEPS)
                    for (int64_t r = 0; r < mr; r++) PREFETCH(batch * DOT_M + m + r, n0);
                tiles[mr - 1](packed + m * depth + k * mr, w, 0, kc, to, k == 0, next_a, next_a);
                if (k + kc == DOT_STEPS)
                    for (int64_t r = 0; r < mr; r++) EPILOGUE(batch * DOT_M + m + r, n0, to + r * DOT_NR, valid);
            }
        }
    }
}

/* Units in a row share the block of the longer side, so that the shorter one, which caches hold, is what is read again. */
void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
#ifndef DOT_NO_MATRIX_UNIT
    if (DOT_MATRIX_UNIT) {
        NAME(amx_phase1)(bufs, dims, scratch, begin, end);
        return;
    }
#endif
    int64_t tiles = NAME(tiles)(dims), panels = NAME(panels)(dims);
    int64_t blocks = NAME(row_blocks)(dims), groups = NAME(panel_groups)(dims);
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t batch = unit / (blocks * groups), u = unit % (blocks * groups);
        int64_t b = DOT_M > DOT_N ? u / groups : u % blocks, g = DOT_M > DOT_N ? u % groups : u / blocks;
        NAME(unit)(bufs, dims, (const float *)scratch, batch, b * tiles / blocks, (b + 1) * tiles / blocks,
                   g * panels / groups, (g + 1) * panels / groups);
    }
    dot_fence();
}

#undef DOT_TILES_PER_UNIT
#undef DOT_PANELS_PER_UNIT
#undef DOT_TILES_PER_PACK
#undef DOT_UNITS
#undef DOT_MATRIX_UNIT
#undef DOT_NO_MATRIX_UNIT
#undef DOT_SPLIT_SIDES
#undef NAME
#undef DOT_M
#undef DOT_BATCH
#undef DOT_PAIRED
#undef DOT_STEPS
#undef DOT_N
#undef DOT_K
#undef DOT_ROW
#undef PROLOGUE_ROW
#undef LOAD_A
#undef LOAD_PANEL
#undef FETCH_PANEL
#undef ROWS_AT
#undef ROWS_LINE
#undef ROWS_ALONG
#undef ROWS_NEAR
#undef PAIRS_ALONG
#undef PACK_ROWS
#undef PAIRS_AT
#undef PAIRS_LINE
#undef PACK_PAIRS
#undef EPILOGUE
#undef PREFETCH
