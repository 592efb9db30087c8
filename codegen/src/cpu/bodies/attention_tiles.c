/* Attention forward by the matrix unit, where queries, keys and values are bf16: the way of `attention.c` with its units,
 * its masks and its fixed key tiles and chunks, the products by tiles. Comes after `attention.c`, whose slots and names it uses. Leaves,
 * where ATTN_TILED is 1, NAME(by_tiles), NAME(tile_left) and TILE_MAX.
 *
 * A row of a unit is a column here, so that all of softmax runs down columns, sixteen at a time:
 *   scores   [keys][columns]  = keys [16][D] as they lie in memory, times queries as pairs of d
 *   results  [DV][columns]   += values transposed [16][keys], times weights as pairs of keys
 * Codes come as bf16, which holds their values; their scales multiply scores and weights.
 * A weight w is the sum of two bf16 numbers, its upper half and what that leaves, so that no more than 2^-17 of it is
 * lost; both are multiplied. Sums of a tile start at zero and join those before them outside the unit: a tile that a column
 * does not see leaves the column's bits alone. So a row's bits depend on its query and its visible keys, here too.
 */
#if ATTN_TILED
#define TILE_MAX 0.693147181f /* maxima count in powers of two */
#define COLUMN_TILES ((ROWS + 15) / 16 + MERGE)
#define STEPS (ATTN_KEYS / 32)
#define FEW 4 /* rows that use a value so seldom that transposing it for the matrix unit costs more than it saves */

typedef int32_t NAME(v16i) __attribute__((vector_size(64)));

/* Sums of a unit's rows; of few rows over numbers, of each 32 columns the even before the odd. */
struct NAME(tile_sums) {
    float o[COLUMN_TILES][DV][16] __attribute__((aligned(64)));
    float few[MERGE][FEW][DV] __attribute__((aligned(64)));
    float max[COLUMN_TILES][16], sum[COLUMN_TILES][16] __attribute__((aligned(64)));
};

struct NAME(tiles) {
    uint32_t q[COLUMN_TILES][D / 32][16][16] __attribute__((aligned(64))); /* pairs of d, columns */
    float s[2][ATTN_KEYS][16] __attribute__((aligned(64)));                /* of two tiles of columns */
    uint32_t w[2][2][STEPS][16][16] __attribute__((aligned(64)));          /* [upper, rest][tile of columns]: pairs of keys */
    float sums[2][32][16] __attribute__((aligned(64)));                    /* [tile of columns][dv] */
    uint16_t k[ATTN_KEYS][D] __attribute__((aligned(64)));                 /* keys that do not lie in rows of one distance */
    uint16_t v[DV / 32][STEPS][32][32] __attribute__((aligned(64)));       /* [dv][keys] */
    float keep[2][16] __attribute__((aligned(64)));
    int32_t lo[COLUMN_TILES][16], hi[COLUMN_TILES][16]; /* visible keys of a column; none of one that stands for no row */
    int32_t least[COLUMN_TILES], most[COLUMN_TILES];    /* keys that some column of a tile sees lie between */
    int32_t all_lo[COLUMN_TILES], all_hi[COLUMN_TILES]; /* those that all its columns see */
    int64_t rows[ATTN_KEYS];                            /* of the keys of the tile at hand, in memory */
    int64_t next[ATTN_KEYS];                            /* of those of the next one */
    const uint16_t *from[ATTN_KEYS / 16];               /* where its keys are, 16 of them */
    int64_t stride[ATTN_KEYS / 16];
    int odd;                                            /* some value is no finite number */
    float f[2][ATTN_KEYS][16] __attribute__((aligned(64)));  /* of few rows: weights [upper, rest] */
    float part[FEW][DV] __attribute__((aligned(64)));        /* what a tile adds to their results */
    float k_scales[ATTN_KEYS], v_scales[ATTN_KEYS];          /* of codes of the tile and a key head */
    struct NAME(tile_sums) two[2], *now, *all;               /* of the chunk at hand, and of those before it */
};

/* Queries as pairs, and what each column sees. */
static void NAME(open)(const struct NAME(unit) *u, struct NAME(tiles) *t, const uint16_t *q) {
    int of_group = (u->rows + 15) / 16;
    t->all = &t->two[0], t->now = &t->two[1];
    for (int c = 0; c < of_group * u->groups; c++) {
        const uint16_t *from[16];
        int r0 = c % of_group * 16;
        t->least[c] = t->all_hi[c] = INT32_MAX, t->most[c] = t->all_lo[c] = 0;
        for (int i = 0; i < 16; i++) {
            int r = c / of_group * u->rows + r0 + i, at = NAME(query)(u, r), pos = u->base + u->q0 + at;
            int real = r0 + i < u->rows;
            t->lo[c][i] = real ? NAME(sees_from)(pos) : 0;
            t->hi[c][i] = !real ? 0 : CAUSAL && pos + 1 < u->keys ? pos + 1 : u->keys;
            from[i] = real ? q + Q_OFF + (u->row0 + at) * Q_ROW + NAME(head)(u, r) * (int64_t)Q_HEAD : 0;
            if (!real) continue;
            t->least[c] = t->lo[c][i] < t->least[c] ? t->lo[c][i] : t->least[c];
            t->most[c] = t->hi[c][i] > t->most[c] ? t->hi[c][i] : t->most[c];
            t->all_lo[c] = t->lo[c][i] > t->all_lo[c] ? t->lo[c][i] : t->all_lo[c];
            t->all_hi[c] = t->hi[c][i] < t->all_hi[c] ? t->hi[c][i] : t->all_hi[c];
        }
        for (int s = 0; s < D / 32; s++) {
            dot_q8 x[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) x[i] = from[i] ? dot_line(from[i] + s * 32) : (dot_q8){0};
            dot_transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) *(dot_q8 *)t->q[c][s][i] = x[i];
        }
    }
}

static void NAME(tile_clear)(const struct NAME(unit) *u, struct NAME(tile_sums) *sums) {
    for (int c = 0; c < (u->rows + 15) / 16 * u->groups; c++) {
        v_store(sums->max[c], v_splat(-__builtin_inff())), v_store(sums->sum[c], (vf){0});
        if (u->rows <= FEW) memset(sums->few[c], 0, sizeof sums->few[c]);
        else memset(sums->o[c], 0, sizeof sums->o[c]);
    }
}

/* Where the keys from j0 on are; the last ones are copied, for the rows behind them may not be memory. */
static void NAME(locate)(const struct NAME(unit) *u, int64_t *rows, int j0) {
    for (int i = 0; i < ATTN_KEYS; i++) rows[i] = NAME(key_row)(u, j0 + i < u->keys ? j0 + i : u->keys - 1);
}

/* 32 numbers as bf16. */
INLINE dot_q8 NAME(line)(const K_T *from) {
    return KV_CODES ? attn_line(KV_CODES, from) : dot_line((const uint16_t *)(const void *)from);
}

static void NAME(keys)(const struct NAME(unit) *u, struct NAME(tiles) *t, const K_T *k, int j0) {
    for (int i = 0; i < ATTN_KEYS / 16; i++) {
        const int64_t *rows = t->rows + i * 16;
        int even = !KV_CODES && j0 + i * 16 + 16 <= u->keys;
#if defined(PAGES_BUF)
        even = even && PAGE % 16 == 0;
#endif
        t->from[i] = even ? (const uint16_t *)(k + rows[0] * K_ROW) : t->k[i * 16];
        t->stride[i] = (even ? K_ROW : D) * 2;
        for (int r = 0; !even && r < 16; r++)
            for (int d = 0; d < D; d += 32) *(dot_q8 *)(t->k[i * 16 + r] + d) = NAME(line)(k + rows[r] * K_ROW + d);
    }
}

/* Values transposed; those of keys that are none, and what is no finite number, as zero. */
DOT_OUTLINE void NAME(values)(struct NAME(tiles) *t, const V_T *v, int count) {
    typedef uint16_t v32h __attribute__((vector_size(64)));
    v32h odd = {0};
    for (int d = 0; d < DV; d += 32)
        for (int s = 0; s < STEPS; s++) {
            dot_q8 low[16], high[16];
            if (s * 32 >= count) {
                memset(t->v[d / 32][s], 0, sizeof t->v[d / 32][s]);
                continue;
            }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                int j = s * 32 + 2 * i;
                v32h x[2];
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    x[h] = j + h < count ? (v32h)NAME(line)(v + t->rows[j + h] * V_ROW + d) : (v32h){0};
                    v32h none = (v32h)((x[h] & 0x7f80) == 0x7f80);
                    odd |= none, x[h] &= ~none;
                }
                low[i] = DOT_LOW16(x[0], x[1]), high[i] = DOT_HIGH16(x[0], x[1]);
            }
            dot_transpose(low), dot_transpose(high);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                dot_q8 *to = (dot_q8 *)t->v[d / 32][s] + i / 4 * 8 + i % 4;
                to[0] = low[i], to[4] = high[i];
            }
        }
    dot_q8 any = (dot_q8)odd;
    t->odd = (any[0] | any[1] | any[2] | any[3] | any[4] | any[5] | any[6] | any[7]) != 0;
}

/* Scores of the key tile and one or two (a literal) tiles of columns from c on. */
INLINE void NAME(tile_scores)(struct NAME(tiles) *t, int c, int two, int a, int b) {
    for (int i = a / 32 * 2; i * 16 < b; i += 2) {
        DOT_AMX_ZERO(0); DOT_AMX_ZERO(2);
        if (two) { DOT_AMX_ZERO(1); DOT_AMX_ZERO(3); }
        for (int s = 0; s < D / 32; s++) {
            DOT_AMX_LOAD(4, t->from[i] + s * 32, t->stride[i]);
            DOT_AMX_LOAD(5, t->from[i + 1] + s * 32, t->stride[i + 1]);
            DOT_AMX_LOAD(6, t->q[c][s], 64);
            if (two) DOT_AMX_LOAD(7, t->q[c + 1][s], 64);
            DOT_AMX_DOT(0, 4, 6); DOT_AMX_REST;
            if (two) { DOT_AMX_DOT(1, 4, 7); DOT_AMX_REST; }
            DOT_AMX_DOT(2, 5, 6); DOT_AMX_REST;
            if (two) { DOT_AMX_DOT(3, 5, 7); DOT_AMX_REST; }
        }
        DOT_AMX_SAVE(0, t->s[0][i * 16], 64); DOT_AMX_SAVE(2, t->s[0][i * 16 + 16], 64);
        if (two) { DOT_AMX_SAVE(1, t->s[1][i * 16], 64); DOT_AMX_SAVE(3, t->s[1][i * 16 + 16], 64); }
    }
}

/* 2^x for x <= 0 but for rounding; below 2^-126, that. NaN stays. */
INLINE vf NAME(power)(vf x) {
    x = v_max(v_splat(-126.0f), x);
    vf t = x + 12582912.0f, r = x - (t - 12582912.0f);
    vf p = v_fma(r, v_splat(1.339887440e-3f), v_splat(9.618437357e-3f));
    p = v_fma(p, r, v_splat(5.550332471e-2f));
    p = v_fma(p, r, v_splat(2.402264689e-1f));
    p = v_fma(p, r, v_splat(6.931471825e-1f));
    p = v_fma(p, r, v_splat(1.0f));
    return (vf)((vu)p + ((vu)t << 23));
}

/* What a greater maximum leaves of sums. */
INLINE vf NAME(tile_left)(vf max, vf next) {
    NAME(v16i) same = max == next;
    return (vf)(((vu)NAME(power)(max - next) & ~(vu)same) | ((vu)v_splat(1.0f) & (vu)same));
}

/* Scores of one tile of columns to weights, as pairs: the new maxima, what the sums before keep, exponentials. Maxima
 * count in powers of two. Keys a .. b (whole 32s) were computed; `edge` (a literal) when some column does not see all, `few`
 * (a literal) when weights are wanted as numbers, too. */
INLINE void NAME(weigh_as)(struct NAME(tiles) *t, int c, int half, int j0, int a, int b, int edge, int few) {
    float (*s)[16] = t->s[half];
    const float factor = (SOFTCAP > 0 ? 1.0f : SCALE) * 1.44269504f;
    const vf none = v_splat(-__builtin_inff());
    NAME(v16i) lo, hi;
    memcpy(&lo, t->lo[c], sizeof lo), memcpy(&hi, t->hi[c], sizeof hi);
    lo -= j0, hi -= j0;
    for (int j = a; KV_CODES && j < b; j++) v_store(s[j], v_load(s[j]) * v_splat(t->k_scales[j]));
    if (SOFTCAP > 0)
        for (int j = a; j < b; j++)
            for (int l = 0; l < 16; l++)
                s[j][l] = SOFTCAP * m_tanh(s[j][l] * (SCALE / (SOFTCAP > 0 ? SOFTCAP : 1.0f)));
    vf top[4] = {none, none, none, none};
    for (int j = a; j < b; j += 4)
        ATTN_EACH(i, 4) {
            vf x = v_load(s[j + i]);
            if (edge) {
                NAME(v16i) sees = (j + i >= lo) & (j + i < hi);
                x = (vf)(((vu)x & (vu)sees) | ((vu)none & ~(vu)sees));
            }
            top[i] = v_max(x, top[i]);
        }
    vf most = v_max(v_max(top[0], top[1]), v_max(top[2], top[3])) * v_splat(factor);
    vf before = v_load(t->now->max[c]), m = v_max(most, before);
    /* A column that has seen nothing has no maximum: then nothing is kept, and all its weights are masked. */
    vf keep = NAME(tile_left)(before, m), sum[4] = {{0}, {0}, {0}, {0}};
    v_store(t->keep[half], keep), v_store(t->now->max[c], m);
    for (int j = a; j < b; j += 4) {
        vf x[4];
        ATTN_EACH(i, 4) {
            x[i] = NAME(power)(v_fma(v_load(s[j + i]), v_splat(factor), -m));
            if (edge) x[i] = (vf)((vu)x[i] & (vu)((j + i >= lo) & (j + i < hi)));
            sum[i] += x[i];
            if (!KV_CODES) continue;
            x[i] *= v_splat(t->v_scales[j + i]);
            if (edge) x[i] = (vf)((vu)x[i] & (vu)((j + i >= lo) & (j + i < hi)));
        }
        ATTN_EACH(i, 2) {
            vu even = (vu)x[2 * i] & 0xffff0000u, odd = (vu)x[2 * i + 1] & 0xffff0000u;
            vu rest_even = (vu)(x[2 * i] - (vf)even) + 0x8000u, rest_odd = (vu)(x[2 * i + 1] - (vf)odd) + 0x8000u;
            *(vu *)t->w[0][half][j / 32][j % 32 / 2 + i] = even >> 16 | odd;
            *(vu *)t->w[1][half][j / 32][j % 32 / 2 + i] = rest_even >> 16 | (rest_odd & 0xffff0000u);
            if (!few) continue;
            v_store(t->f[0][j + 2 * i], (vf)even), v_store(t->f[1][j + 2 * i], (vf)(rest_even & 0xffff0000u));
            v_store(t->f[0][j + 2 * i + 1], (vf)odd), v_store(t->f[1][j + 2 * i + 1], (vf)(rest_odd & 0xffff0000u));
        }
    }
    v_store(t->now->sum[c], v_fma(v_load(t->now->sum[c]), keep, (sum[0] + sum[1]) + (sum[2] + sum[3])));
}

/* Each way once, for inlining them into every caller makes the kernel long to compile. */
DOT_OUTLINE void NAME(tile_weigh)(struct NAME(tiles) *t, int c, int half, int j0, int a, int b, int few) {
    int edge = t->all_lo[c] > j0 + a || t->all_hi[c] < j0 + b;
    if (edge && few)
        NAME(weigh_as)(t, c, half, j0, a, b, 1, 1);
    else if (edge)
        NAME(weigh_as)(t, c, half, j0, a, b, 1, 0);
    else if (few)
        NAME(weigh_as)(t, c, half, j0, a, b, 0, 1);
    else
        NAME(weigh_as)(t, c, half, j0, a, b, 0, 0);
}

/* The upper half of a weight. */
INLINE float NAME(weight)(const struct NAME(tiles) *t, int half, int j, int l) {
    uint32_t pair = t->w[0][half][j / 32][j % 32 / 2][l];
    return bits_f32(j % 2 ? pair & 0xffff0000u : pair << 16);
}

/* Values that are no finite numbers, times the weights of the columns that see them. */
static void NAME(tile_odd)(struct NAME(tiles) *t, int c, int half, const V_T *v, int j0, int a, int b) {
    for (int j = a; j < b; j++)
        for (int d = 0; d < DV; d++) {
            float x = LOAD_V(v[t->rows[j] * V_ROW + d]);
            if ((f32_bits(x) & 0x7f800000) != 0x7f800000) continue;
            for (int l = 0; l < 16; l++)
                if (j0 + j >= t->lo[c][l] && j0 + j < t->hi[c][l])
                    t->now->o[c][d][l] = FMA(NAME(weight)(t, half, j, l), x, t->now->o[c][d][l]);
        }
}

/* Results += weights times values, for one or two (a literal) tiles of columns. */
INLINE void NAME(tile_blend)(struct NAME(tiles) *t, int c, int two, int a, int b) {
    for (int d = 0; d < DV; d += 32) {
        DOT_AMX_ZERO(0); DOT_AMX_ZERO(2);
        if (two) { DOT_AMX_ZERO(1); DOT_AMX_ZERO(3); }
        for (int s = a / 32; s * 32 < b; s++) {
            DOT_AMX_LOAD(4, t->v[d / 32][s][0], 64);
            DOT_AMX_LOAD(5, t->v[d / 32][s][16], 64);
            for (int part = 0; part < 2; part++) {
                DOT_AMX_LOAD(6, t->w[part][0][s], 64);
                if (two) DOT_AMX_LOAD(7, t->w[part][1][s], 64);
                DOT_AMX_DOT(0, 4, 6); DOT_AMX_REST;
                DOT_AMX_DOT(2, 5, 6); DOT_AMX_REST;
                if (two) {
                    DOT_AMX_DOT(1, 4, 7); DOT_AMX_REST;
                    DOT_AMX_DOT(3, 5, 7); DOT_AMX_REST;
                }
            }
        }
        DOT_AMX_SAVE(0, t->sums[0][0], 64); DOT_AMX_SAVE(2, t->sums[0][16], 64);
        if (two) { DOT_AMX_SAVE(1, t->sums[1][0], 64); DOT_AMX_SAVE(3, t->sums[1][16], 64); }
        for (int half = 0; half <= two; half++) {
            vf keep = v_load(t->keep[half]);
            for (int i = 0; i < 32; i++)
                v_store(t->now->o[c + half][d + i], v_fma(v_load(t->now->o[c + half][d + i]), keep, v_load(t->sums[half][i])));
        }
    }
}

INLINE void NAME(tile_columns)(struct NAME(tiles) *t, const V_T *v, int c, int two, int j0) {
    int least = t->least[c], most = t->most[c];
    if (two) {
        least = t->least[c + 1] < least ? t->least[c + 1] : least;
        most = t->most[c + 1] > most ? t->most[c + 1] : most;
    }
    int a = least > j0 ? (least - j0) / 32 * 32 : 0, b = most - j0 < ATTN_KEYS ? (most - j0 + 31) / 32 * 32 : ATTN_KEYS;
    if (a >= b) return;
    NAME(tile_scores)(t, c, two, a, b);
    for (int half = 0; half <= two; half++) NAME(tile_weigh)(t, c + half, half, j0, a, b, 0);
    NAME(tile_blend)(t, c, two, a, b);
    if (t->odd)
        for (int half = 0; half <= two; half++) NAME(tile_odd)(t, c + half, half, v, j0, a, b);
}

/* part = weights times values, for n rows (a literal) from r on, as tile_blend does it, bit for bit: in the matrix unit 16 even
 * and 16 odd keys make a chain each. Values are read where they lie. Meanwhile lines of the next tile are asked for. */
INLINE void NAME(few_part)(struct NAME(tiles) *t, const V_T *v, int r, int n, int a, int b, int count,
                           struct NAME(ahead) *next) {
    struct NAME(ahead) here = *next;
    for (int d = 0; d < DV; d += 32) {
        vf sum[2][2] = {{{0}, {0}}, {{0}, {0}}};
        for (int s = a / 32 * 32; s < b; s += 32) {
            vf x[2][2][2][2]; /* [even, odd keys][row][upper, rest][even, odd columns] */
            ATTN_EACH(o, 2) ATTN_EACH(i, n) ATTN_EACH(p, 2) x[o][i][p][0] = x[o][i][p][1] = (vf){0};
            for (int j = s; j < s + 32 && j < count; j += 2) {
                NAME(prefetch)(&here, (2 * (D + DV) + DV - 1) / DV);
                ATTN_EACH(o, 2) {
                    if (j + o >= count) continue;
                    const V_T *from = v + t->rows[j + o] * V_ROW + d;
#if KV_CODES
                    vf first = attn_values(KV_CODES, from), second = attn_values(KV_CODES, from + 16);
#else
                    vu line = dot_load_u(from);
                    vf first = dot_low(line), second = dot_high(line);
#endif
                    ATTN_EACH(i, n) ATTN_EACH(p, 2) {
                        vf w = v_splat(t->f[p][j + o][r + i]);
                        x[o][i][p][0] = v_fma(w, first, x[o][i][p][0]);
                        x[o][i][p][1] = v_fma(w, second, x[o][i][p][1]);
                    }
                }
            }
            ATTN_EACH(i, n) ATTN_EACH(p, 2) ATTN_EACH(h, 2) sum[i][h] += x[0][i][p][h] + x[1][i][p][h];
        }
        ATTN_EACH(i, n) ATTN_EACH(h, 2) v_store(&t->part[r + i][d + h * 16], sum[i][h]);
    }
    *next = here;
}

/* Place of column d among the results of few rows. */
INLINE int NAME(few_at)(int d) { return KV_CODES ? d : d / 32 * 32 + d % 2 * 16 + d % 32 / 2; }

/* Keys of one tile for few rows, which are one tile of columns. */
static void NAME(few_columns)(struct NAME(tiles) *t, const V_T *v, int c, int rows, int j0, int count,
                              struct NAME(ahead) *next) {
    int a = t->least[c] > j0 ? (t->least[c] - j0) / 32 * 32 : 0;
    int b = t->most[c] - j0 < ATTN_KEYS ? (t->most[c] - j0 + 31) / 32 * 32 : ATTN_KEYS;
    if (a >= b) return;
    NAME(tile_scores)(t, c, 0, a, b);
    NAME(tile_weigh)(t, c, 0, j0, a, b, 1);
    uint32_t before = dot_flush();
    int r = 0;
    for (; r + 2 <= rows; r += 2) NAME(few_part)(t, v, r, 2, a, b, count, next);
    if (r < rows) NAME(few_part)(t, v, r, 1, a, b, count, next);
    dot_unflush(before);
    vu finite = ~(vu){0};
    for (r = 0; r < rows; r++)
        for (int d = 0; d < DV; d += 16) finite &= (vu)(((vu)v_load(&t->part[r][d]) & 0x7f800000u) != 0x7f800000u);
    for (int i = 0; i < 16; i++)
        if (!finite[i]) { /* perhaps for the sake of a value that some row does not see */
            for (r = 0; r < rows; r++)
                for (int d = 0; d < DV; d++) t->now->o[c][d][r] = t->now->few[c][r][NAME(few_at)(d)];
            NAME(values)(t, v, count);
            NAME(tile_blend)(t, c, 0, a, b);
            if (t->odd) NAME(tile_odd)(t, c, 0, v, j0, a, b);
            for (r = 0; r < rows; r++)
                for (int d = 0; d < DV; d++) t->now->few[c][r][NAME(few_at)(d)] = t->now->o[c][d][r];
            return;
        }
    for (r = 0; r < rows; r++) {
        vf keep = v_splat(t->keep[0][r]);
        for (int d = 0; d < DV; d += 16)
            v_store(&t->now->few[c][r][d], v_fma(v_load(&t->now->few[c][r][d]), keep, v_load(&t->part[r][d])));
    }
}

/* The sums of a chunk, that of keys j0 .. end, join those of the chunks before it. */
static void NAME(tile_join)(const struct NAME(unit) *u, struct NAME(tiles) *t, int j0, int end) {
    struct NAME(tile_sums) *all = t->all, *now = t->now;
    for (int c = 0; c < (u->rows + 15) / 16 * u->groups; c++) {
        if (t->most[c] <= j0 || t->least[c] >= end) continue;
        NAME(v16i) lo, hi;
        memcpy(&lo, t->lo[c], sizeof lo), memcpy(&hi, t->hi[c], sizeof hi);
        /* Columns that see nothing of the chunk stay, those that saw nothing before it begin. */
        vu stays = (vu)((hi <= j0) | (lo >= end)), begins = (vu)(lo >= j0) & ~stays;
#define CHOOSE(was, is, joined) (vf)(((vu)(was) & stays) | ((vu)(is) & begins) | ((vu)(joined) & ~(stays | begins)))
        vf was = v_load(all->max[c]), is = v_load(now->max[c]), max = v_max(is, was);
        vf old = NAME(tile_left)(was, max), part = NAME(tile_left)(is, max);
        v_store(all->max[c], CHOOSE(was, is, max));
        was = v_load(all->sum[c]), is = v_load(now->sum[c]);
        v_store(all->sum[c], CHOOSE(was, is, v_fma(was, old, is * part)));
        if (u->rows > FEW) {
            for (int d = 0; d < DV; d++) {
                was = v_load(all->o[c][d]), is = v_load(now->o[c][d]);
                v_store(all->o[c][d], CHOOSE(was, is, v_fma(was, old, is * part)));
            }
            continue;
        }
#undef CHOOSE
        for (int r = 0; r < u->rows; r++) {
            if (begins[r]) memcpy(all->few[c][r], now->few[c][r], sizeof all->few[c][r]);
            if (!stays[r] && !begins[r]) NAME(join)(all->few[c][r], old[r], now->few[c][r], part[r]);
        }
    }
}

/* Sums of a unit's rows, up to 16 from tile of columns c on, as they are written: to the results, or to wait in scratch for
 * those of other chunks. */
static void NAME(tile_rows)(const struct NAME(unit) *u, const struct NAME(tile_sums) *sums, int c, void *const *bufs, int j0,
                            char *scratch) {
    int of_group = (u->rows + 15) / 16, r0 = c % of_group * 16, rows = u->rows - r0 < 16 ? u->rows - r0 : 16;
    float out[16][DV] __attribute__((aligned(64)));
    for (int i = 0; u->rows <= FEW && i < rows; i++)
        for (int d = 0; d < DV; d++) out[i][d] = sums->few[c][i][NAME(few_at)(d)];
    if (u->rows > FEW)
        for (int d = 0; d < DV; d += 16) attn_transpose(sums->o[c][d], 16, &out[0][d], DV);
    for (int i = 0; i < rows; i++) {
        int r = c / of_group * u->rows + r0 + i;
        if (u->parts > 1)
            NAME(keep)(u, r, j0, sums->max[c][i], sums->sum[c][i], out[i], scratch);
        else
            NAME(write)(u, r, sums->max[c][i] * TILE_MAX, sums->sum[c][i], out[i], bufs);
    }
}

/* Keys j0 .. end of a unit. Lines of the first tile were asked for, and are of the one behind the last. */
static void NAME(tile_chunk)(const struct NAME(unit) *u, struct NAME(tiles) *t, const K_T *k, const V_T *v, int j0,
                             int end, struct NAME(ahead) *ahead) {
    int of_group = (u->rows + 15) / 16;
    for (; j0 < end; j0 += ATTN_KEYS) {
        int count = u->keys - j0 < ATTN_KEYS ? u->keys - j0 : ATTN_KEYS, left = u->rows > 16 ? 0 : u->to - j0 - ATTN_KEYS;
        memcpy(t->rows, t->next, sizeof t->rows);
        NAME(locate)(u, t->next, j0 + ATTN_KEYS);
        NAME(turn)(ahead, t->next, left);
        if (u->rows > FEW) NAME(prefetch)(ahead, INT32_MAX);
        for (int g = 0; g < u->groups; g++) {
            const V_T *values = v + g * (int64_t)V_HEAD;
#if KV_CODES
            NAME(scales)(t->k_scales, u->k_scales + g * (int64_t)KS_HEAD, KS_ROW, t->rows);
            NAME(scales)(t->v_scales, u->v_scales + g * (int64_t)VS_HEAD, VS_ROW, t->rows);
#endif
            NAME(keys)(u, t, k + g * (int64_t)K_HEAD, j0);
            if (u->rows <= FEW) {
                NAME(few_columns)(t, values, g, u->rows, j0, count, ahead);
                continue;
            }
            NAME(values)(t, values, count);
            int c = g * of_group, last = c + of_group;
            for (; c + 1 < last; c += 2) NAME(tile_columns)(t, values, c, 1, j0);
            if (c < last) NAME(tile_columns)(t, values, c, 0, j0);
        }
    }
}

static void NAME(by_tiles)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(tiles) t;
    struct NAME(unit) u;
    dot_amx_configure(32);
    struct NAME(walk) walk = {begin, end, NAME(splits)(dims), 0};
    while (NAME(next)(&u, &walk, bufs, dims)) {
        int columns = (u.rows + 15) / 16 * u.groups, left = u.to - u.from;
        const K_T *k = (const K_T *)bufs[K_BUF] + K_OFF + u.key_head * (int64_t)K_HEAD;
        const V_T *v = (const V_T *)bufs[V_BUF] + V_OFF + u.key_head * (int64_t)V_HEAD;
        struct NAME(ahead) ahead;
        NAME(prefetch_from)(&ahead, &u, bufs, t.next, left);
        NAME(locate)(&u, t.next, u.from);
        if (u.rows <= 16) NAME(prefetch)(&ahead, INT32_MAX);
        NAME(open)(&u, &t, bufs[Q_BUF]);
        if (u.from >= u.to) NAME(tile_clear)(&u, t.all);
        for (int j0 = u.from, end; j0 < u.to; j0 = end) {
            end = attn_chunk_end(j0) < u.to ? attn_chunk_end(j0) : u.to;
            NAME(tile_clear)(&u, t.now);
            NAME(tile_chunk)(&u, &t, k, v, j0, end, &ahead);
            struct NAME(tile_sums) *now = t.now;
            for (int c = 0; u.parts > 1 && c < columns; c++) NAME(tile_rows)(&u, now, c, bufs, j0, scratch);
            if (j0 == u.from) t.now = t.all, t.all = now;
            else if (u.parts == 1) NAME(tile_join)(&u, &t, j0, end);
        }
        for (int c = 0; u.parts == 1 && c < columns; c++) NAME(tile_rows)(&u, t.all, c, bufs, 0, scratch);
    }
    dot_amx_release();
}
#undef COLUMN_TILES
#undef STEPS
#undef FEW
#endif
