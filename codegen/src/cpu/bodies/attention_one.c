#if ONE_QUERY
/* One query (decode): each key and value is used by a few rows only, so getting it ready is what costs. Keys are
 * transposed as words, whose two or four numbers are widened on their way into the product; values are read where they lie. Every
 * sum has the terms and the order that it has among many queries. */

/* Keys a .. b of a tile as words, in the place of k; `next` are rows to fetch meanwhile. */
static void NAME(word_k)(struct NAME(state) *t, const K_T *k, const int64_t *rows, const int64_t *next, int a, int b) {
    for (int j = a / VW * VW; j < b; j += VW) {
        const void *at[VW];
        for (int i = 0; i < VW; i++) {
            for (int d = 0; d < D; d += 64 / (int)sizeof(K_T)) __builtin_prefetch(k + next[j + i] * K_ROW + d, 0, 2);
            at[i] = k + rows[j + i] * K_ROW;
        }
        NAME(words)(t, at, WORD, j);
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

/* VW values. */
INLINE vf NAME(value)(const V_T *from) {
#if KV_CODES
    return attn_values(KV_CODES, from);
#else
    return WORD == 1 ? v_load((const float *)from) : attn_widen(from);
#endif
}

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

/* o += weights v for n rows and nv vectors of columns from d on (both literals). */
INLINE void NAME(blend_some)(struct NAME(state) *t, const V_T *v, const int64_t *rows, const int64_t *next, int r, int n,
                             int d, int nv, int a, int b) {
    vf acc[4][ATTN_NV];
    ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = v_load(&t->now->o[r + i][d + c * VW]);
    for (int j = a; j < b; j++) {
        const V_T *from = v + rows[j] * V_ROW + d;
        for (int c = 0; c < nv * VW; c += 64 / (int)sizeof(V_T)) __builtin_prefetch(v + next[j] * V_ROW + d + c, 0, 2);
        vf x[ATTN_NV];
        ATTN_EACH(c, nv) x[c] = NAME(value)(from + c * VW);
        ATTN_EACH(i, n) {
            vf w = v_splat(t->s[r + i][j]);
            ATTN_EACH(c, nv) acc[i][c] = v_fma(w, x[c], acc[i][c]);
        }
    }
    ATTN_EACH(i, n) ATTN_EACH(c, nv) v_store(&t->now->o[r + i][d + c * VW], acc[i][c]);
}

INLINE void NAME(blend_rows)(struct NAME(state) *t, const V_T *v, const int64_t *rows, const int64_t *next, int r, int n,
                             int a, int b) {
    int d = 0;
    for (; d + ATTN_NV * VW <= DV; d += ATTN_NV * VW) NAME(blend_some)(t, v, rows, next, r, n, d, ATTN_NV, a, b);
    for (; d < DV; d += VW) NAME(blend_some)(t, v, rows, next, r, n, d, 1, a, b);
}

/* Keys j0 .. end of the unit's query, a tile after the other. `around` are the rows of the first of these tiles, then those of
 * the one behind the last. */
static void NAME(one)(const struct NAME(unit) *u, struct NAME(state) *t, const K_T *k, const V_T *v, int j0, int end,
                      int64_t (*around)[ATTN_KEYS]) {
    int lo = t->lo[0], hi = t->hi[0] < end ? t->hi[0] : end, rows = u->groups * u->rows;
    k += K_OFF + u->key_head * (int64_t)K_HEAD, v += V_OFF + u->key_head * (int64_t)V_HEAD;
    for (; j0 < hi; j0 += ATTN_KEYS) {
        const int64_t *here = around[j0 / ATTN_KEYS % 2];
        int64_t *next = around[(j0 / ATTN_KEYS + 1) % 2];
        int a = lo > j0 ? lo - j0 : 0, b = hi - j0 < ATTN_KEYS ? hi - j0 : ATTN_KEYS;
        NAME(rows)(u, j0 + ATTN_KEYS, next);
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

