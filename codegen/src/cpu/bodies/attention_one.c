#if ONE_QUERY
/* One query (decode): each key and value is used by a few rows only, so getting it ready is what costs. Keys are
 * transposed as words, whose two or four numbers are widened on their way into the product; values are read where they lie. Every
 * sum has the terms and the order that it has among many queries. */

/* Keys a .. b of a tile as words, in the place of k; of those to come `each` rows are fetched beside VW of them. */
static void NAME(word_k)(struct NAME(state) *t, const K_T *k, const int64_t *rows, struct NAME(ahead) *next, int each, int a, int b) {
    for (int j = a / VW * VW; j < b; j += VW) {
        const void *at[VW];
        for (int i = 0; i < VW; i++) at[i] = k + rows[j + i] * K_ROW;
        NAME(words)(t, at, WORD, j);
        NAME(prefetch_rows)(next, each);
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
    for (int j = a / VW * VW; j < b; j += ATTN_NV * VW) {
        /* The last lanes of a step may lie past the tile: then it begins earlier, and computes some scores twice. */
        int at = j + ATTN_NV * VW <= ATTN_KEYS ? j : ATTN_KEYS - ATTN_NV * VW;
        vf acc[4][ATTN_NV];
        ATTN_EACH(i, n) ATTN_EACH(c, ATTN_NV) acc[i][c] = (vf){0};
        for (int d = 0; d < D; d += WORD) {
            vf word[ATTN_NV];
            ATTN_EACH(c, ATTN_NV) word[c] = v_load(&t->k[d / WORD][at + c * VW]);
            ATTN_EACH(part, WORD / (1 + PAIRED)) {
                vf k[ATTN_NV];
                ATTN_EACH(c, ATTN_NV) k[c] = NAME(number)(word[c], part);
                ATTN_EACH(i, n) {
                    vf q = SPLAT(t->q[r + i][d / (1 + PAIRED) + part]);
                    ATTN_EACH(c, ATTN_NV) acc[i][c] = ADD(q, k[c], acc[i][c]);
                }
            }
        }
#if KV_CODES
        ATTN_EACH(i, n) ATTN_EACH(c, ATTN_NV) acc[i][c] *= v_load(&t->k_scales[at + c * VW]);
#endif
        ATTN_EACH(i, n) ATTN_EACH(c, ATTN_NV) v_store(&t->s[r + i][at + c * VW], acc[i][c]);
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
INLINE void NAME(blend_some)(struct NAME(state) *t, const V_T *v, const int64_t *rows, struct NAME(ahead) *next, int r, int n,
                             int d, int nv, int a, int b) {
    vf acc[4][ATTN_NV];
    ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = v_load(&t->now->o[r + i][d + c * VW]);
    for (int j = a / (1 + PAIRED_VALUES) * (1 + PAIRED_VALUES); j < b; j += 1 + PAIRED_VALUES) {
        vf x[ATTN_NV], w[4];
        if (j % 2 == 0) NAME(prefetch_rows)(next, 1);
        const V_T *from = v + rows[j] * V_ROW + d;
        ATTN_EACH(i, n) w[i] = WEIGHT(t->s[r + i][j / (1 + PAIRED_VALUES)]);
#if PAIRED_VALUES
        const V_T *beside = v + rows[j + 1] * V_ROW + d;
        ATTN_EACH(c, nv / 2) attn_pair_keys(NAME(pair_line)(from + c * 2 * VW), NAME(pair_line)(beside + c * 2 * VW), x + 2 * c);
        if (j < a || j + 1 == b) { /* as blend_key */
            vu half = (vu){0} + (j < a ? 0xffff0000u : 0xffffu);
            ATTN_EACH(c, nv) x[c] = (vf)((vu)x[c] & half);
            ATTN_EACH(i, n) w[i] = (vf)((vu)w[i] & half);
        }
#else
        ATTN_EACH(c, nv) x[c] = NAME(value)(from + c * VW);
#endif
        ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = BLEND(w[i], x[c], acc[i][c]);
    }
    ATTN_EACH(i, n) ATTN_EACH(c, nv) v_store(&t->now->o[r + i][d + c * VW], acc[i][c]);
}

INLINE void NAME(blend_rows)(struct NAME(state) *t, const V_T *v, const int64_t *rows, struct NAME(ahead) *next, int r, int n,
                             int a, int b) {
    int d = 0;
    for (; d + ATTN_NV * VW <= DV; d += ATTN_NV * VW) NAME(blend_some)(t, v, rows, next, r, n, d, ATTN_NV, a, b);
    for (; d < DV; d += (1 + PAIRED_VALUES) * VW) NAME(blend_some)(t, v, rows, next, r, n, d, 1 + PAIRED_VALUES, a, b);
}

/* Keys j0 .. end of the unit's query, a tile after the other, that after it fetched meanwhile: `then` is the unit behind this one, if
 * there is one. `around` are the rows of the first of these tiles, then those of the one behind the last. */
static void NAME(one)(const struct NAME(unit) *u, const struct NAME(unit) *then, struct NAME(state) *t, void *const *bufs, int j0, int end,
                      int64_t (*around)[ATTN_KEYS], struct NAME(ahead) *next) {
    int lo = t->lo[0], hi = t->hi[0] < end ? t->hi[0] : end, rows = u->groups * u->rows;
    const K_T *k = (const K_T *)bufs[K_BUF] + K_OFF + u->key_head * (int64_t)K_HEAD;
    const V_T *v = (const V_T *)bufs[V_BUF] + V_OFF + u->key_head * (int64_t)V_HEAD;
    for (; j0 < hi; j0 += ATTN_KEYS) {
        const int64_t *here = around[j0 / ATTN_KEYS % 2];
        int64_t *beyond = around[(j0 / ATTN_KEYS + 1) % 2];
        int a = lo > j0 ? lo - j0 : 0, b = hi - j0 < ATTN_KEYS ? hi - j0 : ATTN_KEYS;
        int each = ATTN_KEYS / 2 / (u->groups * ((b - a + VW - 1) / VW)) + 1;
        if (j0 + ATTN_KEYS < u->to) {
            NAME(rows)(u, j0 + ATTN_KEYS, beyond), NAME(turn)(next, beyond, u->to - j0 - ATTN_KEYS);
        } else if (then) {
            NAME(rows)(then, then->from, beyond), NAME(prefetch_from)(next, then, bufs, beyond, then->to - then->from);
        }
        for (int r = 0; r < rows; r++) t->a[r] = a, t->b[r] = b;
        for (int g = 0; g < u->groups; g++) {
            int r = g * u->rows, end = r + u->rows;
#if KV_CODES
            NAME(scales)(t->k_scales, u->k_scales + g * (int64_t)KS_HEAD, KS_ROW, here);
#endif
            NAME(word_k)(t, k + g * (int64_t)K_HEAD, here, next, each, a, b);
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
        NAME(prefetch_rows)(next, ATTN_KEYS);
    }
}
#endif

