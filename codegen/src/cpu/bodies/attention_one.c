#if ONE_QUERY
/* One query (decode): each key and value is used by a few rows only, so getting it ready is what costs. Keys are
 * transposed as words, whose two or four numbers are widened on their way into the product; values are read where they lie. Every
 * sum has the terms and the order that it has among many queries. */

/* Vectors of sums a row where n rows are multiplied at once (literals): as many as registers hold beside what is multiplied. */
#define ONE_NV(n) ((n) < 4 ? 4 : ATTN_NV)

/* Lines of keys and values on their way from memory, a tile of keys ahead of those that are computed. They are asked for in the order in
 * which they lie, keys and values in turn, as two streams that the processor's own prefetching follows further than one; and evenly over a
 * tile's computation, for there is room for a few dozens on their way: a burst waits, and behind it memory is idle. */
struct NAME(fetch) {
    const struct NAME(unit) *u, *then; /* whose keys they are, and the unit behind it, if there is one */
    const K_T *all_k;
    const V_T *all_v;
    int64_t rows[ATTN_KEYS];       /* of tile j0 */
    int j0, row, end, run;         /* the rows at hand, so many that lie one behind the other, and the last of the tile */
    const char *k, *v;             /* the next lines of these rows */
    int left_k, left_v;            /* bytes */
    int owed, each_k, each_v;      /* 1/256 of steps: due, and to come due with VW keys to transpose and with a run of values */
};

static void NAME(fetch_rows)(struct NAME(fetch) *f, int row) {
    int groups = f->u->groups, left = f->end - row;
    int whole = groups * D == K_ROW && groups * DV == V_ROW;
    f->row = row, f->run = !whole ? 1 : RUN < left ? RUN : left;
    f->k = (const char *)(f->all_k + f->rows[row] * K_ROW + f->u->key_head * (int64_t)K_HEAD);
    f->v = (const char *)(f->all_v + f->rows[row] * V_ROW + f->u->key_head * (int64_t)V_HEAD);
    f->left_k = f->run * groups * D * (int)sizeof(K_T), f->left_v = f->run * groups * DV * (int)sizeof(V_T);
}

static void NAME(fetch_tile)(struct NAME(fetch) *f, int j0) {
    f->j0 = j0, f->end = f->u->to - j0 < ATTN_KEYS ? f->u->to - j0 : ATTN_KEYS;
    NAME(rows)(f->u, j0, f->rows);
    NAME(fetch_rows)(f, 0);
}

/* Behind the rows at hand: to the next, if there are any. */
OUTLINE int NAME(fetch_on)(struct NAME(fetch) *f) {
    if (f->row + f->run < f->end) return NAME(fetch_rows)(f, f->row + f->run), 1;
    if (f->j0 + ATTN_KEYS < f->u->to) return NAME(fetch_tile)(f, f->j0 + ATTN_KEYS), 1;
    if (!f->then) return 0;
    f->u = f->then, f->then = 0;
    NAME(fetch_tile)(f, f->u->from);
    return 1;
}

/* So many steps: two lines of keys, two of values. */
INLINE void NAME(fetch_steps)(struct NAME(fetch) *f, int steps) {
    const int alike = D * sizeof(K_T) == DV * sizeof(V_T);
    for (; steps > 0 && (f->left_k > 0 || f->left_v > 0 || NAME(fetch_on)(f)); steps--) {
        const char *k = f->k, *v = f->v;
        if (alike || f->left_k > 0) __builtin_prefetch(k, 0, 2), __builtin_prefetch(k + 64, 0, 2);
        if (alike || f->left_v > 0) __builtin_prefetch(v, 0, 2), __builtin_prefetch(v + 64, 0, 2);
        f->k = k + 128, f->v = v + 128;
        f->left_k -= 128, f->left_v -= 128;
    }
}

INLINE void NAME(fetch_due)(struct NAME(fetch) *f, int each) {
    f->owed += each;
    NAME(fetch_steps)(f, f->owed >> 8);
    f->owed &= 255;
}

/* Before keys a .. b of tile j0 of unit u: what is not on its way is asked for at once; the rest, until a whole tile behind this one is,
 * comes due half with the keys and half with the values. */
static void NAME(fetch_pace)(struct NAME(fetch) *f, const struct NAME(unit) *u, int j0, int a, int b) {
    const int widest = D * sizeof(K_T) > DV * sizeof(V_T) ? D * (int)sizeof(K_T) : DV * (int)sizeof(V_T);
    int steps = (u->groups * widest + 127) / 128; /* of a row */
    int keys = u->to - j0 < ATTN_KEYS ? u->to - j0 : ATTN_KEYS;
    int ahead = f->row + (f->u == u ? f->j0 - j0 : u->to - j0 + f->j0 - f->u->from);
    if (f->left_k <= 0 && f->left_v <= 0) ahead += f->run;
    for (; ahead < keys; ahead++) NAME(fetch_steps)(f, steps);
    int owed = (keys + ATTN_KEYS - ahead) * steps * 128;
    int columns = ONE_NV(u->rows < 4 ? u->rows : 4) * VW, products = (u->rows + 3) / 4 * ((DV + columns - 1) / columns);
    f->each_k = owed / (u->groups * ((b - a + VW - 1) / VW));
    f->each_v = owed / (u->groups * products * ((b - a + RUN - 1) / RUN));
}

/* Keys a .. b of a tile as words, in the place of k. */
static void NAME(word_k)(struct NAME(state) *t, const K_T *k, const int64_t *rows, struct NAME(fetch) *next, int a, int b) {
    for (int j = a / VW * VW; j < b; j += VW) {
        const K_T *first = k + rows[j] * K_ROW;
        const void *at[VW];
        for (int i = 0; i < VW; i++) at[i] = RUN % VW ? k + rows[j + i] * K_ROW : first + i * K_ROW;
        NAME(words)(t, at, WORD, j);
        NAME(fetch_due)(next, next->each_k);
    }
}

/* What is multiplied at once: numbers of words, or, PAIRED, two neighbours as bf16. */
INLINE vf NAME(number)(vf word, int part) {
#if KV_CODES && PAIRED
    vf first = attn_value(KV_CODES, (vu)word >> 16 * part), second = attn_value(KV_CODES, (vu)word >> (16 * part + 8));
    return (vf)((vu)first >> 16 | (vu)second);
#elif KV_CODES
    return attn_value(KV_CODES, (vu)word >> 8 * part);
#else
    return WORD == 1 || PAIRED ? word : part ? (vf)((vu)word & 0xffff0000u) : (vf)((vu)word << 16);
#endif
}

#if !PAIRED_VALUES
/* VW values. */
INLINE vf NAME(value)(const V_T *from) {
#if KV_CODES
    return attn_values(KV_CODES, from);
#else
    return WORD == 1 ? v_load((const float *)from) : attn_widen(from);
#endif
}
#endif

/* Scores of n rows (a literal) and keys a .. b. */
INLINE void NAME(score_some)(struct NAME(state) *t, int r, int n, int a, int b) {
    const int nv = ONE_NV(n);
    for (int j = a / VW * VW; j < b; j += nv * VW) {
        /* The last lanes of a step may lie past the tile: then it begins earlier, and computes some scores twice. */
        int at = j + nv * VW <= ATTN_KEYS ? j : ATTN_KEYS - nv * VW;
        vf acc[4][4];
        ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = (vf){0};
        for (int d = 0; d < D; d += WORD) {
            ATTN_EACH(part, WORD / (1 + PAIRED)) {
                vf q[4];
                ATTN_EACH(i, n) q[i] = SPLAT(t->q[r + i][d / (1 + PAIRED) + part]);
                ATTN_EACH(c, nv) {
                    vf k = NAME(number)(v_load(&t->k[d / WORD][at + c * VW]), part);
                    ATTN_EACH(i, n) acc[i][c] = ADD(q[i], k, acc[i][c]);
                }
            }
        }
#if KV_CODES
        ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] *= v_load(&t->k_scales[at + c * VW]);
#endif
        ATTN_EACH(i, n) ATTN_EACH(c, nv) v_store(&t->s[r + i][at + c * VW], acc[i][c]);
    }
}

#if PAIRED_VALUES
#define WEIGHT dot_splat_word
#define BLEND dot_pair
#else
#define WEIGHT v_splat
#define BLEND v_fma
#endif

/* o += weights v for n rows and nv vectors of columns from d on (both literals). */
INLINE void NAME(blend_some)(struct NAME(state) *t, const V_T *v, const int64_t *rows, struct NAME(fetch) *next, int r, int n,
                             int d, int nv, int a, int b) {
    vf acc[4][4];
    ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = v_load(&t->now->o[r + i][d + c * VW]);
    for (int j = a / (1 + PAIRED_VALUES) * (1 + PAIRED_VALUES); j < b;) {
        int end = (j / RUN + 1) * RUN < b ? (j / RUN + 1) * RUN : b;
        const V_T *from = v + rows[j] * V_ROW + d;
        NAME(fetch_due)(next, next->each_v);
        for (; j < end; j += 1 + PAIRED_VALUES, from += (1 + PAIRED_VALUES) * V_ROW) {
            vf w[4];
            ATTN_EACH(i, n) w[i] = WEIGHT(t->s[r + i][j / (1 + PAIRED_VALUES)]);
#if PAIRED_VALUES
            const V_T *beside = RUN > 1 ? from + V_ROW : v + rows[j + 1] * V_ROW + d;
            vf x[4];
            ATTN_EACH(c, nv / 2) attn_pair_keys(NAME(pair_line)(from + c * 2 * VW), NAME(pair_line)(beside + c * 2 * VW), x + 2 * c);
            if (j < a || j + 1 == b) { /* as blend_key */
                vu half = (vu){0} + (j < a ? 0xffff0000u : 0xffffu);
                ATTN_EACH(c, nv) x[c] = (vf)((vu)x[c] & half);
                ATTN_EACH(i, n) w[i] = (vf)((vu)w[i] & half);
            }
            ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = BLEND(w[i], x[c], acc[i][c]);
#else
            ATTN_EACH(c, nv) {
                vf x = NAME(value)(from + c * VW);
                ATTN_EACH(i, n) acc[i][c] = BLEND(w[i], x, acc[i][c]);
            }
#endif
        }
    }
    ATTN_EACH(i, n) ATTN_EACH(c, nv) v_store(&t->now->o[r + i][d + c * VW], acc[i][c]);
}

INLINE void NAME(blend_rows)(struct NAME(state) *t, const V_T *v, const int64_t *rows, struct NAME(fetch) *next, int r, int n,
                             int a, int b) {
    int d = 0;
    const int nv = ONE_NV(n);
    for (; d + nv * VW <= DV; d += nv * VW) NAME(blend_some)(t, v, rows, next, r, n, d, nv, a, b);
    for (; d < DV; d += (1 + PAIRED_VALUES) * VW) NAME(blend_some)(t, v, rows, next, r, n, d, 1 + PAIRED_VALUES, a, b);
}

/* Keys j0 .. end of the unit's query, a tile after the other. */
static void NAME(one)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs, int j0, int end, struct NAME(fetch) *next) {
    int lo = t->lo[0], hi = t->hi[0] < end ? t->hi[0] : end, rows = u->groups * u->rows;
    const K_T *k = (const K_T *)bufs[K_BUF] + K_OFF + u->key_head * (int64_t)K_HEAD;
    const V_T *v = (const V_T *)bufs[V_BUF] + V_OFF + u->key_head * (int64_t)V_HEAD;
    for (; j0 < hi; j0 += ATTN_KEYS) {
        int64_t here[ATTN_KEYS];
        int a = lo > j0 ? lo - j0 : 0, b = hi - j0 < ATTN_KEYS ? hi - j0 : ATTN_KEYS;
        NAME(rows)(u, j0, here);
        NAME(fetch_pace)(next, u, j0, a, b);
        for (int r = 0; r < rows; r++) t->a[r] = a, t->b[r] = b;
        for (int g = 0; g < u->groups; g++) {
            int r = g * u->rows, end = r + u->rows;
#if KV_CODES
            NAME(scales)(t->k_scales, u->k_scales + g * (int64_t)KS_HEAD, KS_ROW, here);
#endif
            NAME(word_k)(t, k + g * (int64_t)K_HEAD, here, next, a, b);
            for (; r + 4 <= end; r += 4) NAME(score_some)(t, r, 4, a, b);
            if (end - r == 3) NAME(score_some)(t, r, 3, a, b);
            if (end - r == 2) NAME(score_some)(t, r, 2, a, b);
            if (end - r == 1) NAME(score_some)(t, r, 1, a, b);
        }
        for (int r = 0; r < rows; r += VW) NAME(online_softmax)(t, r, rows - r);
        for (int g = 0; g < u->groups; g++) {
            const V_T *head = v + g * (int64_t)V_HEAD;
            int r = g * u->rows, end = r + u->rows;
#if KV_CODES
            NAME(scales)(t->v_scales, u->v_scales + g * (int64_t)VS_HEAD, VS_ROW, here);
            NAME(scale_weights)(t, r, end);
#endif
            for (; r + 4 <= end; r += 4) NAME(blend_rows)(t, head, here, next, r, 4, a, b);
            if (end - r == 3) NAME(blend_rows)(t, head, here, next, r, 3, a, b);
            if (end - r == 2) NAME(blend_rows)(t, head, here, next, r, 2, a, b);
            if (end - r == 1) NAME(blend_rows)(t, head, here, next, r, 1, a, b);
        }
    }
}
#endif
