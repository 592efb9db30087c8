/* Attention backward on the host: ragged, grouped; scores are made again tile by tile and never stored.
 *
 * Enters, as #defines before each inclusion of this text (prelude.c and attention_core.c come first in the unit):
 *   NAME(x)                    prefixes every symbol of this instance
 *   Q_BUF K_BUF V_BUF          the forward's arguments; O_BUF its result, G_BUF the result's cotangent
 *   LSE_BUF                    f32 [tokens, HEADS], contiguous: natural log-sum-exp of the scaled scores (sink included)
 *   STARTS_BUF                 i32 [sequences + 1], cumulative rows
 *   for Q K V O G              <X>_T, LOAD_<X>(x) to f32, <X>_OFF in elements, strides <X>_ROW of a token, <X>_HEAD of a head
 *   SINK_BUF, SINK_T, LOAD_SINK  optional: [HEADS] logits that enter the denominator only
 *   DQ_BUF DK_BUF DV_BUF DSINK_BUF  results, each optional, contiguous; <X>_T, STORE_<X>(x) from f32
 *   DQ_DIRECT                  optional: dq is f32 and D a multiple of 16, so that its sums grow where they end
 *   TOKENS SEQUENCES           expressions over dims
 *   HEADS KV_HEADS D DV        sizes, KV_HEADS divides HEADS
 *   SCALE SOFTCAP CAUSAL WINDOW  as in attention.c; WINDOW > 0 only with CAUSAL
 * Leaves: NAME(units0..1), NAME(phase0..1). Phase 0 has a unit for each (sequence, query head): for every
 *   key tile it walks the query tiles that see it, five products a pair of tiles; dk and dv of the tile stay on the
 *   stack, dq grows in memory. Phase 1 adds dk and dv over the heads of a group, ascending, and makes dsinks.
 *
 * With p = exp(s - lse), delta = sum(g o): dv = pT g, ds = p (g vT - delta) slope SCALE, dq = ds k, dk = dsT q.
 * Tiles are counted from the start of the sequence and every sum has one accumulator, queries or keys ascending:
 * dq, dk and dv do not depend on the batch or the threads. What a query does not see has weight 0. The state on the
 * stack is 0.6 MiB for D = DV = 256, 1.2 MiB for D = 576, DV = 512.
 */

#define GROUP (HEADS / KV_HEADS)
#define DP ((D + 15) / 16 * 16)
#define DVP ((DV + 15) / 16 * 16)
#define QUERIES 48
#define TOKENS_A_UNIT 16

/* Asks for n elements at p, to be read or written: a head's rows lie too far apart for the processor to foresee. */
#define FETCH(p, n, write) \
    for (int f = 0; f < (n) * (int)sizeof *(p); f += 64) __builtin_prefetch((const char *)(p) + f, write, 2)
#define AHEAD 16

struct NAME(unit) {
    int head, key_head, len;
    int64_t row0;      /* global row of the sequence */
    float *dq;         /* row of query 0 */
    int64_t dq_row;
    float *delta;      /* of query 0 */
};

struct NAME(state) {
    float q[QUERIES][DP] __attribute__((aligned(64)));
    float g[QUERIES][DVP] __attribute__((aligned(64)));
    float s[QUERIES][ATTN_KEYS] __attribute__((aligned(64)));  /* scores, then weights */
    float ds[QUERIES][ATTN_KEYS] __attribute__((aligned(64))); /* cotangents of weights, then of scores */
    float k[ATTN_KEYS][DP] __attribute__((aligned(64)));
    float v[ATTN_KEYS][DVP] __attribute__((aligned(64)));
    float kt[DP][ATTN_KEYS] __attribute__((aligned(64)));
    float vt[DVP][ATTN_KEYS] __attribute__((aligned(64)));
    float dk[ATTN_KEYS][DP] __attribute__((aligned(64)));
    float dv[ATTN_KEYS][DVP] __attribute__((aligned(64)));
    int a[QUERIES], b[QUERIES]; /* keys of the tile that a query sees */
};

/* Scratch, in floats: sums of dq [HEADS][TOKENS][DP] unless direct; dk and dv of each query head
 * [HEADS][TOKENS][DP + DVP] when heads share keys; delta [HEADS][TOKENS]. */
#ifdef DQ_DIRECT
#define DQ_FLOATS 0
#else
#define DQ_FLOATS DP
#endif
#define SHARED_FLOATS (GROUP > 1 ? DP + DVP : 0)
#define SHARED_AT(scratch, tokens) ((float *)(scratch) + (tokens) * HEADS * DQ_FLOATS)
#define DELTA_AT(scratch, tokens) (SHARED_AT(scratch, tokens) + (tokens) * HEADS * SHARED_FLOATS)

int64_t NAME(units0)(const int64_t *dims) { return (int64_t)(SEQUENCES) * HEADS; }

static void NAME(begin)(struct NAME(unit) *u, void *const *bufs, const int64_t *dims, char *scratch, int64_t index) {
    const int32_t *starts = bufs[STARTS_BUF];
    int64_t seq = index / HEADS, tokens = TOKENS;
    u->head = (int)(index % HEADS);
    u->key_head = u->head / GROUP;
    u->row0 = starts[seq];
    u->len = starts[seq + 1] - starts[seq];
    u->delta = DELTA_AT(scratch, tokens) + u->head * tokens + u->row0;
#ifdef DQ_DIRECT
    u->dq_row = HEADS * D;
    u->dq = (float *)bufs[DQ_BUF] + u->row0 * u->dq_row + u->head * D;
#else
    u->dq_row = DP;
    u->dq = (float *)scratch + (u->head * tokens + u->row0) * DP;
#endif
    const G_T *g = (const G_T *)bufs[G_BUF] + G_OFF + u->row0 * G_ROW + u->head * (int64_t)G_HEAD;
    const O_T *o = (const O_T *)bufs[O_BUF] + O_OFF + u->row0 * O_ROW + u->head * (int64_t)O_HEAD;
    const Q_T *q = (const Q_T *)bufs[Q_BUF] + Q_OFF + u->row0 * Q_ROW + u->head * (int64_t)Q_HEAD;
    for (int i = 0; i < u->len; i++, g += G_ROW, o += O_ROW, q += Q_ROW) {
        float x[DVP] __attribute__((aligned(64)));
        FETCH(g + AHEAD * G_ROW, DV, 0);
        FETCH(o + AHEAD * O_ROW, DV, 0);
        FETCH(u->dq + (i + AHEAD) * u->dq_row, DP, 1);
        FETCH(q, D, 0);
        for (int d = 0; d < DV; d++) x[d] = LOAD_G(g[d]) * LOAD_O(o[d]);
        for (int d = DV; d < DVP; d++) x[d] = 0.0f;
        vf sum = {0};
        for (int d = 0; d < DVP; d += VW) sum += v_load(x + d);
        u->delta[i] = v_sum(sum);
        for (int d = 0; d < DP; d += VW) v_store(u->dq + i * u->dq_row + d, (vf){0});
    }
}

static void NAME(pack_keys)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs,
                            const int64_t *dims, int j0, int count) {
    int64_t row = u->row0 + j0;
    const K_T *k = (const K_T *)bufs[K_BUF] + K_OFF + row * K_ROW + u->key_head * (int64_t)K_HEAD;
    const V_T *v = (const V_T *)bufs[V_BUF] + V_OFF + row * V_ROW + u->key_head * (int64_t)V_HEAD;
    for (int j = 0; j < count; j++, k += K_ROW, v += V_ROW) {
        FETCH(k + ATTN_KEYS * K_ROW, D, 0);
        FETCH(v + ATTN_KEYS * V_ROW, DV, 0);
#ifdef DK_BUF
        if (GROUP == 1) FETCH((DK_T *)bufs[DK_BUF] + ((row + j) * KV_HEADS + u->key_head) * D, D, 1);
#endif
#ifdef DV_BUF
        if (GROUP == 1) FETCH((DV_T *)bufs[DV_BUF] + ((row + j) * KV_HEADS + u->key_head) * DV, DV, 1);
#endif
        for (int d = 0; d < D; d++) t->k[j][d] = LOAD_K(k[d]);
        for (int d = D; d < DP; d++) t->k[j][d] = 0.0f;
        for (int d = 0; d < DV; d++) t->v[j][d] = LOAD_V(v[d]);
        for (int d = DV; d < DVP; d++) t->v[j][d] = 0.0f;
    }
    for (int j = count; j < ATTN_KEYS; j++) {
        for (int d = 0; d < DP; d++) t->k[j][d] = 0.0f;
        for (int d = 0; d < DVP; d++) t->v[j][d] = 0.0f;
    }
    for (int j = 0; j < ATTN_KEYS; j += VW) {
        for (int d = 0; d < DP; d += VW) attn_transpose(&t->k[j][d], DP, &t->kt[d][j], ATTN_KEYS);
        for (int d = 0; d < DVP; d += VW) attn_transpose(&t->v[j][d], DVP, &t->vt[d][j], ATTN_KEYS);
    }
}

/* Queries and cotangents i0 .. i0 + rows, and the keys of the tile j0 .. j0 + count that each query sees. */
static void NAME(pack_queries)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs,
                               const int64_t *dims, int i0, int rows, int j0, int count) {
    int64_t row = u->row0 + i0;
    const Q_T *q = (const Q_T *)bufs[Q_BUF] + Q_OFF + row * Q_ROW + u->head * (int64_t)Q_HEAD;
    const G_T *g = (const G_T *)bufs[G_BUF] + G_OFF + row * G_ROW + u->head * (int64_t)G_HEAD;
    for (int r = 0; r < rows; r++, q += Q_ROW, g += G_ROW) {
        for (int d = 0; d < D; d++) t->q[r][d] = LOAD_Q(q[d]);
        for (int d = D; d < DP; d++) t->q[r][d] = 0.0f;
        for (int d = 0; d < DV; d++) t->g[r][d] = LOAD_G(g[d]);
        for (int d = DV; d < DVP; d++) t->g[r][d] = 0.0f;
        int i = i0 + r - j0, a = WINDOW > 0 ? i - WINDOW + 1 : 0, b = CAUSAL && i + 1 < count ? i + 1 : count;
        a = a > 0 ? a : 0;
        t->a[r] = a < b ? a : 0;
        t->b[r] = a < b ? b : 0;
    }
}

/* Keys that some of the rows r .. r + n see; empty when none. */
INLINE void NAME(seen)(const struct NAME(state) *t, int r, int n, int *a, int *b) {
    *a = ATTN_KEYS, *b = 0;
    for (int i = r; i < r + n; i++) {
        if (t->a[i] == t->b[i]) continue;
        *a = t->a[i] < *a ? t->a[i] : *a;
        *b = t->b[i] > *b ? t->b[i] : *b;
    }
}

/* One row: scores and cotangents of weights become weights and cotangents of scores. */
INLINE void NAME(online_softmax)(float *restrict s, float *restrict ds, float lse, float delta) {
    for (int j = 0; j < ATTN_KEYS; j++) {
        float p, slope = SCALE;
        if (SOFTCAP > 0) {
            float x = m_tanh(s[j] * (SCALE / (SOFTCAP > 0 ? SOFTCAP : 1.0f)));
            p = attn_exp(FMA(x, SOFTCAP, -lse));
            slope = FMA(-x, x, 1.0f) * SCALE;
        } else {
            p = attn_exp(FMA(s[j], SCALE, -lse));
        }
        s[j] = p;
        ds[j] = p * (ds[j] - delta) * slope;
    }
}

static void NAME(scores)(const struct NAME(unit) *u, struct NAME(state) *t, const float *lse, int i0, int rows) {
    for (int r = 0, n; r < rows; r += n) {
        int a, b;
        n = attn_rows(rows - r);
        NAME(seen)(t, r, n, &a, &b);
        a = a / VW * VW;
        b = (b + VW - 1) / VW * VW;
        if (a < b) {
            attn_product(n, t->q[r], DP, &t->kt[0][a], ATTN_KEYS, &t->s[r][a], ATTN_KEYS, b - a, 0, D, 1);
            attn_product(n, t->g[r], DVP, &t->vt[0][a], ATTN_KEYS, &t->ds[r][a], ATTN_KEYS, b - a, 0, DV, 1);
        }
        for (int i = r; i < r + n; i++) {
            if (t->a[i] < t->b[i]) NAME(online_softmax)(t->s[i], t->ds[i], lse[i * HEADS], u->delta[i0 + i]);
            for (int j = 0; j < t->a[i]; j++) t->s[i][j] = t->ds[i][j] = 0.0f;
            for (int j = t->b[i]; j < ATTN_KEYS; j++) t->s[i][j] = t->ds[i][j] = 0.0f;
        }
    }
}

/* What the pair of tiles adds to dq, dk and dv. */
static void NAME(add)(const struct NAME(unit) *u, struct NAME(state) *t, int i0, int rows, int j0, int count) {
    for (int r = 0, n; r < rows; r += n) {
        int a, b;
        n = attn_rows(rows - r);
        NAME(seen)(t, r, n, &a, &b);
        float *dq = u->dq + (i0 + r) * u->dq_row;
        if (a < b) attn_product(n, t->ds[r], ATTN_KEYS, t->k[0], DP, dq, u->dq_row, DP, a, b, 0);
    }
    for (int r = 0, n; r < count; r += n) {
        n = attn_rows(count - r);
        int a = CAUSAL ? j0 + r - i0 : 0, b = WINDOW > 0 ? j0 + r + n - 1 + WINDOW - i0 : rows;
        a = a > 0 ? a : 0;
        b = b < rows ? b : rows;
        if (a >= b) continue;
        attn_product_t(n, &t->ds[0][r], ATTN_KEYS, t->q[0], DP, t->dk[r], DP, DP, a, b, 0);
        attn_product_t(n, &t->s[0][r], ATTN_KEYS, t->g[0], DVP, t->dv[r], DVP, DVP, a, b, 0);
    }
}

/* Sums of dk and dv of one row of one key head, to memory. */
INLINE void NAME(store)(void *const *bufs, int64_t row, int key_head, const float *dk, const float *dv) {
    int64_t at = row * KV_HEADS + key_head;
#ifdef DK_BUF
    for (int d = 0; d < D; d++) ((DK_T *)bufs[DK_BUF])[at * D + d] = STORE_DK(dk[d]);
#endif
#ifdef DV_BUF
    for (int d = 0; d < DV; d++) ((DV_T *)bufs[DV_BUF])[at * DV + d] = STORE_DV(dv[d]);
#endif
}

static void NAME(leave_keys)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs,
                             const int64_t *dims, char *scratch, int j0, int count) {
    int64_t tokens = TOKENS, row = u->row0 + j0;
    for (int j = 0; j < count; j++) {
        if (GROUP == 1) {
            NAME(store)(bufs, row + j, u->key_head, t->dk[j], t->dv[j]);
            continue;
        }
        float *to = SHARED_AT(scratch, tokens) + (u->head * tokens + row + j) * SHARED_FLOATS;
        for (int d = 0; d < DP; d += VW) v_store(to + d, v_load(t->dk[j] + d));
        for (int d = 0; d < DVP; d += VW) v_store(to + DP + d, v_load(t->dv[j] + d));
    }
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(state) t;
    struct NAME(unit) u;
    for (int64_t index = begin; index < end; index++) {
        NAME(begin)(&u, bufs, dims, scratch, index);
        for (int j0 = 0; j0 < u.len; j0 += ATTN_KEYS) {
            int count = u.len - j0 < ATTN_KEYS ? u.len - j0 : ATTN_KEYS, last = j0 + count - 1;
            int to = WINDOW > 0 && last + WINDOW < u.len ? last + WINDOW : u.len;
            NAME(pack_keys)(&u, &t, bufs, dims, j0, count);
            __builtin_memset(t.dk, 0, sizeof t.dk);
            __builtin_memset(t.dv, 0, sizeof t.dv);
            for (int i0 = CAUSAL ? j0 : 0; i0 < to; i0 += QUERIES) {
                int rows = to - i0 < QUERIES ? to - i0 : QUERIES;
                const float *lse = (const float *)bufs[LSE_BUF] + (u.row0 + i0) * HEADS + u.head;
                NAME(pack_queries)(&u, &t, bufs, dims, i0, rows, j0, count);
                NAME(scores)(&u, &t, lse, i0, rows);
                NAME(add)(&u, &t, i0, rows, j0, count);
            }
            NAME(leave_keys)(&u, &t, bufs, dims, scratch, j0, count);
        }
#if defined(DQ_BUF) && !defined(DQ_DIRECT)
        for (int i = 0; i < u.len; i++) {
            DQ_T *to = (DQ_T *)bufs[DQ_BUF] + ((u.row0 + i) * HEADS + u.head) * D;
            for (int d = 0; d < D; d++) to[d] = STORE_DQ(u.dq[i * DP + d]);
        }
#endif
    }
}

/* Blocks of tokens whose heads are added, then heads whose sinks are. */
#define BLOCKS (GROUP > 1 ? ((int64_t)(TOKENS) + TOKENS_A_UNIT - 1) / TOKENS_A_UNIT : 0)

int64_t NAME(units1)(const int64_t *dims) {
#ifdef DSINK_BUF
    return BLOCKS + HEADS;
#else
    return BLOCKS;
#endif
}

static void NAME(add_heads)(void *const *bufs, int64_t row, int key_head, const float *from, int64_t tokens) {
    float sum[DP + DVP] __attribute__((aligned(64)));
    for (int d = 0; d < DP + DVP; d++) sum[d] = from[d];
    for (int h = 1; h < GROUP; h++) {
        from += tokens * SHARED_FLOATS;
        for (int d = 0; d < DP + DVP; d++) sum[d] += from[d];
    }
    NAME(store)(bufs, row, key_head, sum, sum + DP);
}

#ifdef DSINK_BUF
/* A sink's weight is exp(sink - lse) and its value 0. */
static void NAME(add_sink)(void *const *bufs, int head, const float *delta, int64_t tokens) {
    const float *lse = (const float *)bufs[LSE_BUF] + head;
    float sink = LOAD_SINK(((const SINK_T *)bufs[SINK_BUF])[head]);
    double sum = 0.0;
    for (int64_t i = 0; i < tokens; i++) sum -= m_exp(sink - lse[i * HEADS]) * delta[i];
    ((DSINK_T *)bufs[DSINK_BUF])[head] = STORE_DSINK((float)sum);
}
#endif

void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    int64_t tokens = TOKENS, blocks = BLOCKS;
    const float *shared = SHARED_AT(scratch, tokens);
    for (int64_t index = begin; index < end; index++) {
#ifdef DSINK_BUF
        if (index >= blocks) {
            int64_t head = index - blocks;
            NAME(add_sink)(bufs, (int)head, DELTA_AT(scratch, tokens) + head * tokens, tokens);
            continue;
        }
#endif
        int64_t row = index * TOKENS_A_UNIT, last = row + TOKENS_A_UNIT < tokens ? row + TOKENS_A_UNIT : tokens;
        for (; row < last; row++)
            for (int h = 0; h < KV_HEADS; h++)
                NAME(add_heads)(bufs, row, h, shared + (h * GROUP * tokens + row) * SHARED_FLOATS, tokens);
    }
}

#undef GROUP
#undef DP
#undef DVP
#undef QUERIES
#undef FETCH
#undef AHEAD
#undef TOKENS_A_UNIT
#undef DQ_FLOATS
#undef SHARED_FLOATS
#undef SHARED_AT
#undef DELTA_AT
#undef BLOCKS
