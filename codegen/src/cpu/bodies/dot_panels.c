/* The panels of `dot.c` where the weight is f32 or bf16. */
#if defined(DOT_WEIGHT_F32)
#define DOT_NARROW 0
#define DOT_PANEL_WORDS ((int64_t)DOT_K * DOT_NR)
#define DOT_AT(p, k) ((const float *)(DOT_WEIGHT_F32) + (p) * DOT_PANEL_WORDS + (k) * DOT_NR)
#define DOT_DIRECT(x) dot_f32_##x
#define DOT_DIRECT_TABLE DOT_TABLE(f32)
#elif defined(DOT_WEIGHT_BF16)
#define DOT_NARROW 1
#define DOT_PANEL_WORDS ((int64_t)(DOT_K + 1) / 2 * DOT_NR)
#if DOT_PAIRED
#define DOT_AT(p, k) ((const uint32_t *)(DOT_WEIGHT_BF16) + (p) * DOT_PANEL_WORDS + (k) * DOT_NR)
#define DOT_DIRECT(x) dot_pair_##x
#define DOT_DIRECT_TABLE DOT_TABLE(pair)
#else
#define DOT_AT(p, k) ((const uint32_t *)(DOT_WEIGHT_BF16) + (p) * DOT_PANEL_WORDS + (k) / 2 * DOT_NR)
#define DOT_DIRECT(x) dot_bf16_##x
#define DOT_DIRECT_TABLE DOT_TABLE(bf16)
#endif
#endif

#ifdef DOT_AT
#ifdef DOT_NO_MATRIX_UNIT
#define DOT_ROW(n) DOT_DIRECT(1x##n)(a, DOT_AT(p, 0), DOT_PANEL_WORDS, NAME(sum), c, 1, a, a)
#else
#define DOT_ROW(n)                                                                                                     \
    if (DOT_MATRIX_UNIT)                                                                                               \
        dot_amx_row##n(a, DOT_AT(p, 0), DOT_PANEL_WORDS, c);                                                           \
    else                                                                                                               \
        DOT_DIRECT(1x##n)(a, DOT_AT(p, 0), DOT_PANEL_WORDS, DOT_K, c, 1, a, a)
#endif

/* One row (M = 1, a matrix-vector product): panels DOT_ROW_PANELS at a time. */
static void NAME(one_row)(void *const *bufs, const int64_t *dims, const float *a, int64_t p, int64_t end)
{
    float c[4 * DOT_NR] __attribute__((aligned(64)));
    for (int64_t n; p < end; p += n) {
        n = end - p < DOT_ROW_PANELS ? end - p : DOT_ROW_PANELS;
        n = n >= 4 ? 4 : n >= 2 ? 2 : 1;
#if DOT_ROW_PANELS == 4
        if (n == 4) { DOT_ROW(4); } else
#endif
        if (n == 2) { DOT_ROW(2); } else { DOT_ROW(1); }
        for (int64_t q = 0; q < n; q++) NAME(finish)(bufs, dims, 0, 1, p + q, c + q * DOT_NR);
    }
}
#undef DOT_ROW

/* Whether tiles read panels where they lie, and do not widen a block of them first. */
#if defined(DOT_WEIGHT_F32) || DOT_PAIRED || DOT_LANES == 8
#define DOT_IN_PLACE 1
#define DOT_TILES DOT_DIRECT_TABLE
#else
#define DOT_IN_PLACE 0
#define DOT_TILES DOT_TABLE(f32)
#endif

/* One tile: panels are used once, so they are read where they lie, whatever their type. */
static void NAME(one_tile)(void *const *bufs, const int64_t *dims, const float *a, int64_t p, int64_t end)
{
    static dot_tile_fn *const direct[] = DOT_DIRECT_TABLE;
    float c[DOT_MR * DOT_NR] __attribute__((aligned(64)));
    for (; p < end; p++) {
        for (int64_t k = 0; k < NAME(sum); k += DOT_KC) {
            int64_t kc = NAME(sum) - k < DOT_KC ? NAME(sum) - k : DOT_KC;
            const void *next_w = DOT_LANES == 8 && DOT_NARROW ? (const void *)DOT_AT(p, k + kc) : a;
            direct[DOT_M - 1](a + k * DOT_M, DOT_AT(p, k), 0, kc, c, k == 0, a, next_w);
        }
        NAME(finish)(bufs, dims, 0, DOT_M, p, c);
    }
}
#endif

/* Tiles t .. t_end by panels p .. p_end: a block of a panel rests in the first-level cache while all tiles use it; the
 * activations' block rests in the second level while all panels use it, but for few tiles, whose panels come from memory. */
static void NAME(many_tiles)(void *const *bufs, const int64_t *dims, const float *packed, int64_t t, int64_t t_end,
                             int64_t p, int64_t p_end)
{
    static dot_tile_fn *const tiles[] = DOT_TILES;
    float c[DOT_PANELS_PER_UNIT * DOT_ROWS_PER_UNIT * DOT_NR] __attribute__((aligned(64)));
    enum { asked = DOT_ASKED(DOT_NARROW) };
    int64_t m0 = NAME(row)(dims, t), rows = NAME(row)(dims, t_end) - m0;
    int64_t wide = t_end - t <= DOT_FEW_TILES ? 1 : p_end - p, steps = wide * NAME(blocks);
    for (int64_t s = 0; s < (p_end - p) * NAME(blocks); s++) {
        /* Blocks of `wide` panels one after another, then the next block of depth. */
        int64_t q0 = p + s / steps * wide, q = q0 + s % wide, k = s % steps / wide * DOT_KC;
        int64_t kc = NAME(sum) - k < DOT_KC ? NAME(sum) - k : DOT_KC;
        int64_t next_k = q + 1 < q0 + wide ? k : k + kc < NAME(sum) ? k + kc : 0;
#if DOT_IN_PLACE
        const void *w = DOT_AT(q, k);
#else
        float w[DOT_KC * DOT_NR] __attribute__((aligned(64)));
        dot_panel_packed_bf16(w, DOT_AT(q, k), kc);
#endif
        /* Of panels in the order of memory, whatever lies one whole block ahead: a short block asks for as little as it computes. */
        const void *beyond = wide == 1 ? DOT_AT(q, k + DOT_KC) : q + 1 < p_end ? DOT_AT(q + 1, k) : DOT_AT(p, k + kc);
        for (int64_t i = t; i < t_end; i++) {
            int64_t m = NAME(row)(dims, i), mr = NAME(row)(dims, i + 1) - m;
            int64_t next = i + 1 < t_end ? i + 1 : t, next_m = NAME(row)(dims, next), of = next > i ? k : next_k;
            const float *next_a = packed + next_m * NAME(depth) + of * (NAME(row)(dims, next + 1) - next_m);
            const void *next_w = i < t + 128 / asked ? (const char *)beyond + (i - t) * kc * asked : (const char *)next_a;
            float *to = c + ((q - q0) * rows + m - m0) * DOT_NR;
            if (k + kc == NAME(sum)) NAME(prefetch_rows)(bufs, dims, m, mr, q);
            tiles[mr - 1](packed + m * NAME(depth) + k * mr, w, 0, kc, to, k == 0, next_a, next_w);
            if (k + kc == NAME(sum)) NAME(finish)(bufs, dims, m, mr, q, to);
        }
    }
}

#ifndef DOT_NO_MATRIX_UNIT
enum { NAME(steps) = DOT_K / 32 <= DOT_AMX_WHOLE ? DOT_K / 32 : DOT_AMX_STEPS }; /* of a block */

/* Sums that wait for their epilogue. */
struct NAME(sums) {
    int64_t m, rows, panel;
    const float *c;
};

DOT_INLINE void NAME(finish_row)(void *const *bufs, const int64_t *dims, int full, struct NAME(sums) *s)
{
    if (s->rows == 0) return;
    if (full)
        EPILOGUE(s->m, s->panel * DOT_NR, s->c, NAME(valid)(s->panel));
    else
        NAME(finish)(bufs, dims, s->m, 1, s->panel, s->c);
    s->m++, s->rows--, s->c += DOT_NR;
}

/* `steps` of k of one tile by one panel; literally all of a block and of a tile where `full`. Meanwhile the vector units
 * finish the sums computed before, a row at a time, for many at once would keep the matrix unit waiting; and `lines` lines
 * a step arrive from next_w. */
DOT_INLINE void NAME(matrix_tile)(void *const *bufs, const int64_t *dims, int full, int rows, const uint16_t *a,
                                  const uint32_t *w, int64_t steps, const uint32_t *next_w, int64_t lines,
                                  struct NAME(sums) *before)
{
    struct NAME(sums) s = *before;
#pragma GCC unroll 1
    for (int64_t i = 0; i < steps; i++, a += rows * 32, w += 512, next_w += lines * 16) {
        dot_amx_sides(rows, a, w, i < DOT_AMX_STAY);
        DOT_AMX_DOT(0, 4, 6); DOT_AMX_REST;
        NAME(finish_row)(bufs, dims, full, &s);
        DOT_AMX_DOT(1, 4, 7); DOT_AMX_REST;
        if (rows > 16) { DOT_AMX_DOT(2, 5, 6); DOT_AMX_REST; }
        NAME(finish_row)(bufs, dims, full, &s);
        if (rows > 16) { DOT_AMX_DOT(3, 5, 7); DOT_AMX_REST; }
#pragma GCC unroll 1
        for (int64_t line = 0; line < lines; line++) __builtin_prefetch(next_w + line * 16, 0, 2);
    }
    NAME(finish)(bufs, dims, s.m, s.rows, s.panel, s.c);
    before->rows = 0;
}

/* Units of the matrix unit: the packed rows of a unit rest in the second-level cache while its panels pass. Sums before
 * are finished when a tile is stored, so that the next may take their place. */
static void NAME(matrix_units)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    enum { depth = NAME(steps) * 32, whole = DOT_K == depth };
    float c[(whole ? 1 : DOT_MATRIX_TILES_PER_UNIT) * DOT_AMX_ROWS * DOT_NR] __attribute__((aligned(64)));
    int64_t tiles = NAME(tiles)(dims), blocks = NAME(row_blocks)(dims), groups = NAME(panel_groups)(dims);
    struct NAME(sums) before = {0, 0, 0, c};
    int rows_set = 0;
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u / groups, g = u % groups, t = b * tiles / blocks, wide = (b + 1) * tiles / blocks - t;
        for (int64_t q = NAME(panel)(dims, g), q_end = NAME(panel)(dims, g + 1); q < q_end; q++)
            for (int64_t k = 0; k < DOT_K; k += depth) {
                int64_t steps = (DOT_K - k < depth ? DOT_K - k : depth) / 32;
                const uint32_t *w = DOT_AT(q, k), *next_w = w + (wide == 1 ? DOT_AMX_FAR / 4 : steps * 512);
                int64_t lines = (32 + wide - 1) / wide;
                for (int64_t i = 0; i < wide; i++, next_w += lines * steps * 16) {
                    int64_t m = (t + i) * DOT_AMX_ROWS;
                    int rows = (int)(DOT_M - m < DOT_AMX_ROWS ? DOT_M - m : DOT_AMX_ROWS);
                    const uint16_t *a = (const uint16_t *)scratch + m * DOT_K + k * rows;
                    float *to = c + (whole ? 0 : i) * DOT_AMX_ROWS * DOT_NR;
                    if (rows != rows_set) dot_amx_configure(rows_set = rows);
                    dot_amx_open(rows, to, k == 0);
                    if (rows == DOT_AMX_ROWS && steps == NAME(steps))
                        NAME(matrix_tile)(bufs, dims, 1, DOT_AMX_ROWS, a, w, NAME(steps), next_w, lines, &before);
                    else
                        NAME(matrix_tile)(bufs, dims, 0, rows, a, w, steps, next_w, lines, &before);
                    dot_amx_close(rows, to);
                    if (k + depth >= DOT_K) before = (struct NAME(sums)){m, rows, q, to};
                }
            }
    }
    NAME(finish)(bufs, dims, before.m, before.rows, before.panel, before.c);
    dot_amx_release();
    dot_fence();
}
#endif

