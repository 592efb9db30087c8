/* Attention forward on the host: ragged, grouped, online softmax over fixed key tiles.
 *
 * Enters, as #defines before each inclusion of this text (prelude.c and attention_core.c come first in the unit):
 *   NAME(x)                    prefixes every symbol of this instance
 *   Q_BUF K_BUF V_BUF O_BUF    indices into bufs; STARTS_BUF: i32 [sequences + 1], cumulative query rows
 *   LSE_BUF                    optional: f32 [tokens, HEADS], natural log-sum-exp of the scaled scores (sink included)
 *   SINK_BUF, SINK_T, LOAD_SINK  optional: [HEADS] logits that enter the denominator only
 *   KV_STARTS_BUF              optional: i32 [sequences + 1], cumulative key rows; without it keys are the queries' rows.
 *                              The last query of a sequence stands at its last key (decode, chunked prefill).
 *   PAGES_BUF, KV_LENS_BUF, PAGE, TABLE_PAGES  optional, instead: i32 [sequences, TABLE_PAGES] page numbers,
 *                              i32 [sequences] key counts, literal rows per page; key j lies in row page * PAGE + j % PAGE
 *   Q_T K_T V_T O_T            element types; LOAD_Q(x) LOAD_K(x) LOAD_V(x) to f32, STORE_O(x) from f32
 *   Q_OFF K_OFF V_OFF          offsets in elements; Q_ROW K_ROW V_ROW strides of a token, Q_HEAD K_HEAD V_HEAD of a head
 *   TOKENS SEQUENCES           query rows and sequences, expressions over dims
 *   HEADS KV_HEADS D DV        sizes, KV_HEADS divides HEADS
 *   SCALE SOFTCAP              f32 literals, SCALE > 0; SOFTCAP > 0: s = SOFTCAP tanh(SCALE s / SOFTCAP), 0 = none
 *   CAUSAL WINDOW              0 or 1; WINDOW > 0: key j is visible only if i - j < WINDOW, 0 = none
 *   KV_BF16 Q_BF16             optional: keys and values, and queries, are bf16; scores are then sums over words of two
 *                              where an instruction adds those (DOT_WORDS). KV_F32, instead: keys and values are f32
 * Leaves: NAME(units0)(dims) and NAME(phase0)(bufs, dims, scratch, begin, end), which writes
 *   o [tokens, HEADS, DV] contiguous, and lse. scratch is unused. A query that sees no key gets 0 and lse -infinity.
 *
 * Key tiles are counted from the start of the sequence; every score and output element has one
 * accumulator; row sums run over fixed lanes; a tile or key that a row does not see leaves its state
 * untouched. So a row's bits depend on its query and its visible keys alone, not on the batch, the
 * query tile or the threads: decode equals the full forward. Its state is on the stack:
 * 0.4 MiB for D = DV = 256, 0.6 MiB for D = 576, DV = 512. Key pages want huge pages: in 4 KiB pages decode waits on
 * page walks.
 */

/* Heads of a group are split into HEAD_CHUNKS of at most GROUP_HEADS when a group alone overfills a tile. */
#define GROUP (HEADS / KV_HEADS)
#define WIDE (D > DV ? D : DV)
#define ROWS (WIDE > 256 ? 48 : WIDE > 128 ? 96 : WIDE > 64 ? 144 : 192)
#define HEAD_CHUNKS ((GROUP + ROWS - 1) / ROWS)
#define GROUP_HEADS ((GROUP + HEAD_CHUNKS - 1) / HEAD_CHUNKS)
#define TILE_QUERIES (ROWS / GROUP_HEADS)
/* A unit of few queries (decode) takes several key heads, whose rows are neighbours in memory; never all, for two threads. */
#define MERGES(n) (HEAD_CHUNKS == 1 && KV_HEADS % (2 * (n)) == 0 && (n) * D * (int)sizeof(K_T) <= 2048)
#define MERGE (MERGES(8) ? 8 : MERGES(4) ? 4 : MERGES(2) ? 2 : 1)
#define DP ((D + VW - 1) / VW * VW)
#define DVP ((DV + VW - 1) / VW * VW)

/* One unit: a run of queries of one sequence, times heads that share a key head, for `groups` key heads.
 * Its rows are ordered by key head, query, head. */
struct NAME(unit) {
    int q0, queries, key_head, groups;
    int head0, heads;     /* first query head, heads of one group */
    int rows;             /* of one group */
    int keys, base;       /* keys of the sequence; position of its query 0 */
    int64_t row0, kv_row; /* global rows of query q0 and of key 0 */
    const int32_t *pages;
};

#if defined(Q_BF16) && defined(KV_BF16) && DOT_WORDS && D % (2 * VW) == 0
#define PAIRED 1
#else
#define PAIRED 0
#endif

/* Numbers of a key in a word, as which keys are transposed; 0 where they are widened before. */
#if defined(KV_BF16) && D % (2 * VW) == 0
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

/* Where PAIRED, q and k are words: [ROWS][D / 2] of q's rows, [D / 2][ATTN_KEYS]. */
struct NAME(state) {
    float q[ROWS][D] __attribute__((aligned(64)));
    float s[ROWS][ATTN_KEYS] __attribute__((aligned(64)));
    float o[ROWS][DVP] __attribute__((aligned(64)));
    float k[DP][ATTN_KEYS] __attribute__((aligned(64)));
    float wide[VW][DP] __attribute__((aligned(64))); /* keys on their way into k */
    float v[ATTN_KEYS][DVP] __attribute__((aligned(64)));
    float max[ROWS + VW], sum[ROWS + VW], keep[ROWS + VW]; /* keep: what a tile leaves of the sums before it */
    int lo[ROWS], hi[ROWS]; /* visible keys of a row, then */
    int a[ROWS], b[ROWS];   /* those inside the tile; a == b when none */
};

int64_t NAME(units0)(const int64_t *dims) {
    return (TOKENS / TILE_QUERIES + SEQUENCES) * KV_HEADS * HEAD_CHUNKS;
}

/* Sequence s owns the tile slots from starts[s] / TILE_QUERIES + s on: enough for it, and known without a
 * prefix sum. Slots are visited from both ends in turn, so that any half of the units holds half of a causal triangle. */
static int NAME(find)(struct NAME(unit) *u, void *const *bufs, const int64_t *dims, int64_t index) {
    const int32_t *starts = bufs[STARTS_BUF];
    int64_t slots = TOKENS / TILE_QUERIES + SEQUENCES;
    int64_t at = index % slots, head = index / slots;
    int64_t slot = at & 1 ? slots - 1 - at / 2 : at / 2;
    int64_t lo = 0, hi = SEQUENCES;
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        if (starts[mid] / TILE_QUERIES + mid <= slot) lo = mid; else hi = mid;
    }
    int64_t q0 = (slot - starts[lo] / TILE_QUERIES - lo) * TILE_QUERIES;
    int64_t len = starts[lo + 1] - starts[lo];
    if (q0 < 0 || q0 >= len) return 0;
    u->q0 = (int)q0;
    u->queries = (int)(len - q0 < TILE_QUERIES ? len - q0 : TILE_QUERIES);
    u->key_head = (int)(head / HEAD_CHUNKS);
    int first = (int)(head % HEAD_CHUNKS) * GROUP_HEADS;
    u->heads = GROUP - first < GROUP_HEADS ? GROUP - first : GROUP_HEADS;
    u->head0 = u->key_head * GROUP + first;
    u->rows = u->queries * u->heads;
    u->groups = u->rows * MERGE <= ROWS ? MERGE : 1;
    u->row0 = starts[lo] + q0;
    u->pages = 0;
#if defined(PAGES_BUF)
    u->pages = (const int32_t *)bufs[PAGES_BUF] + lo * TABLE_PAGES;
    u->keys = ((const int32_t *)bufs[KV_LENS_BUF])[lo];
    u->kv_row = 0;
#elif defined(KV_STARTS_BUF)
    const int32_t *kv = bufs[KV_STARTS_BUF];
    u->keys = kv[lo + 1] - kv[lo];
    u->kv_row = kv[lo];
#else
    u->keys = (int)len;
    u->kv_row = starts[lo];
#endif
    u->base = u->keys - (int)len;
    return u->heads > 0 && u->key_head % u->groups == 0;
}

/* The first key that a query at this position may see. */
INLINE int NAME(sees_from)(int pos) { return WINDOW > 0 && pos - WINDOW + 1 > 0 ? pos - WINDOW + 1 : 0; }

INLINE int NAME(query)(const struct NAME(unit) *u, int r) { return r % u->rows / u->heads; }

INLINE int NAME(head)(const struct NAME(unit) *u, int r) {
    return u->head0 + r / u->rows * GROUP + r % u->rows % u->heads;
}

INLINE int64_t NAME(key_row)(const struct NAME(unit) *u, int j) {
#if defined(PAGES_BUF)
    return (int64_t)u->pages[j / PAGE] * PAGE + j % PAGE;
#else
    return u->kv_row + j;
#endif
}

static void NAME(begin)(const struct NAME(unit) *u, struct NAME(state) *t, const Q_T *q) {
    for (int r = 0; r < ROWS + VW; r++) {
        t->max[r] = -__builtin_inff();
        t->sum[r] = 0.0f;
    }
    for (int r = 0; r < u->groups * u->rows; r++) {
        int at = NAME(query)(u, r), i = u->base + u->q0 + at;
        const Q_T *from = q + Q_OFF + (u->row0 + at) * Q_ROW + NAME(head)(u, r) * (int64_t)Q_HEAD;
        if (PAIRED) memcpy(t->q[r], from, D * sizeof *from);
        for (int d = 0; !PAIRED && d < D; d++) t->q[r][d] = LOAD_Q(from[d]);
        for (int d = 0; d < DVP; d++) t->o[r][d] = 0.0f;
        t->lo[r] = NAME(sees_from)(i);
        t->hi[r] = CAUSAL && i + 1 < u->keys ? i + 1 : u->keys;
    }
}

/* The place to fetch ahead while key i of group g is packed: the next tile's rows, each across all groups at once. */
INLINE int64_t NAME(ahead)(const struct NAME(unit) *u, int j0, int g, int i, int64_t row, int64_t head) {
    int n = g * ATTN_KEYS + i, j = j0 + ATTN_KEYS + n / u->groups;
    return NAME(key_row)(u, j < u->keys ? j : u->keys - 1) * row + (u->key_head + n % u->groups) * head;
}

#if WORD
/* VW keys, whose rows are these, as words [D / WORD][keys] in the place of k, from column j on. */
INLINE void NAME(words)(struct NAME(state) *t, const K_T *const *rows, int j) {
    for (int d = 0; d < D; d += WORD * VW) {
        const float *from[VW];
        for (int i = 0; i < VW; i++) from[i] = (const float *)(rows[i] + d);
        attn_transpose_lines(from, &t->k[d / WORD][j], ATTN_KEYS);
    }
}
#endif

/* k[D][keys] of group g; lanes past the last key repeat it. */
static void NAME(pack_k)(const struct NAME(unit) *u, struct NAME(state) *t, const K_T *k, int j0, int count, int g) {
    const K_T *head = k + K_OFF + (u->key_head + g) * (int64_t)K_HEAD;
    for (int j = 0; j < count; j += VW) {
        const K_T *rows[VW];
        for (int i = 0; i < VW; i++) {
            const K_T *next = k + K_OFF + NAME(ahead)(u, j0, g, j + i, K_ROW, K_HEAD);
            for (int d = 0; d < D; d += 64 / (int)sizeof(K_T)) __builtin_prefetch(next + d, 0, 2);
            rows[i] = head + NAME(key_row)(u, j0 + (j + i < count ? j + i : count - 1)) * K_ROW;
#if !PAIRED && WORD != 1
            for (int d = 0; d < D; d++) t->wide[i][d] = LOAD_K(rows[i][d]);
#endif
        }
#if PAIRED || WORD == 1
        NAME(words)(t, rows, j);
#else
        for (int d = 0; d < D; d += VW) attn_transpose(&t->wide[0][d], DP, &t->k[d][j], ATTN_KEYS);
#endif
    }
}

/* v[keys][DVP] of group g. */
static void NAME(pack_v)(const struct NAME(unit) *u, struct NAME(state) *t, const V_T *v, int j0, int count, int g) {
    const V_T *head = v + V_OFF + (u->key_head + g) * (int64_t)V_HEAD;
    for (int j = 0; j < count; j++) {
        const V_T *next = v + V_OFF + NAME(ahead)(u, j0, g, j, V_ROW, V_HEAD);
        for (int d = 0; d < DV; d += 64 / (int)sizeof(V_T)) __builtin_prefetch(next + d, 0, 2);
        const V_T *from = head + NAME(key_row)(u, j0 + j) * V_ROW;
        for (int d = 0; d < DV; d++) t->v[j][d] = LOAD_V(from[d]);
        for (int d = DV; d < DVP; d++) t->v[j][d] = 0.0f;
    }
}

#if PAIRED
#define SCORES attn_product_words
#else
#define SCORES attn_product
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
        int a = ATTN_KEYS, b = 0;
        for (int i = r; i < r + n; i++) {
            if (t->a[i] == t->b[i]) continue;
            a = t->a[i] < a ? t->a[i] : a;
            b = t->b[i] > b ? t->b[i] : b;
        }
        if (a >= b) continue;
        a = a / VW * VW;
        b = (b + VW - 1) / VW * VW;
        SCORES(n, t->q[r], D, &t->k[0][a], ATTN_KEYS, &t->s[r][a], ATTN_KEYS, b - a, 0, D >> PAIRED, 1);
    }
}

/* Scores to weights, VW rows at once: new maxima, the factor that keeps the old sums, exponentials, sums.
 * Lane results of the rows are transposed, so that the last step over lanes is vertical. */
static void NAME(weigh)(struct NAME(state) *t, int r0, int rows) {
    const float factor = SOFTCAP > 0 ? 1.0f : SCALE, none = -__builtin_inff();
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
    attn_transpose(lane[0], VW, lane[0], VW);
    vf top = v_load(lane[0]);
    for (int i = 1; i < VW; i++) top = v_max(v_load(lane[i]), top);
    v_store(lane[0], top * v_splat(factor));
    float *max = t->max + r0, *keep = t->keep + r0;
    for (int i = 0; i < VW; i++) {
        float next = lane[0][i] > max[i] ? lane[0][i] : max[i], fade = attn_exp(max[i] - next);
        keep[i] = max[i] == next ? 1.0f : fade;
        max[i] = next;
    }
    for (int i = 0; i < VW; i++) {
        int r = r0 + i;
        v_store(lane[i], (vf){0});
        if (i >= rows || t->a[r] == t->b[r]) continue;
        float *s = t->s[r], m = t->max[r];
        for (int j = 0; j < ATTN_KEYS; j++) s[j] = attn_exp(FMA(s[j], factor, -m));
        vf sum = v_load(s);
        for (int j = VW; j < ATTN_KEYS; j += VW) sum += v_load(s + j);
        v_store(lane[i], sum);
        vf k = v_splat(t->keep[r]);
        if (t->keep[r] != 1.0f)
            for (int d = 0; d < DVP; d += VW) v_store(t->o[r] + d, v_load(t->o[r] + d) * k);
    }
    attn_transpose(lane[0], VW, lane[0], VW);
    vf sum = v_load(lane[0]);
    for (int i = 1; i < VW; i++) sum += v_load(lane[i]);
    v_store(t->sum + r0, v_fma(v_load(t->sum + r0), v_load(keep), sum));
}

/* o += weights v. A block of rows shares the keys that all its rows see; a row's other keys, before and after
 * those, are its own, so that what it must not see is never multiplied, not even by zero. */
static void NAME(blend)(struct NAME(state) *t, int r0, int r1) {
    for (int r = r0, n; r < r1; r += n) {
        n = attn_rows(r1 - r);
        int a = 0, b = ATTN_KEYS;
        for (int i = r; i < r + n; i++) {
            a = t->a[i] > a ? t->a[i] : a;
            b = t->b[i] < b ? t->b[i] : b;
        }
        int shared = a < b;
        for (int i = r; i < r + n; i++) {
            int end = shared ? a : t->b[i];
            if (t->a[i] < end) attn_product(1, t->s[i], ATTN_KEYS, t->v[0], DVP, t->o[i], DVP, DVP, t->a[i], end, 0);
        }
        if (!shared) continue;
        attn_product(n, t->s[r], ATTN_KEYS, t->v[0], DVP, t->o[r], DVP, DVP, a, b, 0);
        for (int i = r; i < r + n; i++)
            if (b < t->b[i]) attn_product(1, t->s[i], ATTN_KEYS, t->v[0], DVP, t->o[i], DVP, DVP, b, t->b[i], 0);
    }
}

#if ONE_QUERY
/* One query (decode): each key and value is used by a few rows only, so getting it ready is what costs. Keys are
 * transposed as words, and those of two numbers widened on their way into the product; values are read where they lie. Every
 * sum has the terms and the order that it has among many queries. */

/* Rows of keys j0 and on; past the last key that one again. */
static void NAME(rows)(const struct NAME(unit) *u, int j0, int64_t *rows) {
    for (int i = 0; i < ATTN_KEYS; i++) rows[i] = NAME(key_row)(u, j0 + i < u->keys ? j0 + i : u->keys - 1);
}

/* Keys a .. b of a tile as words, in the place of k; `next` are rows to fetch meanwhile. */
static void NAME(word_k)(struct NAME(state) *t, const K_T *k, const int64_t *rows, const int64_t *next, int a, int b) {
    for (int j = a / VW * VW; j < b; j += VW) {
        const K_T *at[VW];
        for (int i = 0; i < VW; i++) {
            for (int d = 0; d < D; d += 64 / (int)sizeof(K_T)) __builtin_prefetch(k + next[j + i] * K_ROW + d, 0, 2);
            at[i] = k + rows[j + i] * K_ROW;
        }
        NAME(words)(t, at, j);
    }
}

/* Numbers of words: the one there is, or the lower or upper of two. */
INLINE vf NAME(number)(vf word, int half) {
    return WORD == 1 ? word : half ? (vf)((vu)word & 0xffff0000u) : (vf)((vu)word << 16);
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
#if PAIRED
            ATTN_EACH(i, n) {
                vf q = dot_splat_word(t->q[r + i][d / 2]);
                ATTN_EACH(c, ATTN_NV) acc[i][c] = dot_pair(q, word[c], acc[i][c]);
            }
#else
            for (int half = 0; half < WORD; half++)
                ATTN_EACH(i, n) {
                    vf q = v_splat(t->q[r + i][d + half]);
                    ATTN_EACH(c, ATTN_NV) acc[i][c] = v_fma(q, NAME(number)(word[c], half), acc[i][c]);
                }
#endif
        }
        ATTN_EACH(i, n) ATTN_EACH(c, ATTN_NV) v_store(&t->s[r + i][at + c * VW], acc[i][c]);
    }
}

/* o += weights v for n rows and nv vectors of columns from d on (both literals). */
INLINE void NAME(blend_some)(struct NAME(state) *t, const V_T *v, const int64_t *rows, const int64_t *next, int r, int n,
                             int d, int nv, int a, int b) {
    vf acc[4][ATTN_NV];
    ATTN_EACH(i, n) ATTN_EACH(c, nv) acc[i][c] = v_load(&t->o[r + i][d + c * VW]);
    for (int j = a; j < b; j++) {
        const V_T *from = v + rows[j] * V_ROW + d;
        for (int c = 0; next && c < nv * VW; c += 64 / (int)sizeof(V_T)) __builtin_prefetch(v + next[j] * V_ROW + d + c, 0, 2);
        vf x[ATTN_NV];
        ATTN_EACH(c, nv) x[c] = WORD == 1 ? v_load((const float *)(from + c * VW)) : attn_widen(from + c * VW);
        ATTN_EACH(i, n) {
            vf w = v_splat(t->s[r + i][j]);
            ATTN_EACH(c, nv) acc[i][c] = v_fma(w, x[c], acc[i][c]);
        }
    }
    ATTN_EACH(i, n) ATTN_EACH(c, nv) v_store(&t->o[r + i][d + c * VW], acc[i][c]);
}

INLINE void NAME(blend_rows)(struct NAME(state) *t, const V_T *v, const int64_t *rows, const int64_t *next, int r, int n,
                             int a, int b) {
    int d = 0;
    for (; d + ATTN_NV * VW <= DV; d += ATTN_NV * VW) NAME(blend_some)(t, v, rows, next, r, n, d, ATTN_NV, a, b);
    for (; d < DV; d += VW) NAME(blend_some)(t, v, rows, next, r, n, d, 1, a, b);
}

/* All keys of the unit's query, a tile after the other. */
static void NAME(one)(const struct NAME(unit) *u, struct NAME(state) *t, const K_T *k, const V_T *v) {
    int64_t around[2][ATTN_KEYS];
    int lo = t->lo[0], hi = t->hi[0], rows = u->groups * u->rows, turn = 0;
    k += K_OFF + u->key_head * (int64_t)K_HEAD, v += V_OFF + u->key_head * (int64_t)V_HEAD;
    NAME(rows)(u, lo / ATTN_KEYS * ATTN_KEYS, around[0]);
    for (int j0 = lo / ATTN_KEYS * ATTN_KEYS; j0 < hi; j0 += ATTN_KEYS, turn ^= 1) {
        const int64_t *here = around[turn], *next = around[turn ^ 1];
        int a = lo > j0 ? lo - j0 : 0, b = hi - j0 < ATTN_KEYS ? hi - j0 : ATTN_KEYS;
        NAME(rows)(u, j0 + ATTN_KEYS, around[turn ^ 1]);
        for (int r = 0; r < rows; r++) t->a[r] = a, t->b[r] = b;
        for (int g = 0; g < u->groups; g++) {
            int r = g * u->rows, end = r + u->rows;
            NAME(word_k)(t, k + g * (int64_t)K_HEAD, here, next, a, b);
            for (; r + 4 <= end; r += 4) NAME(score_some)(t, r, 4, a, b);
            if (end - r == 3) NAME(score_some)(t, r, 3, a, b);
            if (end - r == 2) NAME(score_some)(t, r, 2, a, b);
            if (end - r == 1) NAME(score_some)(t, r, 1, a, b);
        }
        for (int r = 0; r < rows; r += VW) NAME(weigh)(t, r, rows - r);
        for (int g = 0; g < u->groups; g++) {
            const V_T *head = v + g * (int64_t)V_HEAD;
            int r = g * u->rows, end = r + u->rows;
            for (; r + 4 <= end; r += 4) NAME(blend_rows)(t, head, here, next, r, 4, a, b);
            if (end - r == 3) NAME(blend_rows)(t, head, here, next, r, 3, a, b);
            if (end - r == 2) NAME(blend_rows)(t, head, here, next, r, 2, a, b);
            if (end - r == 1) NAME(blend_rows)(t, head, here, next, r, 1, a, b);
        }
    }
}
#endif

/* The row of the result that a unit's row is. */
INLINE int64_t NAME(result)(const struct NAME(unit) *u, int r) {
    return (u->row0 + NAME(query)(u, r)) * HEADS + NAME(head)(u, r);
}

/* What a row's blend is multiplied by in the end; writes its log-sum-exp. */
INLINE float NAME(close)(const struct NAME(unit) *u, int r, float max, float sum, void *const *bufs) {
    float keep = 1.0f;
#ifdef SINK_BUF
    float sink = LOAD_SINK(((const SINK_T *)bufs[SINK_BUF])[NAME(head)(u, r)]);
    float top = sink > max ? sink : max;
    keep = m_exp(max - top);
    sum = FMA(sum, keep, m_exp(sink - top));
    max = top;
#endif
#ifdef LSE_BUF
    ((float *)bufs[LSE_BUF])[NAME(result)(u, r)] = max + m_log(sum);
#endif
    return sum == 0.0f ? 0.0f : keep / sum;
}

static void NAME(finish)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs) {
    for (int r = 0; r < u->groups * u->rows; r++) {
        float inverse = NAME(close)(u, r, t->max[r], t->sum[r], bufs);
        O_T *to = (O_T *)bufs[O_BUF] + NAME(result)(u, r) * DV;
        for (int d = 0; d < DV; d++) to[d] = STORE_O(t->o[r][d] * inverse);
    }
}

/* Whether the matrix unit may do it, see attention_tiles.c. */
#if defined(DOT_PAIRS) && defined(KV_BF16) && defined(Q_BF16) && D % 32 == 0 && DV % 32 == 0
#define ATTN_TILED 1
static void NAME(by_tiles)(void *const *bufs, const int64_t *dims, int64_t begin, int64_t end);
#else
#define ATTN_TILED 0
#endif

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    (void)scratch;
#if ATTN_TILED
    if (dot_amx) {
        NAME(by_tiles)(bufs, dims, begin, end);
        return;
    }
#endif
    struct NAME(state) t;
    struct NAME(unit) u;
    for (int64_t index = begin; index < end; index++) {
        if (!NAME(find)(&u, bufs, dims, index)) continue;
        NAME(begin)(&u, &t, bufs[Q_BUF]);
#if ONE_QUERY
        if (u.queries == 1) {
            NAME(one)(&u, &t, bufs[K_BUF], bufs[V_BUF]);
            NAME(finish)(&u, &t, bufs);
            continue;
        }
#endif
        int rows = u.groups * u.rows, from = t.lo[0] / ATTN_KEYS * ATTN_KEYS, to = t.hi[rows - 1];
        for (int j0 = from; j0 < to; j0 += ATTN_KEYS) {
            int count = to - j0 < ATTN_KEYS ? to - j0 : ATTN_KEYS;
            for (int g = 0; g < u.groups; g++) {
                NAME(pack_k)(&u, &t, bufs[K_BUF], j0, count, g);
                NAME(scores)(&t, g * u.rows, (g + 1) * u.rows, j0);
            }
            for (int r = 0; r < rows; r += VW) NAME(weigh)(&t, r, rows - r);
            for (int g = 0; g < u.groups; g++) {
                NAME(pack_v)(&u, &t, bufs[V_BUF], j0, count, g);
                NAME(blend)(&t, g * u.rows, (g + 1) * u.rows);
            }
        }
        NAME(finish)(&u, &t, bufs);
    }
}
