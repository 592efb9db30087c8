/* What attention forward runs: units of queries and keys, then, where the keys of few queries were shared by several units
 * (flash-decoding: split-K over the keys), the joining of the chunks that were units of their own. Comes after
 * attention.c and its ways, and takes all names of theirs back.
 */

/* A tile of keys for all rows of a unit, by vectors. Rows of one key head go some after others, whose scores then rest in the first-level
 * cache; of several heads all together. */
static void NAME(tile)(const struct NAME(unit) *u, struct NAME(state) *t, void *const *bufs, int j0) {
    int rows = u->groups * u->rows, count = u->to - j0 < ATTN_KEYS ? u->to - j0 : ATTN_KEYS;
#if KV_CODES
    int64_t at[ATTN_KEYS];
    NAME(rows)(u, j0, at);
#endif
    for (int first = 0, end; first < rows; first = end) {
        end = u->groups == 1 && rows - first > ATTN_BLOCK ? first + ATTN_BLOCK : rows;
        for (int g = 0; g < u->groups; g++) {
            if (first == 0) {
#if KV_CODES
                NAME(scales)(t->k_scales, u->k_scales + g * (int64_t)KS_HEAD, KS_ROW, at);
#endif
                NAME(pack_k)(u, t, bufs[K_BUF], j0, count, g);
            }
            NAME(scores)(t, first + g * u->rows, u->groups == 1 ? end : (g + 1) * u->rows, j0);
        }
        for (int r = first; r < end; r += VW) NAME(online_softmax)(t, r, end - r);
        for (int g = 0; g < u->groups; g++) {
            int r = first + g * u->rows, r_end = u->groups == 1 ? end : r + u->rows;
            if (first == 0) {
#if KV_CODES
                NAME(scales)(t->v_scales, u->v_scales + g * (int64_t)VS_HEAD, VS_ROW, at);
#endif
                NAME(pack_v)(u, t, bufs[V_BUF], j0, count, g);
            }
#if KV_CODES
            NAME(scale_weights)(t, r, r_end);
#endif
            NAME(add_values)(t, r, r_end);
        }
    }
}

static void NAME(by_rows)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(state) t;
    struct NAME(unit) two[2], *u = &two[0], *then = &two[1], *spare;
    struct NAME(walk) walk = {begin, end, NAME(splits)(dims), 0, NAME(whole)(dims) == SHARED};
#if ONE_QUERY
    struct NAME(fetch) fetch = {.all_k = (const K_T *)bufs[K_BUF] + K_OFF, .all_v = (const V_T *)bufs[V_BUF] + V_OFF};
#endif
    for (int is = NAME(next)(u, &walk, bufs, dims), more; is; spare = u, u = then, then = spare, is = more) {
        more = NAME(next)(then, &walk, bufs, dims);
        int rows = u->groups * u->rows;
        NAME(begin)(u, &t, bufs[Q_BUF]);
        if (u->from >= u->to) NAME(clear)(u, t.all);
#if ONE_QUERY
        if (u->queries == 1 && u->from < u->to) {
            if (fetch.u != u) fetch.u = u, NAME(fetch_tile)(&fetch, u->from);
            fetch.then = more && then->queries == 1 && then->from < then->to ? then : 0;
        }
#endif
        for (int j0 = u->from, end; j0 < u->to; j0 = end) {
            end = attn_chunk_end(j0) < u->to ? attn_chunk_end(j0) : u->to;
            NAME(clear)(u, t.now);
#if ONE_QUERY
            if (u->queries == 1)
                NAME(one)(u, &t, bufs, j0, end, &fetch);
            else
#endif
                for (int j = j0; j < end; j += ATTN_KEYS) NAME(tile)(u, &t, bufs, j);
            struct NAME(sums) *now = t.now;
#if PAIRED_VALUES
            NAME(total)(now, rows);
#endif
            for (int r = 0; u->parts > 1 && r < rows; r++) NAME(keep)(u, r, j0, now->max[r], now->sum[r], now->o[r], scratch);
            if (j0 == u->from) t.now = t.all, t.all = now;
            else if (u->parts == 1) NAME(rows_join)(u, &t, j0, end);
        }
        for (int r = 0; u->parts == 1 && r < rows; r++)
            NAME(write)(u, r, t.all->max[r] * ROWS_MAX, t.all->sum[r], t.all->o[r], bufs);
    }
}

int64_t NAME(units0)(const int64_t *dims) {
    return NAME(whole)(dims) == SHARED ? THREADS : NAME(slots)(dims) * KV_HEADS * HEAD_CHUNKS * NAME(splits)(dims);
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
#if ATTN_TILED
    if (dot_amx) {
        NAME(by_tiles)(bufs, dims, scratch, begin, end);
        return;
    }
#endif
    NAME(by_rows)(bufs, dims, scratch, begin, end);
}

#if defined(PAGES_BUF)
/* What a greater maximum leaves of sums, and the natural logarithm that a maximum's unit is. */
INLINE float NAME(leaves)(float max, float next) {
#if ATTN_TILED
    if (dot_amx) return NAME(tile_left)(v_splat(max), v_splat(next))[0];
#endif
    return NAME(left)(max, next);
}

INLINE float NAME(natural)(float max) {
#if ATTN_TILED
    if (dot_amx) return max * TILE_MAX;
#endif
    return max * ROWS_MAX;
}

int64_t NAME(units1)(const int64_t *dims) {
    if (NAME(whole)(dims) == SHARED) return CHUNKS > 1 ? NAME(slots)(dims) : 0;
    return NAME(splits)(dims) > 1 ? NAME(slots)(dims) * KV_HEADS * HEAD_CHUNKS : 0;
}

/* Chunks of rows whose keys were shared are joined in their order, as where one unit has them all. */
void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(unit) u;
    int64_t of_slot = NAME(whole)(dims) == SHARED ? KV_HEADS : 1;
    struct NAME(walk) walk = {begin * of_slot, end * of_slot, 1, 0};
    while (NAME(next)(&u, &walk, bufs, dims)) {
        if (u.queries > 1 || u.from >= u.to || attn_chunk(u.from) == attn_chunk(u.to - 1)) continue;
        for (int r = 0; r < u.groups * u.rows; r++) {
            float o[DVP], max, sum;
            for (int j = u.from; j < u.to; j = attn_chunk_end(j)) {
                const float *part = NAME(part)(&u, r, j, scratch);
                if (j == u.from) {
                    memcpy(o, part, sizeof o), max = part[DVP], sum = part[DVP + 1];
                    continue;
                }
                float next = part[DVP] > max ? part[DVP] : max;
                float old = NAME(leaves)(max, next), more = NAME(leaves)(part[DVP], next);
                max = next;
                sum = FMA(sum, old, part[DVP + 1] * more);
                NAME(join)(o, old, part, more);
            }
            NAME(write)(&u, r, NAME(natural)(max), sum, o, bufs);
        }
    }
}
#endif

#undef ATTN_TILED
#undef ONE_QUERY
#undef PAIRED
#undef PAIRED_VALUES
#undef WORD
#undef SCORES
#undef SPLAT
#undef ADD
#undef WEIGHT
#undef BLEND
#undef PART
#undef TILE_MAX
#undef ROWS_MAX
#undef RAISE
#undef FACTOR
#undef GROUP
#undef WIDE
#undef ROWS
#undef HEAD_CHUNKS
#undef GROUP_HEADS
#undef TILE_QUERIES
#undef MERGES
#undef MERGE
#undef RUN
#undef SHARED
#undef ONE_NV
#undef DP
#undef DVP
