/* Attention forward by vectors, for any types and any number of queries: a tile of keys after the other, each transposed for the
 * scores of all rows and widened for their blend. Comes after attention.c, whose slots and units it uses. Leaves NAME(state)
 * and what attention_phases.c calls.
 */

#if defined(Q_BF16) && (defined(KV_BF16) || KV_CODES) && DOT_BF16_PAIRS && D % (2 * VW) == 0 && DV % (2 * VW) == 0
#define PAIRED 1
#else
#define PAIRED 0
#endif
/* Values and weights, too: weights are rounded to bf16, their sums are not. Those of codes stay f32, as each key has scales. */
#define PAIRED_VALUES (PAIRED && !KV_CODES)

/* Weights that are rounded are 2^(score FACTOR - M). M, a row's maximum, is a whole number, so that raising it scales sums exactly. It is
 * raised only when a score is above it by more than RAISE: until then weights are 2^RAISE at most, which costs as much of the range of
 * sums and nothing of their digits. That is so rare that scores of full tiles become weights while they are in registers. ROWS_MAX is a
 * unit of M as a natural logarithm. */
#define RAISE 8.0f
#define ROWS_MAX (PAIRED_VALUES ? 0.693147181f : 1.0f)
#define FACTOR ((SOFTCAP > 0 ? 1.0f : SCALE) * (PAIRED_VALUES ? 1.44269504f : 1.0f))

/* Numbers of a key in a word, as which keys are transposed; 0 where they are widened before. */
#if KV_CODES && D % (4 * VW) == 0
#define WORD 4
#elif defined(KV_BF16) && D % (2 * VW) == 0
#define WORD 2
#elif defined(KV_F32) && D % VW == 0
#define WORD 1
#else
#define WORD 0
#endif

/* Whether one query has a way of its own, see NAME(one). */
#if defined(PAGES_BUF) && WORD && DV % VW == 0 && HEADS <= 8 * KV_HEADS
#define ONE_QUERY 1
#else
#define ONE_QUERY 0
#endif

/* Sums of a unit's rows: weights times values, maxima, sums of weights. */
struct NAME(sums) {
    float o[ROWS][DVP] __attribute__((aligned(64)));
#if PAIRED_VALUES
    float lanes[ROWS][VW] __attribute__((aligned(64))); /* of sums of weights, until the chunk ends */
#endif
    float max[ROWS + VW], sum[ROWS + VW];
};

/* Where PAIRED, q and k are bf16 pairs: [ROWS][D / 2] of q's rows, [D / 2][ATTN_KEYS]. Where PAIRED_VALUES, weights s and v are: [ROWS]
 * [ATTN_KEYS / 2], [ATTN_KEYS / 2][DV]. */
struct NAME(state) {
    float q[ROWS][D] __attribute__((aligned(64)));
    float s[ROWS][ATTN_KEYS] __attribute__((aligned(64)));
    float k[DP][ATTN_KEYS] __attribute__((aligned(64)));
    float wide[VW][DP] __attribute__((aligned(64))); /* keys on their way into k */
    float v[ATTN_KEYS][DVP] __attribute__((aligned(64)));
    int lo[ROWS], hi[ROWS]; /* visible keys of a row, then */
    int a[ROWS], b[ROWS];   /* those inside the tile; a == b when none */
#if PAIRED_VALUES
    char weighed[ROWS]; /* whether the scores of the tile are weights already */
#else
    float keep[ROWS + VW]; /* what a tile leaves of the sums before it */
#endif
#if KV_CODES
    float k_scales[ATTN_KEYS], v_scales[ATTN_KEYS] __attribute__((aligned(64))); /* of the tile and a key head */
#endif
    struct NAME(sums) two[2], *now, *all; /* of the chunk at hand, and of those before it */
};

OUTLINE void NAME(clear)(const struct NAME(unit) *u, struct NAME(sums) *sums) {
    for (int r = 0; r < ROWS + VW; r++) {
        sums->max[r] = -__builtin_inff();
        sums->sum[r] = 0.0f;
    }
    memset(sums->o, 0, sizeof sums->o[0] * (u->groups * u->rows));
#if PAIRED_VALUES
    memset(sums->lanes, 0, sizeof sums->lanes[0] * ((u->groups * u->rows + VW - 1) / VW * VW));
#endif
}

static void NAME(begin)(const struct NAME(unit) *u, struct NAME(state) *t, const Q_T *q) {
    t->all = &t->two[0], t->now = &t->two[1];
#if PAIRED_VALUES
    memset(t->weighed, 0, sizeof t->weighed);
#endif
    for (int r = 0; r < u->groups * u->rows; r++) {
        int at = NAME(query)(u, r), i = u->base + u->q0 + at;
        const Q_T *from = q + Q_OFF + (u->row0 + at) * Q_ROW + NAME(head)(u, r) * (int64_t)Q_HEAD;
        if (PAIRED) memcpy(t->q[r], from, D * sizeof *from);
        for (int d = 0; !PAIRED && d < D; d++) t->q[r][d] = LOAD_Q(from[d]);
        t->lo[r] = NAME(sees_from)(i);
        t->hi[r] = CAUSAL && i + 1 < u->keys ? i + 1 : u->keys;
    }
}

/* The place to fetch ahead while key i of group g is packed: the next tile's rows, each across all groups at once. */
INLINE int64_t NAME(beyond)(const struct NAME(unit) *u, int j0, int g, int i, int64_t row, int64_t head) {
    int n = g * ATTN_KEYS + i, j = j0 + ATTN_KEYS + n / u->groups;
    return NAME(key_row)(u, j < u->to ? j : u->to - 1) * row + (u->key_head + n % u->groups) * head;
}

#if WORD || PAIRED
/* VW keys, whose rows are these, as words [D / each][keys] in the place of k, from column j on. */
INLINE void NAME(words)(struct NAME(state) *t, const void *const *rows, int each, int j) {
    for (int w = 0; w < D / each; w += VW) {
        const float *from[VW];
        for (int i = 0; i < VW; i++) from[i] = (const float *)rows[i] + w;
        attn_transpose_lines(from, &t->k[w][j], ATTN_KEYS);
    }
}
#endif

#if KV_CODES || ONE_QUERY
/* Rows of keys j0 and on; past the unit's last key that one again. */
static void NAME(rows)(const struct NAME(unit) *u, int j0, int64_t *rows) {
    int n = u->to - j0 < ATTN_KEYS ? u->to - j0 : ATTN_KEYS;
    for (int i = 0, end; i < n; i = end) {
        int64_t row = NAME(key_row)(u, j0 + i) - i;
        end = i + RUN - (j0 + i) % RUN < n ? i + RUN - (j0 + i) % RUN : n;
        for (int of = i; of < end; of++) rows[of] = row + of;
    }
    for (int i = n; i < ATTN_KEYS; i++) rows[i] = rows[n - 1];
}
#endif

#if KV_CODES
/* Scales of keys, or of values, in these rows, by what codes are read as; an infinite one is no number, for its codes are none. */
INLINE void NAME(scales)(float *to, const float *from, int64_t row, const int64_t *rows) {
    for (int j = 0; j < ATTN_KEYS; j++) {
        float scale = from[rows[j] * row] * ATTN_UNIT(KV_CODES);
        to[j] = scale + (scale - scale);
    }
}

/* Weights of a key head's rows times the scales of its values. */
INLINE void NAME(scale_weights)(struct NAME(state) *t, int r0, int r1) {
    for (int r = r0; r < r1; r++)
        for (int j = 0; j < ATTN_KEYS; j += VW) v_store(&t->s[r][j], v_load(&t->s[r][j]) * v_load(&t->v_scales[j]));
}
#endif

#if PAIRED_VALUES
/* 32 values. */
INLINE dot_q8 NAME(pair_line)(const V_T *from) { return dot_line((const uint16_t *)(const void *)from); }
#endif

/* k[D][keys] of group g; lanes past the last key repeat it. */
static void NAME(pack_k)(const struct NAME(unit) *u, struct NAME(state) *t, const K_T *k, int j0, int count, int g) {
    const K_T *head = k + K_OFF + (u->key_head + g) * (int64_t)K_HEAD;
    for (int j = 0; j < count; j += VW) {
        const void *rows[VW];
        for (int i = 0; i < VW; i++) {
            const K_T *next = k + K_OFF + NAME(beyond)(u, j0, g, j + i, K_ROW, K_HEAD);
            for (int d = 0; d < D; d += 64 / (int)sizeof(K_T)) __builtin_prefetch(next + d, 0, 2);
            const K_T *row = head + NAME(key_row)(u, j0 + (j + i < count ? j + i : count - 1)) * K_ROW;
            rows[i] = row;
#if PAIRED && KV_CODES
            uint16_t *pairs = (uint16_t *)t->wide[i];
            for (int d = 0; d < D; d++) pairs[d] = (uint16_t)(f32_bits(LOAD_K(row[d])) >> 16);
            rows[i] = pairs;
#elif !PAIRED && WORD != 1
            for (int d = 0; d < D; d++) t->wide[i][d] = LOAD_K(row[d]);
#endif
        }
#if PAIRED || WORD == 1
        NAME(words)(t, rows, 1 + PAIRED, j);
#else
        for (int d = 0; d < D; d += VW) attn_transpose(&t->wide[0][d], DP, &t->k[d][j], ATTN_KEYS);
#endif
    }
}

/* v[keys][DVP] of group g, or its pairs. */
static void NAME(pack_v)(const struct NAME(unit) *u, struct NAME(state) *t, const V_T *v, int j0, int count, int g) {
    const V_T *head = v + V_OFF + (u->key_head + g) * (int64_t)V_HEAD;
    for (int j = 0; j < count; j++) {
        const V_T *next = v + V_OFF + NAME(beyond)(u, j0, g, j, V_ROW, V_HEAD);
        for (int d = 0; d < DV; d += 64 / (int)sizeof(V_T)) __builtin_prefetch(next + d, 0, 2);
        const V_T *from = head + NAME(key_row)(u, j0 + j) * V_ROW;
#if PAIRED_VALUES
        if (j % 2) continue;
        int more = j + 1 < count;
        const V_T *beside = head + NAME(key_row)(u, j0 + j + more) * V_ROW;
        for (int d = 0; d < DV; d += 2 * VW)
            attn_pair_keys(NAME(pair_line)(from + d), more ? NAME(pair_line)(beside + d) : (dot_q8){0}, (vf *)&t->v[j / 2][d]);
#else
        for (int d = 0; d < DV; d++) t->v[j][d] = LOAD_V(from[d]);
        for (int d = DV; d < DVP; d++) t->v[j][d] = 0.0f;
#endif
    }
}

#if PAIRED
#define SCORES attn_product_bf16_pairs
#define SPLAT dot_splat_word
#define ADD dot_pair
#else
#define SCORES attn_product
#define SPLAT v_splat
#define ADD v_fma
#endif

/* What a greater maximum leaves of sums. */
INLINE float NAME(left)(float max, float next) {
#if PAIRED_VALUES
    float less = max - next, power = bits_f32((uint32_t)((int)(less > -127.0f ? less : -127.0f) + 127) << 23);
#else
    float power = attn_exp(max - next);
#endif
    return max == next ? 1.0f : power;
}

#if PAIRED_VALUES
/* The greatest of these scores becomes the row's maximum. */
OUTLINE void NAME(raise)(struct NAME(state) *t, int r, vf top) {
    float *max = &t->now->max[r], next = __builtin_ceilf(attn_greatest(top) * FACTOR);
    if (!(next > *max)) return; /* beside scores that are no numbers, as the sum is then */
    vf left = v_splat(NAME(left)(*max, next));
    *max = next;
    for (int d = 0; d < DVP; d += VW) v_store(t->now->o[r] + d, v_load(t->now->o[r] + d) * left);
    v_store(t->now->lanes[r], v_load(t->now->lanes[r]) * left);
}

_Static_assert(ATTN_NV * VW == ATTN_KEYS, "a row of a tile is as many vectors");

/* Scores of a row of a tile to weights. */
INLINE void NAME(weights)(struct NAME(state) *t, int r, const vf *s) {
    vf w[ATTN_NV], sum;
    ATTN_EACH(c, ATTN_NV) w[c] = attn_exp2_narrow(v_fma(s[c], v_splat(FACTOR), v_splat(-t->now->max[r])));
    ATTN_EACH(c, ATTN_NV) sum = c ? sum + w[c] : w[c];
    ATTN_EACH(c, ATTN_NV / 2) v_store(&t->s[r][c * VW], attn_narrow(w[2 * c], w[2 * c + 1]));
    v_store(t->now->lanes[r], v_load(t->now->lanes[r]) + sum);
}

INLINE vf NAME(top)(const vf *s) {
    vf top = s[0];
    ATTN_EACH(c, ATTN_NV - 1) top = v_max(s[c + 1], top);
    return top;
}

/* Rows r0 .. r0 + rows, VW at most, but for those that are weighed. */
static void NAME(online_softmax)(struct NAME(state) *t, int r0, int rows) {
    const float none = -__builtin_inff();
    for (int r = r0; r < r0 + (rows < VW ? rows : VW); r++) {
        if (t->weighed[r] || t->a[r] == t->b[r]) continue;
        float *s = t->s[r];
        if (SOFTCAP > 0)
            for (int j = 0; j < ATTN_KEYS; j++) s[j] = SOFTCAP * m_tanh(s[j] * (SCALE / (SOFTCAP > 0 ? SOFTCAP : 1.0f)));
        for (int j = 0; j < t->a[r]; j++) s[j] = none;
        for (int j = t->b[r]; j < ATTN_KEYS; j++) s[j] = none;
        vf x[ATTN_NV];
        ATTN_EACH(c, ATTN_NV) x[c] = v_load(s + c * VW);
        vf top = NAME(top)(x);
        if (attn_any_above(v_fma(top, v_splat(FACTOR), v_splat(-t->now->max[r])), RAISE)) NAME(raise)(t, r, top);
        NAME(weights)(t, r, x);
    }
}

/* Six rows that see a whole tile: weights, unless a maximum has to be raised, else scores. */
OUTLINE void NAME(score_and_weigh)(struct NAME(state) *t, int r) {
    vf s[6][ATTN_NV], above = v_splat(-__builtin_inff());
    ATTN_EACH(i, 6) ATTN_EACH(c, ATTN_NV) s[i][c] = (vf){0};
    for (int d = 0; d < D / 2; d++) {
        vf k[ATTN_NV];
        ATTN_EACH(c, ATTN_NV) k[c] = v_load(&t->k[d][c * VW]);
        ATTN_EACH(i, 6) {
            vf q = dot_splat_word(t->q[r + i][d]);
            ATTN_EACH(c, ATTN_NV) s[i][c] = dot_pair(q, k[c], s[i][c]);
        }
    }
    ATTN_EACH(i, 6) above = v_max(v_fma(NAME(top)(s[i]), v_splat(FACTOR), v_splat(-t->now->max[r + i])), above);
    int raise = attn_any_above(above, RAISE);
    ATTN_EACH(i, 6) {
        t->weighed[r + i] = !raise;
        if (raise) ATTN_EACH(c, ATTN_NV) v_store(&t->s[r + i][c * VW], s[i][c]);
        else NAME(weights)(t, r + i, s[i]);
    }
}

/* The sums of a chunk's weights. */
OUTLINE void NAME(total)(struct NAME(sums) *sums, int rows) {
    for (int r = 0; r < rows; r += VW) v_store(sums->sum + r, attn_across(sums->lanes + r, 1));
}
#else
/* Scores to weights, VW rows at once: new maxima, the factor that keeps the old sums, exponentials, sums. */
static void NAME(online_softmax)(struct NAME(state) *t, int r0, int rows) {
    const float none = -__builtin_inff();
    float lane[VW][VW] __attribute__((aligned(64)));
    for (int i = 0; i < VW; i++) {
        int r = r0 + i;
        v_store(lane[i], v_splat(none));
        if (i >= rows || t->a[r] == t->b[r]) continue;
        float *s = t->s[r];
        if (SOFTCAP > 0)
            for (int j = 0; j < ATTN_KEYS; j++) s[j] = SOFTCAP * m_tanh(s[j] * (SCALE / (SOFTCAP > 0 ? SOFTCAP : 1.0f)));
        for (int j = 0; j < t->a[r]; j++) s[j] = none;
        for (int j = t->b[r]; j < ATTN_KEYS; j++) s[j] = none;
        vf top = v_splat(none);
        for (int j = 0; j < ATTN_KEYS; j += VW) top = v_max(v_load(s + j), top);
        v_store(lane[i], top);
    }
    v_store(lane[0], attn_across(lane, 0) * v_splat(FACTOR));
    float *max = t->now->max + r0, *keep = t->keep + r0;
    for (int i = 0; i < VW; i++) {
        float next = lane[0][i] > max[i] ? lane[0][i] : max[i];
        keep[i] = NAME(left)(max[i], next);
        max[i] = next;
    }
    for (int i = 0; i < VW; i++) {
        int r = r0 + i;
        v_store(lane[i], (vf){0});
        if (i >= rows || t->a[r] == t->b[r]) continue;
        float *s = t->s[r], m = max[i];
        for (int j = 0; j < ATTN_KEYS; j++) s[j] = attn_exp(FMA(s[j], FACTOR, -m));
        vf sum = v_load(s);
        for (int j = VW; j < ATTN_KEYS; j += VW) sum += v_load(s + j);
        v_store(lane[i], sum);
        vf k = v_splat(t->keep[r]);
        if (t->keep[r] != 1.0f)
            for (int d = 0; d < DVP; d += VW) v_store(t->now->o[r] + d, v_load(t->now->o[r] + d) * k);
    }
    v_store(t->now->sum + r0, v_fma(v_load(t->now->sum + r0), v_load(keep), attn_across(lane, 1)));
}
#endif

/* Scores of rows r0..r1, rows in blocks, only the key lanes that some row of the block sees. */
static void NAME(scores)(struct NAME(state) *t, int r0, int r1, int j0) {
    for (int r = r0; r < r1; r++) {
        int a = t->lo[r] - j0, b = t->hi[r] - j0;
        a = a > 0 ? a : 0;
        b = b < ATTN_KEYS ? b : ATTN_KEYS;
        t->a[r] = a < b ? a : 0;
        t->b[r] = a < b ? b : 0;
    }
    for (int r = r0, n; r < r1; r += n) {
        n = attn_rows(r1 - r);
        int a = ATTN_KEYS, b = 0, whole = 0;
        for (int i = r; i < r + n; i++) {
            if (t->a[i] == t->b[i]) continue;
            a = t->a[i] < a ? t->a[i] : a;
            b = t->b[i] > b ? t->b[i] : b;
            whole += t->b[i] - t->a[i] == ATTN_KEYS;
        }
        if (a >= b) continue;
#if PAIRED_VALUES
        if (whole == 6 && SOFTCAP == 0) {
            NAME(score_and_weigh)(t, r);
            continue;
        }
        memset(t->weighed + r, 0, n);
#endif
        a = a / VW * VW;
        b = (b + VW - 1) / VW * VW;
        SCORES(n, t->q[r], D, &t->k[0][a], ATTN_KEYS, &t->s[r][a], ATTN_KEYS, b - a, 0, D >> PAIRED, 1);
#if KV_CODES
        for (int i = r; i < r + n; i++)
            for (int j = a; j < b; j += VW) v_store(&t->s[i][j], v_load(&t->s[i][j]) * v_load(&t->k_scales[j]));
#endif
    }
}

#if PAIRED_VALUES
/* o += weights v of one key; the other one of its pair is taken for zero, its weight and its values. */
static void NAME(blend_key)(struct NAME(state) *t, int r, int j) {
    vu half = (vu){0} + (j % 2 ? 0xffff0000u : 0xffffu);
    vf w = (vf)((vu)dot_splat_word(t->s[r][j / 2]) & half);
    for (int d = 0; d < DV; d += VW) {
        vf value = (vf)((vu)v_load(&t->v[j / 2][d]) & half);
        v_store(&t->now->o[r][d], dot_pair(w, value, v_load(&t->now->o[r][d])));
    }
}
#endif

/* o += weights v of keys a .. b, which n rows see; several rows see whole pairs. */
static void NAME(blend)(struct NAME(state) *t, int r, int n, int a, int b) {
    if (a >= b) return;
#if PAIRED_VALUES
    if (a % 2) NAME(blend_key)(t, r, a);
    attn_product_bf16_pairs(n, t->s[r], ATTN_KEYS, t->v[0], DVP, t->now->o[r], DVP, DVP, (a + 1) / 2, b / 2, 0);
    if (b % 2) NAME(blend_key)(t, r, b - 1);
#else
    attn_product(n, t->s[r], ATTN_KEYS, t->v[0], DVP, t->now->o[r], DVP, DVP, a, b, 0);
#endif
}

/* o += weights v. A block of rows shares the keys (whole pairs) that all its rows see; a row's other keys, before and after
 * those, are its own, so that what it must not see is never multiplied, not even by zero. */
static void NAME(add_values)(struct NAME(state) *t, int r0, int r1) {
    for (int r = r0, n; r < r1; r += n) {
        n = attn_rows(r1 - r);
        int a = 0, b = ATTN_KEYS;
        for (int i = r; i < r + n; i++) {
            a = t->a[i] > a ? t->a[i] : a;
            b = t->b[i] < b ? t->b[i] : b;
        }
        if (PAIRED_VALUES) a = (a + 1) / 2 * 2, b = b / 2 * 2;
        int shared = a < b;
        for (int i = r; i < r + n; i++) NAME(blend)(t, i, 1, t->a[i], shared ? a : t->b[i]);
        if (!shared) continue;
        NAME(blend)(t, r, n, a, b);
        for (int i = r; i < r + n; i++) NAME(blend)(t, i, 1, b, t->b[i]);
    }
}

/* The sums of a chunk, that of keys j0 .. end, join those of the chunks before it. */
OUTLINE void NAME(rows_join)(const struct NAME(unit) *u, struct NAME(state) *t, int j0, int end) {
    struct NAME(sums) *all = t->all, *now = t->now;
    for (int r = 0; r < u->groups * u->rows; r++) {
        if (t->hi[r] <= j0 || t->lo[r] >= end) continue;
        if (t->lo[r] >= j0) {
            all->max[r] = now->max[r], all->sum[r] = now->sum[r];
            memcpy(all->o[r], now->o[r], sizeof all->o[r]);
            continue;
        }
        float max = now->max[r] > all->max[r] ? now->max[r] : all->max[r];
        float old = NAME(left)(all->max[r], max), part = NAME(left)(now->max[r], max);
        all->max[r] = max;
        all->sum[r] = FMA(all->sum[r], old, now->sum[r] * part);
        NAME(join)(all->o[r], old, now->o[r], part);
    }
}
