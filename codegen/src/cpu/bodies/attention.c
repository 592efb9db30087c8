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
 *   KV_CODES                   1, 2: keys and values are integers, e4m3 of eight bits; K_T V_T then are their codes', and
 *                              KS_BUF VS_BUF, KS_OFF KS_ROW KS_HEAD ... f32 that a key's score and a value's weight are multiplied
 *                              by; 0: numbers
 *   Q_T K_T V_T O_T            element types; LOAD_Q(x) LOAD_K(x) LOAD_V(x) to f32, STORE_O(x) from f32
 *   Q_OFF K_OFF V_OFF          offsets in elements; Q_ROW K_ROW V_ROW strides of a token, Q_HEAD K_HEAD V_HEAD of a head
 *   TOKENS SEQUENCES           query rows and sequences, expressions over dims; THREADS, that share the units
 *   CHUNKS SPLITS              chunks of the keys that pages may hold; units at most that share the keys of all queries
 *   HEADS KV_HEADS D DV        sizes, KV_HEADS divides HEADS
 *   SCALE SOFTCAP              f32 literals, SCALE > 0; SOFTCAP > 0: s = SOFTCAP tanh(SCALE s / SOFTCAP), 0 = none
 *   CAUSAL WINDOW              0 or 1; WINDOW > 0: key j is visible only if i - j < WINDOW, 0 = none
 *   TILED                      optional: queries are bf16, keys and values bf16 or codes, D and DV multiples of 32: the matrix unit's way
 *   KV_BF16 Q_BF16             optional: keys and values, and queries, are bf16; scores of these, and of codes, are then sums over
 *                              bf16 pairs where an instruction adds those (DOT_BF16_PAIRS); so are weights, rounded to bf16, times
 *                              bf16 values, as in other implementations of flash attention. KV_F32, instead: keys and values are f32
 * Leaves: NAME(units0)(dims) and NAME(phase0)(bufs, dims, scratch, begin, end), which writes
 *   o [tokens, HEADS, DV] contiguous, and lse; with PAGES_BUF NAME(units1) and NAME(phase1), too.
 *   A query that sees no key gets 0 and lse -infinity.
 *
 * This text, which says what the units are and leaves ATTN_TILED, and those that follow it: attention_rows.c and attention_one.c (vectors),
 * attention_tiles.c (the matrix unit), attention_phases.c.
 *
 * Key tiles and chunks of tiles are counted from the start of the sequence. Sums of a chunk begin anew, and chunks are joined in
 * order; every score and output element of a chunk has one accumulator; row sums run over fixed lanes; a chunk, tile or key
 * that a row does not see leaves its state untouched. So a row's bits depend on its query and its visible keys alone, not on
 * the batch, the query tile or the threads: decode equals the full forward, though its chunks are units of their own, whose
 * sums wait in scratch. The state is on the stack: 0.5 MiB for D = DV = 256, 0.7 MiB for D = 576, DV = 512. Key pages want huge
 * pages: in 4 KiB pages decode waits on page walks.
 */

#if defined(DOT_PAIRS) && defined(TILED)
#define ATTN_TILED 1
#else
#define ATTN_TILED 0
#endif

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

/* One unit: a run of queries of one sequence, times heads that share a key head, for `groups` key heads, and the keys or a part
 * of them. Its rows are ordered by key head, query, head. */
struct NAME(unit) {
    int q0, queries, key_head, groups;
    int head0, heads;     /* first query head, heads of one group */
    int rows;             /* of one group */
    int keys, base;       /* keys of the sequence; position of its query 0 */
    int from, to;         /* keys of the unit: all that its rows see, from the tile of the first on, or chunks of them */
    int parts;            /* of those that all its rows see; 1 but where one query's keys are shared by units */
    int64_t row0, kv_row; /* global rows of query q0 and of key 0 */
    const int32_t *pages;
    const float *k_scales, *v_scales; /* of key head key_head */
};

static int64_t NAME(slots)(const int64_t *dims) { return TOKENS / TILE_QUERIES + SEQUENCES; }

/* Whether a unit of few queries takes all key heads, so that rows are read whole, as they lie: where there is about a query for each
 * sequence, and sequences are so many for each thread that their lengths hardly matter, or (SHARED) so few that threads share
 * their keys. */
#define SHARED 2
static int NAME(whole)(const int64_t *dims) {
#if ATTN_TILED
    if (dot_amx) return 0;
#endif
    int fits = HEAD_CHUNKS == 1 && HEADS <= ROWS && KV_HEADS * D * (int)sizeof(K_T) <= 4096;
    if (!fits || TOKENS != SEQUENCES || TOKENS <= 0) return 0;
#if defined(PAGES_BUF)
    /* Not where parts of rows are long and as many for each thread: threads that read rows far from one another hinder each other. */
    int parts = MERGE * D * (int)sizeof(K_T) >= 1024 && TOKENS * KV_HEADS / MERGE % THREADS == 0;
    if (TOKENS < 4 * THREADS && THREADS > 1 && 2 * TOKENS <= SPLITS && !parts) return SHARED;
#endif
    return TOKENS >= 4 * THREADS || THREADS == 1;
}

/* Units that share the keys of a query: two for each thread, in all, where there are more threads than units otherwise. */
static int64_t NAME(splits)(const int64_t *dims) {
#if defined(PAGES_BUF)
    int64_t units = TOKENS * KV_HEADS * HEAD_CHUNKS / MERGE;
    if (TOKENS <= 0 || NAME(whole)(dims) || units >= THREADS) return 1;
    int64_t splits = (2 * THREADS + units - 1) / units, most = SPLITS / TOKENS < CHUNKS ? SPLITS / TOKENS : CHUNKS;
    return splits < most ? splits : most > 1 ? most : 1;
#else
    return 1;
#endif
}

/* The first key that a query at this position may see. */
INLINE int NAME(sees_from)(int pos) { return WINDOW > 0 && pos - WINDOW + 1 > 0 ? pos - WINDOW + 1 : 0; }

/* The unit takes so many key heads. */
static void NAME(take)(struct NAME(unit) *u, void *const *bufs, int key_head, int groups) {
    u->key_head = key_head, u->groups = groups, u->head0 = key_head * GROUP;
#if KV_CODES
    u->k_scales = (const float *)bufs[KS_BUF] + KS_OFF + key_head * (int64_t)KS_HEAD;
    u->v_scales = (const float *)bufs[VS_BUF] + VS_OFF + key_head * (int64_t)VS_HEAD;
#endif
}

/* Sequence s owns the tile slots from starts[s] / TILE_QUERIES + s on: enough for it, and known without a
 * prefix sum. Slots are visited from both ends in turn, so that any half of the units holds half of a causal triangle. */
static int NAME(find)(struct NAME(unit) *u, void *const *bufs, const int64_t *dims, int64_t at, int64_t head) {
    const int32_t *starts = bufs[STARTS_BUF];
    int64_t slots = NAME(slots)(dims);
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
    int first = (int)(head % HEAD_CHUNKS) * GROUP_HEADS, groups = NAME(whole)(dims) ? KV_HEADS : MERGE;
    u->heads = GROUP - first < GROUP_HEADS ? GROUP - first : GROUP_HEADS;
    u->rows = u->queries * u->heads;
    NAME(take)(u, bufs, (int)(head / HEAD_CHUNKS), u->rows * groups > ROWS ? 1 : groups);
    u->head0 += first;
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
    int last = u->base + u->q0 + u->queries;
    u->from = NAME(sees_from)(u->base + u->q0) / ATTN_KEYS * ATTN_KEYS;
    u->to = CAUSAL && last < u->keys ? last : u->keys;
    u->parts = 1;
    return u->heads > 0 && u->key_head % u->groups == 0;
}

/* Leaves the unit those chunks of its keys that begin in parts of equal length, the parts of splits begin .. end; whether there
 * are any. */
static int NAME(split)(struct NAME(unit) *u, int64_t begin, int64_t end, int64_t splits) {
    int first = u->from, last = u->to, chunks = u->queries > 1 || first >= last ? 1 : attn_chunk(last - 1) - attn_chunk(first) + 1;
    if (splits == 1 || chunks == 1) return begin == 0;
    u->parts = chunks < splits ? chunks : (int)splits;
    /* Parts are far from another among the splits, for a thread takes several neighbours. */
    int64_t part = (begin * u->parts + splits - 1) / splits, behind = (end * u->parts + splits - 1) / splits;
    u->from = last, u->to = first;
    for (int j = first, next; j < last; j = next) {
        next = attn_chunk_end(j) < last ? attn_chunk_end(j) : last;
        int64_t of = (int64_t)(j - first) * u->parts / (last - first);
        if (of < part || of >= behind) continue;
        u->from = j < u->from ? j : u->from;
        u->to = next;
    }
    return u->from < u->to;
}

/* Where a thread is in its range of indices. An index is a slot and a key head, and where keys are shared a split, too: then
 * those of neighbouring heads lie within that of a split, and splits of a head that are neighbours are one unit. Where units take all
 * heads, those of a slot lie side by side. */
struct NAME(walk) {
    int64_t at, end, splits;
    int head;
    /* Where threads share whole rows there is an index for each thread, as much of the work as any other: not more of them, for each
     * begins with nothing on its way from memory. All of the work; the slot to go on with, what lies before it, its first key to go on
     * with, or -1. */
    int shared;
    int64_t all, slot, before;
    int key;
};

#if defined(PAGES_BUF)
/* Whether what lies in the middle of so much work, from here on, is of the range. */
INLINE int NAME(mine)(const struct NAME(walk) *w, const int64_t *dims, int64_t from, int64_t much) {
    int64_t at = (2 * from + much) * THREADS;
    return at >= 2 * w->all * w->at && at < 2 * w->all * w->end;
}

/* The next unit where whole rows are shared. Work is counted in keys of a key head. What is not divided is a chunk of keys for a key head;
 * a unit are chunks for all heads, or heads of a chunk. Several queries are a unit with each key head. */
static int NAME(next_share)(struct NAME(unit) *u, struct NAME(walk) *w, void *const *bufs, const int64_t *dims) {
    int64_t slots = NAME(slots)(dims);
    if (!w->all) w->key = -1;
    for (int64_t s = w->all ? slots : 0; s < slots; s++)
        if (NAME(find)(u, bufs, dims, s, 0)) w->all += (int64_t)(u->to > u->from ? u->to - u->from : 1) * u->queries * KV_HEADS;
    for (int64_t done = 0;; w->slot++, w->before += done, w->key = -1, w->head = 0, done = 0) {
        if (w->slot >= slots) return 0;
        if (!NAME(find)(u, bufs, dims, w->slot, 0)) continue;
        int first = u->from, last = u->to > first ? u->to : first + 1, to = u->to, one = u->queries == 1, groups = 0;
        done = (int64_t)(last - first) * u->queries * KV_HEADS;
        u->parts = one && attn_chunk(first) != attn_chunk(last - 1) ? 2 : 1;
        for (int j = w->key < 0 ? first : w->key, stop; j < last; j = stop, w->head = 0) {
            stop = one && attn_chunk_end(j) < last ? attn_chunk_end(j) : last;
            int64_t much = (int64_t)(stop - j) * u->queries, at = w->before + (int64_t)(j - first) * u->queries * KV_HEADS;
            int from = w->head;
            while (from < KV_HEADS && !NAME(mine)(w, dims, at + from * much, much)) from++;
            int end = from;
            while (end < KV_HEADS && (one || end == from) && NAME(mine)(w, dims, at + end * much, much)) end++;
            w->key = j;
            if (groups && (groups < KV_HEADS || end - from < KV_HEADS)) break;
            if (end == from) continue;
            if (!groups) NAME(take)(u, bufs, from, end - from), u->from = j;
            groups = end - from, u->to = stop < to ? stop : to;
            w->key = stop, w->head = 0;
            if (end < KV_HEADS) {
                w->key = j, w->head = end;
                break;
            }
        }
        if (groups) return 1;
    }
}
#endif

/* The next unit, if there is one. */
OUTLINE int NAME(next)(struct NAME(unit) *u, struct NAME(walk) *w, void *const *bufs, const int64_t *dims) {
#if defined(PAGES_BUF)
    if (w->shared) return NAME(next_share)(u, w, bufs, dims);
#endif
    int64_t heads = NAME(whole)(dims) ? KV_HEADS : w->splits > 1 ? MERGE : 1, block = w->splits * heads, slots = NAME(slots)(dims);
    while (w->at < w->end) {
        int64_t first = w->at / block * block, stop = w->end < first + block ? w->end : first + block;
        if (w->head == heads) {
            w->at = stop, w->head = 0;
            continue;
        }
        int64_t h = w->head++, begin = (w->at - first - h + heads - 1) / heads, end = (stop - first - h + heads - 1) / heads;
        int64_t slot = first / block % slots, head = first / block / slots * heads + h;
        if (begin < end && NAME(find)(u, bufs, dims, slot, head) && NAME(split)(u, begin, end, w->splits)) return 1;
    }
    return 0;
}

INLINE int NAME(query)(const struct NAME(unit) *u, int r) { return r % u->rows / u->heads; }

INLINE int NAME(head)(const struct NAME(unit) *u, int r) {
    return u->head0 + r / u->rows * GROUP + r % u->rows % u->heads;
}

/* Keys from a multiple of RUN on, within a tile, that lie one behind the other. */
#if defined(PAGES_BUF)
#define RUN ((PAGE & -PAGE) < ATTN_KEYS ? (PAGE & -PAGE) : ATTN_KEYS)
#else
#define RUN ATTN_KEYS
#endif

INLINE int64_t NAME(key_row)(const struct NAME(unit) *u, int j) {
#if defined(PAGES_BUF)
    return (int64_t)u->pages[j / PAGE] * PAGE + j % PAGE;
#else
    return u->kv_row + j;
#endif
}

#if ATTN_TILED
/* Lines of keys and values that the matrix unit's way asks for ahead, in the order in which they lie, which the processor's own prefetching
 * follows: those of all heads at hand, a row after the other. */
struct NAME(ahead) {
    const K_T *k;
    const V_T *v;
    const int64_t *rows;
    int lines_k, lines, row, end, at; /* lines of a row; the next row, the last, the next line of a row */
};

/* From the first of these rows on, and `left` of them at most. */
INLINE void NAME(turn)(struct NAME(ahead) *next, const int64_t *rows, int left) {
    next->rows = rows, next->row = next->at = 0, next->end = left < ATTN_KEYS ? left : ATTN_KEYS;
}

INLINE void NAME(prefetch_from)(struct NAME(ahead) *next, const struct NAME(unit) *u, void *const *bufs, const int64_t *rows, int left) {
    next->k = (const K_T *)bufs[K_BUF] + K_OFF + u->key_head * (int64_t)K_HEAD;
    next->v = (const V_T *)bufs[V_BUF] + V_OFF + u->key_head * (int64_t)V_HEAD;
    next->lines_k = (u->groups * D * (int)sizeof(K_T) + 63) / 64;
    next->lines = next->lines_k + (u->groups * DV * (int)sizeof(V_T) + 63) / 64;
    NAME(turn)(next, rows, left);
}

INLINE void NAME(prefetch)(struct NAME(ahead) *next, int lines) {
    for (; lines > 0 && next->row < next->end; lines--) {
        int64_t row = next->rows[next->row];
        if (next->at < next->lines_k)
            __builtin_prefetch((const char *)(next->k + row * K_ROW) + next->at * 64, 0, 2);
        else
            __builtin_prefetch((const char *)(next->v + row * V_ROW) + (next->at - next->lines_k) * 64, 0, 2);
        if (++next->at == next->lines) next->at = 0, next->row++;
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

OUTLINE void NAME(write)(const struct NAME(unit) *u, int r, float max, float sum, const float *o, void *const *bufs) {
    float inverse = NAME(close)(u, r, max, sum, bufs);
    O_T *to = (O_T *)bufs[O_BUF] + NAME(result)(u, r) * DV;
    for (int d = 0; d < DV; d++) to[d] = STORE_O(o[d] * inverse);
}

/* Where the sums of a row over the chunk of key j wait: DVP numbers, the maximum, the sum. */
#define PART (DVP + 2)
INLINE float *NAME(part)(const struct NAME(unit) *u, int r, int j, char *scratch) {
    return (float *)scratch + ((u->row0 * CHUNKS + attn_chunk(j)) * HEADS + NAME(head)(u, r)) * PART;
}

OUTLINE void NAME(keep)(const struct NAME(unit) *u, int r, int j, float max, float sum, const float *o, char *scratch) {
    float *part = NAME(part)(u, r, j, scratch);
    memcpy(part, o, DVP * sizeof *o), part[DVP] = max, part[DVP + 1] = sum;
}

/* Sums so far and those of a chunk become one: either is multiplied by what the common maximum leaves of it. */
INLINE void NAME(join)(float *all, float old, const float *more, float part) {
    for (int d = 0; d < DVP; d += VW) v_store(all + d, v_fma(v_load(all + d), v_splat(old), v_load(more + d) * v_splat(part)));
}

