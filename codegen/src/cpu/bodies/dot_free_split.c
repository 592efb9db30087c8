/* The matrix unit's way through `dot_free.c` for sides of f32, included before it, with the same slots and
 *
 *   PAIRS_AT(n0, k)                       address of B(k, n0); PAIRS_LINE from a line of 32 to the next; PAIRS_ALONG is 1 where
 *                                         a line goes along the sum, else 0
 *   PACK_PAIRS(dst, n0, n, k, kc, next)   writes B(k .. k + kc, n0 .. n0 + n) to a cell, zeros beyond n and kc, and asks for
 *                                         the lines at `next`
 *   ROWS_AT, ROWS_LINE, ROWS_ALONG, PACK_ROWS   the like of the left side, without a PROLOGUE_ROW
 *   ROWS_NEAR                             optional: 1 where a unit packs its own rows, else scratch has them
 *
 * An f32 number is the sum of three of bf16 (`dot_pairs.c`), a product of two numbers six of theirs; even so the unit is faster
 * than vectors of f32, and rounds less. A cell is 32 rows or columns by 32 of k, in three pieces. Phase 0 packs the left side
 * into scratch, [tile][step] cells. A unit packs cells of its panels, which rest in the second-level cache while its tiles pass;
 * to pack beside the products, as of bf16, costs more than it hides. Sums over one row do not depend on the unit that it is
 * in: k ascends in steps of 32 from zero.
 */
#ifdef DOT_PAIRS
#define DOT_MATRIX_UNIT dot_amx
#define DOT_SPLIT_SIDES
#ifndef ROWS_NEAR
#define ROWS_NEAR 0
#endif
enum {
    NAME(block) = ROWS_NEAR ? 6 : 24,   /* steps of 32 of k at once; of longer sums, what is summed waits in memory */
    NAME(highest) = ROWS_NEAR ? 8 : 16, /* tiles of a unit whose sums wait */
    NAME(widest) = ROWS_NEAR ? 16 : 6,  /* and its panels */
    NAME(near) = 144,                   /* cells that rest in the second-level cache */
    NAME(amx_units) = 12,
    /* Cells of a block of depth, behind which sums wait. */
    NAME(waiting) = NAME(block) * (NAME(widest) + ROWS_NEAR * NAME(highest)),
    NAME(amx_parts) = NAME(waiting) * DOT_CELL * 2 + NAME(highest) * NAME(widest) * 4096,
    NAME(amx_once) = NAME(near) * DOT_CELL * 2 + 2 * 4096,
    NAME(amx_bytes) = (int)NAME(amx_parts) > (int)NAME(amx_once) ? NAME(amx_parts) : NAME(amx_once),
};

static int64_t NAME(steps)(const int64_t *dims) { return (DOT_K + 31) / 32; }
static int64_t NAME(amx_tiles)(const int64_t *dims) { return (DOT_M + 31) / 32; }
static int64_t NAME(amx_panels)(const int64_t *dims) { return (DOT_N + 31) / 32; }

static int64_t NAME(depths)(const int64_t *dims)
{
    int64_t steps = NAME(steps)(dims);
    return steps > NAME(block) ? (steps + NAME(block) - 1) / NAME(block) : 1;
}

/* Into how many blocks of rows and groups of panels units divide the result. */
struct NAME(grid) {
    int64_t blocks, groups;
};

static struct NAME(grid) NAME(grid)(const int64_t *dims)
{
    int64_t tiles = NAME(amx_tiles)(dims), panels = NAME(amx_panels)(dims), steps = NAME(steps)(dims);
    int64_t one = NAME(depths)(dims) == 1, wide = NAME(widest);
    if (one && !ROWS_NEAR) wide = steps > 0 ? NAME(near) / steps : panels;
    struct NAME(grid) g = {one && !ROWS_NEAR ? 1 : (tiles + NAME(highest) - 1) / NAME(highest), (panels + wide - 1) / wide};
    while (g.blocks * g.groups < NAME(amx_units)) {
        int64_t high = tiles / g.blocks;
        wide = panels / g.groups;
        if (wide >= 4 && wide * 2 >= high)
            g.groups *= 2;
        else if (high >= 2)
            g.blocks *= 2;
        else
            break;
    }
    return g;
}

#ifndef PROLOGUE_ROW
/* Cells of tiles t .. t_end and steps k .. k_end, [tile][apart], in the order of memory. */
static void NAME(pack_rows)(void *const *bufs, const int64_t *dims, uint16_t *to, int64_t apart, int64_t t, int64_t t_end,
                            int64_t k, int64_t k_end)
{
    int64_t tiles = t_end - t, steps = k_end - k, cells = tiles * steps;
    for (int64_t n = 0; n < cells; n++) {
        struct dot_cell c = dot_cell_at(ROWS_ALONG, n, tiles, steps), next = dot_cell_at(ROWS_ALONG, n + 1, tiles, steps);
        int64_t m = (t + c.line) * 32, mr = DOT_M - m < 32 ? DOT_M - m : 32;
        int64_t at = (k + c.step) * 32, kc = DOT_K - at < 32 ? DOT_K - at : 32;
        PACK_ROWS(to + (c.line * apart + c.step) * DOT_CELL, m, mr, at, kc,
                  ROWS_AT((t + next.line) * 32, (k + next.step) * 32));
    }
}
#endif

#if !ROWS_NEAR
#ifdef PROLOGUE_ROW
enum { NAME(together) = 1 };
#else
enum { NAME(together) = ROWS_ALONG ? 1 : 4 }; /* tiles that a unit packs: where lines go across, a line of several */
#endif

static int64_t NAME(amx_packs)(const int64_t *dims)
{
    return (NAME(amx_tiles)(dims) + NAME(together) - 1) / NAME(together);
}

static void NAME(amx_phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    int64_t tiles = NAME(amx_tiles)(dims), steps = NAME(steps)(dims);
    for (int64_t u = begin; u < end; u++) {
        int64_t t = u * NAME(together), t_end = t + NAME(together) < tiles ? t + NAME(together) : tiles;
        uint16_t *to = (uint16_t *)scratch + t * steps * DOT_CELL;
#ifdef PROLOGUE_ROW
        float row[(DOT_ROW + 31) / 32 * 32] __attribute__((aligned(64)));
        memset(row + DOT_ROW / 32 * 32, 0, (DOT_ROW + 31) / 32 * 128 - DOT_ROW / 32 * 128);
        for (int64_t r = 0; r < 32 && t * 32 + r < DOT_M; r++) {
            PROLOGUE_ROW(t * 32 + r, row);
            dot_split_row(to + r * 32, row, DOT_ROW);
        }
#else
        NAME(pack_rows)(bufs, dims, to, steps, t, t_end, 0, steps);
#endif
    }
}
#endif

/* The same of panels. */
static void NAME(pack_panels)(void *const *bufs, const int64_t *dims, uint16_t *to, int64_t p, int64_t p_end, int64_t k,
                              int64_t k_end)
{
    int64_t panels = p_end - p, steps = k_end - k, cells = panels * steps;
    for (int64_t n = 0; n < cells; n++) {
        struct dot_cell c = dot_cell_at(PAIRS_ALONG, n, panels, steps), next = dot_cell_at(PAIRS_ALONG, n + 1, panels, steps);
        int64_t n0 = (p + c.line) * 32, valid = DOT_N - n0 < 32 ? DOT_N - n0 : 32;
        int64_t at = (k + c.step) * 32, kc = DOT_K - at < 32 ? DOT_K - at : 32;
        PACK_PAIRS(to + (c.line * steps + c.step) * DOT_CELL, n0, valid, at, kc,
                   PAIRS_AT((p + next.line) * 32, (k + next.step) * 32));
    }
}

/* Sums that wait for their epilogue. */
struct NAME(sums) {
    int64_t m, rows, n0;
    const float *c;
};

DOT_INLINE void NAME(finish)(void *const *bufs, const int64_t *dims, struct NAME(sums) *s, int64_t rows)
{
    int valid = DOT_N - s->n0 < DOT_NR ? (int)(DOT_N - s->n0) : DOT_NR;
    if (rows > s->rows) rows = s->rows;
    for (int64_t r = 0; r < rows; r++) EPILOGUE(s->m + r, s->n0, s->c + r * DOT_NR, valid);
    s->m += rows, s->rows -= rows, s->c += rows * DOT_NR;
}

/* Cells of either side that one tile by one panel takes. */
struct NAME(sides) {
    const uint16_t *a, *w;
};

/* Meanwhile the vector units finish the sums before, a few rows a step, and `lines` lines a step arrive from `far`. `then` are
 * the sides that come after these. */
DOT_INLINE void NAME(multiply)(void *const *bufs, const int64_t *dims, struct NAME(sides) at, struct NAME(sides) then,
                               int64_t steps, float *c, int first, const uint16_t *far, int64_t lines, struct NAME(sums) *s)
{
    dot_amx_open(32, c, first);
#pragma GCC unroll 1
    for (int64_t i = 0; i < steps; i++) {
        struct NAME(sides) next = i + 1 < steps ? (struct NAME(sides)){at.a + DOT_CELL, at.w + DOT_CELL} : then;
        dot_amx_split(at.a, at.w, next.a, next.w);
        at = next;
        if (s->rows) NAME(finish)(bufs, dims, s, 4);
#pragma GCC unroll 1
        for (int64_t line = 0; line < lines; line++, far += 32) __builtin_prefetch(far, 0, 2);
    }
    if (s->rows) NAME(finish)(bufs, dims, s, 32);
    dot_amx_close(32, c);
}

/* Tiles t .. t_end by panels p .. p_end. `rows` are the cells of all tiles; `near` is for cells, then sums. */
DOT_OUTLINE void NAME(amx_unit)(void *const *bufs, const int64_t *dims, const char *rows, char *near, int64_t t,
                                int64_t t_end, int64_t p, int64_t p_end)
{
    int64_t steps = NAME(steps)(dims), depths = NAME(depths)(dims), wide = p_end - p, turn = 0;
    uint16_t *w = (uint16_t *)near;
    float *c = (float *)(near + (depths > 1 ? NAME(waiting) : NAME(near)) * DOT_CELL * 2);
    struct NAME(sums) s = {0};
    for (int64_t d = 0; d < depths; d++) {
        int64_t k = d * steps / depths, here = (d + 1) * steps / depths - k, lines = (96 + wide - 1) / wide;
        const uint16_t *a = (const uint16_t *)rows + (t * steps + k) * DOT_CELL;
        int64_t apart = steps;
        NAME(pack_panels)(bufs, dims, w, p, p_end, k, k + here);
#if ROWS_NEAR
        NAME(pack_rows)(bufs, dims, w + wide * here * DOT_CELL, here, t, t_end, k, k + here);
        a = w + wide * here * DOT_CELL, apart = here, lines = 0;
#endif
        for (int64_t i = t; i < t_end; i++, a += apart * DOT_CELL)
            for (int64_t q = p; q < p_end; q++, turn++) {
                float *to = c + (depths > 1 ? (i - t) * wide + q - p : turn % 2) * 32 * DOT_NR;
                const uint16_t *far = a + apart * DOT_CELL + (q - p) * here * lines * 32;
                struct NAME(sides) at = {a, w + (q - p) * here * DOT_CELL}, then = {a, at.w + here * DOT_CELL};
                if (q + 1 == p_end) then.a += apart * DOT_CELL, then.w = w;
                NAME(multiply)(bufs, dims, at, then, here, to, k == 0, far, lines, &s);
                if (d + 1 < depths) continue;
                s.m = i * 32, s.rows = DOT_M - s.m < 32 ? DOT_M - s.m : 32, s.n0 = q * DOT_NR, s.c = to;
            }
    }
    NAME(finish)(bufs, dims, &s, 32);
}

static int64_t NAME(amx_count)(const int64_t *dims) { return NAME(grid)(dims).blocks * NAME(grid)(dims).groups; }

static void NAME(amx_phase1)(void *const *bufs, const int64_t *dims, const char *scratch, int64_t begin, int64_t end)
{
    char near[NAME(amx_bytes)] __attribute__((aligned(64)));
    int64_t tiles = NAME(amx_tiles)(dims), panels = NAME(amx_panels)(dims);
    struct NAME(grid) g = NAME(grid)(dims);
    dot_amx_configure(32);
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u % g.blocks, q = u / g.blocks;
        NAME(amx_unit)(bufs, dims, scratch, near, b * tiles / g.blocks, (b + 1) * tiles / g.blocks, q * panels / g.groups,
                       (q + 1) * panels / g.groups);
    }
    dot_amx_release();
    dot_fence();
}
#endif
