/* The matrix unit's way through `dot_free.c`, included before it where both sides are bf16 values, with the same slots and
 *
 *   ROWS_AT(m, k), PAIRS_AT(n0, k)   addresses of A(m, k) and B(k, n0); ROWS_LINE, PAIRS_LINE from a line of 32 to the next
 *   PACK_ROWS(dst, m, mr, k, kc)     writes A(m .. m + mr, k .. k + kc) to a block of rows, zeros beyond mr and kc
 *   PACK_PAIRS(dst, n0, n, k, kc)    writes B(k .. k + kc, n0 .. n0 + n) to a block of pairs, zeros beyond n and kc
 *   ROWS_ALONG                       1 where a line of A goes along the sum, else 0
 *
 * as `dot_pairs.c` has them. A unit packs both sides itself, a block of depth at a time: the rows rest in the second-level
 * cache while panels of 32 columns pass; while one panel is multiplied, the vector units pack the next one and finish the
 * sums of the tile before. Sums over one row do not depend on the unit that it is in: k ascends in steps of 32 from zero.
 */
#ifdef DOT_PAIRS
#define DOT_MATRIX_UNIT dot_amx
enum {
    NAME(whole) = 48,    /* steps of 32 of k that are one block; of longer sums the blocks are DOT_PAIRS_STEPS */
    NAME(near) = 384,    /* tile-steps of 2 KiB of rows that rest in the second-level cache */
    NAME(highest) = 16,  /* tiles of a unit */
    NAME(widest) = 8,    /* panels of a unit whose sums wait in memory between blocks */
    NAME(amx_units) = 16,
};

static int64_t NAME(steps)(const int64_t *dims) { return (DOT_K + 31) / 32; }
static int64_t NAME(amx_tiles)(const int64_t *dims) { return (DOT_M + 31) / 32; }
static int64_t NAME(amx_panels)(const int64_t *dims) { return (DOT_N + 31) / 32; }

static int64_t NAME(depths)(const int64_t *dims)
{
    int64_t steps = NAME(steps)(dims);
    return steps > NAME(whole) ? (steps + DOT_PAIRS_STEPS - 1) / DOT_PAIRS_STEPS : 1;
}

static int64_t NAME(amx_blocks)(const int64_t *dims)
{
    int64_t tiles = NAME(amx_tiles)(dims), steps = NAME(steps)(dims), high = NAME(highest);
    if (NAME(depths)(dims) == 1) {
        if (steps * high > NAME(near)) high = NAME(near) / steps;
    } else if (tiles * NAME(amx_panels)(dims) < NAME(amx_units) * NAME(highest) * NAME(widest)) {
        high /= 2; /* the fewer units, the squarer */
    }
    return (tiles + high - 1) / high;
}

static int64_t NAME(amx_groups)(const int64_t *dims)
{
    int64_t blocks = NAME(amx_blocks)(dims), panels = NAME(amx_panels)(dims);
    int64_t wanted = (NAME(amx_units) + blocks - 1) / blocks;
    int64_t least = NAME(depths)(dims) > 1 ? (panels + NAME(widest) - 1) / NAME(widest) : 1;
    int64_t groups = least > wanted ? least : wanted;
    return groups < panels ? groups : panels;
}

/* Blocks of a side that come next, one in `every` steps, and lines of the block after. */
struct NAME(supply) {
    uint16_t *to;
    const uint16_t *far;
    int64_t at, k, k_end, every, left, lines;
};

/* What the vector units do while the matrix unit multiplies. */
struct NAME(beside) {
    int64_t m, rows, n0; /* sums that wait for their epilogue */
    const float *c;
    int64_t k0, k1; /* the depth of these pairs */
    struct NAME(supply) pairs, a;
    int64_t t, t_end, a_k0; /* the block whose rows are packed */
};

DOT_INLINE void NAME(pace)(struct NAME(supply) *s, int64_t every)
{
    s->every = every, s->lines = (32 + every - 1) / every;
}

DOT_INLINE void NAME(finish)(void *const *bufs, const int64_t *dims, struct NAME(beside) *s, int64_t rows)
{
    int valid = DOT_N - s->n0 < DOT_NR ? (int)(DOT_N - s->n0) : DOT_NR;
    if (rows > s->rows) rows = s->rows;
    for (int64_t r = 0; r < rows; r++) EPILOGUE(s->m + r, s->n0, s->c + r * DOT_NR, valid);
    s->m += rows, s->rows -= rows, s->c += rows * DOT_NR;
}

DOT_OUTLINE void NAME(pack_pairs)(void *const *bufs, const int64_t *dims, struct NAME(beside) *b)
{
    struct NAME(supply) *s = &b->pairs;
    int64_t n0 = s->at * DOT_NR, n = DOT_N - n0 < DOT_NR ? DOT_N - n0 : DOT_NR;
    int64_t k = s->k, kc = DOT_K - k < 32 ? DOT_K - k : 32;
    PACK_PAIRS(s->to, n0, n, k, kc);
    s->to += 1024, s->k += 32, s->left = s->every;
    s->far = k + 32 < b->k1 ? PAIRS_AT(n0, k + 32) : PAIRS_AT(n0 + DOT_NR, b->k0);
}

DOT_OUTLINE void NAME(pack_rows)(void *const *bufs, const int64_t *dims, const char *scratch, struct NAME(beside) *b)
{
    struct NAME(supply) *s = &b->a;
    int64_t m = s->at * 32, mr = DOT_M - m < 32 ? DOT_M - m : 32, k = s->k, kc = DOT_K - k < 32 ? DOT_K - k : 32;
    int64_t steps = (s->k_end - b->a_k0) / 32;
    PACK_ROWS(s->to + ((s->at - b->t) * steps + (k - b->a_k0) / 32) * 1024, m, mr, k, kc);
    if (ROWS_ALONG) {
        s->k += 32;
        if (s->k == s->k_end && s->at + 1 < b->t_end) s->k = b->a_k0, s->at++;
    } else if (++s->at == b->t_end) {
        s->at = b->t, s->k += 32;
    }
    s->far = ROWS_AT(s->at * 32, s->k), s->left = s->every;
}

/* The rows of tiles t .. t_end and `steps` from k on are packed next. */
DOT_INLINE void NAME(begin_rows)(struct NAME(beside) *b, uint16_t *to, int64_t t, int64_t t_end, int64_t k, int64_t steps)
{
    b->t = b->a.at = t, b->t_end = t_end, b->a_k0 = b->a.k = k * 32, b->a.k_end = (k + steps) * 32, b->a.to = to;
}

DOT_INLINE void NAME(arrive)(struct NAME(supply) *s, int64_t line)
{
    for (int64_t i = 0; i < s->lines; i++, s->far += line) __builtin_prefetch(s->far, 0, 2);
    s->left--;
}

/* Of one tile by one panel; the rows at `then` come after these. */
DOT_INLINE void NAME(multiply)(void *const *bufs, const int64_t *dims, const char *scratch, const uint16_t *a,
                               const uint16_t *then, const uint16_t *w, int64_t steps, float *c, int first,
                               struct NAME(beside) *s)
{
    dot_amx_open(32, c, first);
#pragma GCC unroll 1
    for (int64_t i = 0; i < steps; i++, w += 1024) {
        const uint16_t *next = i + 1 < steps ? a + 1024 : then;
        dot_amx_step(a, w, next);
        a = next;
        if (s->rows) NAME(finish)(bufs, dims, s, 32 / DOT_PAIRS_STEPS);
        if (s->pairs.k < s->pairs.k_end) {
            NAME(arrive)(&s->pairs, PAIRS_LINE);
            if (s->pairs.left <= 0) NAME(pack_pairs)(bufs, dims, s);
        }
        if (s->a.k < s->a.k_end) {
            NAME(arrive)(&s->a, ROWS_LINE);
            if (s->a.left <= 0) NAME(pack_rows)(bufs, dims, scratch, s);
        }
    }
    if (s->rows) NAME(finish)(bufs, dims, s, 32);
    dot_amx_close(32, c);
}

/* Tiles t .. t_end by panels p .. p_end. `near` is for rows, then sums; it has the rows of these tiles where `packed`. */
DOT_OUTLINE void NAME(amx_unit)(void *const *bufs, const int64_t *dims, const char *scratch, char *near, int packed,
                                int64_t t, int64_t t_end, int64_t p, int64_t p_end)
{
    uint16_t w[2][DOT_PAIRS_STEPS * 1024] __attribute__((aligned(64)));
    int64_t steps = NAME(steps)(dims), depths = NAME(depths)(dims), high = t_end - t;
    int64_t turns = depths > 1 ? 2 * NAME(highest) * DOT_PAIRS_STEPS : NAME(near);
    uint16_t *a = (uint16_t *)near, *a_next = a + NAME(highest) * DOT_PAIRS_STEPS * 1024;
    float *c = (float *)(a + turns * 1024);
    struct NAME(beside) s = {0};
    NAME(pace)(&s.pairs, high), NAME(pace)(&s.a, p_end - p);
    if (!packed) NAME(begin_rows)(&s, a, t, t_end, 0, steps / depths);
    for (int64_t d = 0; d < depths; d++) {
        int64_t k0 = d * steps / depths, here = (d + 1) * steps / depths - k0, turn = 0;
        int64_t parts = here > DOT_PAIRS_STEPS ? (here + DOT_PAIRS_STEPS - 1) / DOT_PAIRS_STEPS : 1;
        const uint16_t *block = d % 2 ? a_next : a;
        while (s.a.k < s.a.k_end) NAME(pack_rows)(bufs, dims, scratch, &s);
        if (d + 1 < depths)
            NAME(begin_rows)(&s, d % 2 ? a : a_next, t, t_end, k0 + here, (d + 2) * steps / depths - k0 - here);
        s.k0 = k0 * 32, s.k1 = (k0 + here) * 32;
        s.pairs.to = w[0], s.pairs.at = p, s.pairs.k = k0 * 32, s.pairs.k_end = (k0 + here / parts) * 32;
        for (int64_t q = p; q < p_end; q++)
            for (int64_t part = 0; part < parts; part++, turn ^= 1) {
                int64_t k = part * here / parts, length = (part + 1) * here / parts - k;
                int64_t next = part + 1 < parts ? part + 1 : 0;
                int last = d + 1 == depths && part + 1 == parts;
                while (s.pairs.k < s.pairs.k_end) NAME(pack_pairs)(bufs, dims, &s);
                s.pairs.to = w[turn ^ 1], s.pairs.at = next ? q : q + 1;
                s.pairs.k = (k0 + next * here / parts) * 32;
                s.pairs.k_end = s.pairs.at < p_end ? (k0 + (next + 1) * here / parts) * 32 : s.pairs.k;
                for (int64_t i = t; i < t_end; i++) {
                    float *to = c + ((depths > 1 ? (q - p) * high : 0) + i - t) * 32 * DOT_NR;
                    const uint16_t *rows = block + ((i - t) * here + k) * 1024;
                    const uint16_t *then = i + 1 < t_end ? rows + here * 1024 : block + next * here / parts * 1024;
                    if (length == DOT_PAIRS_STEPS)
                        NAME(multiply)(bufs, dims, scratch, rows, then, w[turn], DOT_PAIRS_STEPS, to, k0 + k == 0, &s);
                    else
                        NAME(multiply)(bufs, dims, scratch, rows, then, w[turn], length, to, k0 + k == 0, &s);
                    if (!last) continue;
                    s.m = i * 32, s.rows = DOT_M - s.m < 32 ? DOT_M - s.m : 32, s.n0 = q * DOT_NR, s.c = to;
                }
            }
    }
    NAME(finish)(bufs, dims, &s, 32);
}

#ifdef PROLOGUE_ROW
/* A row that an expression made waits in scratch. */
static void NAME(keep_row)(uint16_t *to, const float *row)
{
    for (int64_t k = 0; k < DOT_ROW; k++) to[k] = (uint16_t)(dot_bits(row[k]) >> 16); /* exact: a bf16 value */
}
#endif

static int64_t NAME(amx_count)(const int64_t *dims) { return NAME(amx_blocks)(dims) * NAME(amx_groups)(dims); }

static void NAME(amx_phase1)(void *const *bufs, const int64_t *dims, const char *scratch, int64_t begin, int64_t end)
{
    enum {
        whole = NAME(near) * 2048 + NAME(highest) * 4096,
        parts = 2 * NAME(highest) * DOT_PAIRS_STEPS * 2048 + NAME(highest) * NAME(widest) * 4096,
    };
    char near[whole > parts ? whole : parts] __attribute__((aligned(64)));
    int64_t tiles = NAME(amx_tiles)(dims), panels = NAME(amx_panels)(dims);
    int64_t blocks = NAME(amx_blocks)(dims), groups = NAME(amx_groups)(dims);
    dot_amx_configure(32);
    for (int64_t u = begin; u < end; u++) {
        int64_t b = u / groups, g = u % groups;
        int packed = u > begin && g > 0 && NAME(depths)(dims) == 1;
        NAME(amx_unit)(bufs, dims, scratch, near, packed, b * tiles / blocks, (b + 1) * tiles / blocks,
                       g * panels / groups, (g + 1) * panels / groups);
    }
    dot_amx_release();
    dot_fence();
}
#endif
