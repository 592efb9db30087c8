/* Attention forward: ragged sequences, grouped heads, online softmax over tiles of keys, dense or over pages.
 *
 * Enters: values.cu, tile.cu, heads.cu; BLOCK; of a kernel's own, as constants
 *   HEADS KV_HEADS D DV        sizes, KV_HEADS divides HEADS; D_UP and DV_UP: up to whole eights and fours
 *   ROWS QUERIES PART_HEADS HEAD_PARTS   rows of a tile: queries times heads that share a key head; parts of the heads of a group
 *   DOWN ACROSS MINE KEYS_MINE V_MINE    threads in groups by rows, threads of a group; rows, keys and values of a thread
 *   KEYS DEPTH V_KEYS STAGE    keys of a tile; elements of a key, and values, that are staged at a time; floats that this takes
 *   Q_LINE K_LINE P_LINE PART  floats from one line to the next, of what a split leaves: DV sums, the greatest score, the sum of weights
 *   UNITS MOST_SPLITS          units that keep the device busy; most units that share the keys of a query, where others do not
 *   SCALE SOFTCAP CAUSAL WINDOW  SOFTCAP 0: none; WINDOW 0: none
 *   PAGE TABLE_PAGES           key j of a sequence lies in row table[j / PAGE] * PAGE + j % PAGE; PAGE 0: keys are the queries' rows
 *   CODES                      1 where keys and values are codes, with a scale for each head of a row
 *   Q_FOUR K_FOUR V_FOUR       1 where neighbours of a head come four at once
 * and q_of k_of v_of o_of sink_of, types of elements. Leaves: attention_in, attention_splits, attention_task_of, attention_score,
 * attention_close, attention_unit, attention_join.
 *
 * A row's keys are joined tile by tile, ascending, and splits in order, hence the bits depend on the number of splits alone, which follows
 * from the slots of a run. A key that a row does not see leaves its sums untouched. A query that sees no key gets 0 and log-sum-exp
 * -infinity.
 */
struct attention_in {
    heads_at<q_of> q;
    heads_at<k_of> k;
    heads_at<v_of> v;
    heads_at<f32_of> k_scales, v_scales; /* of codes */
    const int32_t *starts;
    index_t sequences;
    const int32_t *tables, *lens;       /* of pages, or null */
    const sink_of::type *sinks;  /* or null */
    o_of::type *o;
    float *lse;                         /* or null */
};

/* Shared memory, in floats. */
struct attention_room {
    float *q, *stage, *p, *scale;
    int32_t *rows;
};

/* Units that share the keys of a query. */
METHOD int attention_splits(index_t slots) {
    const index_t units = slots * (KV_HEADS * HEAD_PARTS), splits = units > 0 ? (UNITS + units - 1) / units : 1;
    return splits < MOST_SPLITS ? (int)splits : MOST_SPLITS;
}

METHOD attention_room attention_rooms(float *at) {
    attention_room r;
    r.q = at, at += ROWS * Q_LINE;
    r.stage = at, at += STAGE;
    r.p = at, at += ROWS * P_LINE;
    r.scale = at, at += 3 * ROWS; /* what is left of the sums so far; the greatest score; the sum of weights */
    r.rows = (int32_t *)at;
    return r;
}

METHOD float attention_score(float dot) {
    float s = dot * SCALE;
    return SOFTCAP > 0 ? SOFTCAP * m_tanh(s / (SOFTCAP > 0 ? SOFTCAP : 1.0f)) : s;
}

/* What the sums of a row are multiplied by in the end; writes its log-sum-exp. */
METHOD float attention_close(const attention_in &in, index_t result, int head, float top, float sum, bool writes) {
    float keep = 1.0f;
    if (in.sinks) {
        const float sink = sink_of::number(in.sinks[head]), most = sink > top ? sink : top;
        keep = m_exp(top - most);
        sum = FMA(sum, keep, m_exp(sink - most)), top = most;
    }
    if (in.lse && writes) in.lse[result] = top + m_log(sum);
    return sum == 0.0f ? 0.0f : keep / sum;
}

/* Adds `some` staged values, from the tile's j0-th on, to the sums of the rows that see their keys, each times its weight. */
template <class Sees>
METHOD void attention_blend(const attention_in &in, const attention_room &room, int rows, int key_head, int key0, int j0, int some,
                            float (&sums)[MINE][V_MINE], const Sees &sees) {
    const int tx = (int)threadIdx.x % ACROSS, ty = (int)threadIdx.x / ACROSS;
    for (int j = 0; j < some; j++) {
        const float scale = CODES ? *in.v_scales.of(room.rows[j0 + j], key_head) : 1.0f;
        float v[V_MINE];
#pragma unroll
        for (int c = 0; c < V_MINE; c++) v[c] = tx + c * ACROSS < DV ? room.stage[j * DV_UP + tx + c * ACROSS] : 0.0f;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            if (i * DOWN >= rows) break;
            const int r = ty + i * DOWN;
            const float weight = room.p[r * P_LINE + j0 + j], p = CODES ? weight * scale : weight;
            if (!sees(r, key0 + j0 + j)) continue;
#pragma unroll
            for (int c = 0; c < V_MINE; c++) sums[i][c] = FMA(p, v[c], sums[i][c]);
        }
    }
}

/* What a unit computes: rows of a slot, a key head or a part of its heads, a split of the keys. */
struct attention_task {
    index_t sequence;
    int start, query0, queries, key_head, first_head, heads;
    int rows;      /* queries times heads; 0: nothing */
    int position0; /* of the first query */
    int see0; /* the first key that any row sees */
    int split, from, to; /* keys of the split, by whole tiles */
    METHOD int head_of(int r) const { return key_head * GROUP + first_head + r % heads; }
};

/* The task of a unit; splits have whole tiles of so many keys, counted from the first key of the sequence. */
METHOD attention_task attention_task_of(const attention_in &in, index_t unit, index_t slots, int splits, int tile) {
    attention_task t;
    const int head_part = (int)(unit % (KV_HEADS * HEAD_PARTS));
    t.split = (int)(unit / (KV_HEADS * HEAD_PARTS) % splits);
    /* Later slots have more keys: they come first. */
    const index_t slot = slots - 1 - unit / (KV_HEADS * HEAD_PARTS) / splits;
    t.sequence = slot_of(in.starts, in.sequences, slot, QUERIES);
    t.start = in.starts[t.sequence];
    const int length = in.starts[t.sequence + 1] - t.start;
    t.query0 = (int)((slot - t.start / QUERIES - t.sequence) * QUERIES);
    t.queries = length - t.query0 < QUERIES ? length - t.query0 : QUERIES;
    t.key_head = head_part / HEAD_PARTS, t.first_head = head_part % HEAD_PARTS * PART_HEADS;
    t.heads = GROUP - t.first_head < PART_HEADS ? GROUP - t.first_head : PART_HEADS;
    t.rows = t.queries > 0 ? t.queries * t.heads : 0;
    const int keys = PAGE > 0 ? in.lens[t.sequence] : length;
    t.position0 = keys - length + t.query0;
    t.see0 = WINDOW > 0 && t.position0 - WINDOW + 1 > 0 ? t.position0 - WINDOW + 1 : 0;
    const int see1 = CAUSAL && t.position0 + t.queries < keys ? t.position0 + t.queries : keys;
    const int tile0 = t.see0 / tile, tiles = (see1 + tile - 1) / tile - tile0, each = (tiles + splits - 1) / splits;
    const int end = (tile0 + (t.split + 1) * each) * tile;
    t.from = (tile0 + t.split * each) * tile, t.to = end < see1 ? end : see1;
    return t;
}

/* One unit. `part`: where sums of splits wait. */
METHOD void attention_unit(const attention_in &in, index_t unit, index_t slots, int splits, float *part, float *shared) {
    const attention_room room = attention_rooms(shared);
    const attention_task task = attention_task_of(in, unit, slots, splits, KEYS);
    const int start = task.start, query0 = task.query0, queries = task.queries, key_head = task.key_head, heads = task.heads;
    const int rows = task.rows, position0 = task.position0, split = task.split, from = task.from, to = task.to;
    const index_t sequence = task.sequence;
    if (rows == 0) return;

    const auto head_of = [&](int r) { return task.head_of(r); };
    const auto query_at = [&](int r) { return in.q.of(start + query0 + r / heads, head_of(r)); };
    __syncthreads(); /* the last unit's memory is read */
    heads_stage<q_of, Q_FOUR, D_UP>(room.q, Q_LINE, 0, D, rows, ROWS, query_at);
    for (int r = (int)threadIdx.x; r < ROWS; r += BLOCK) room.scale[ROWS + r] = -INF_F, room.scale[2 * ROWS + r] = 0.0f;

    const int tx = (int)threadIdx.x % ACROSS, ty = (int)threadIdx.x / ACROSS, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float sums[MINE][V_MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++)
#pragma unroll
        for (int c = 0; c < V_MINE; c++) sums[i][c] = 0.0f;
    for (int key0 = from; key0 < to; key0 += KEYS) {
        const int count = to - key0 < KEYS ? to - key0 : KEYS;
        for (int j = (int)threadIdx.x; j < count; j += BLOCK) {
            if (PAGE > 0)
                room.rows[j] = in.tables[sequence * TABLE_PAGES + (key0 + j) / (PAGE > 0 ? PAGE : 1)] * PAGE + (key0 + j) % (PAGE > 0 ? PAGE : 1);
            else
                room.rows[j] = start + key0 + j;
        }
        float scores[MINE][KEYS_MINE];
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
            for (int j = 0; j < KEYS_MINE; j++) scores[i][j] = 0.0f;
        const auto key_at = [&](int j) { return in.k.of(room.rows[j], key_head); };
        for (int d0 = 0; d0 < D; d0 += DEPTH) {
            __syncthreads();
            heads_stage<k_of, K_FOUR, DEPTH>(room.stage, K_LINE, d0, D, count, KEYS, key_at);
            __syncthreads();
            const int depth = D_UP - d0 < DEPTH ? D_UP - d0 : DEPTH;
#pragma unroll 1
            for (int d = 0; d < depth; d += 4) {
                quad k[KEYS_MINE];
#pragma unroll
                for (int j = 0; j < KEYS_MINE; j++) k[j] = *(const quad *)(room.stage + (tx + j * ACROSS) * K_LINE + d);
#pragma unroll
                for (int i = 0; i < MINE; i++) {
                    if (i * DOWN >= rows) break;
                    quad q = *(const quad *)(room.q + (ty + i * DOWN) * Q_LINE + d0 + d);
#pragma unroll
                    for (int j = 0; j < KEYS_MINE; j++)
                        scores[i][j] = FMA(q.w, k[j].w, FMA(q.z, k[j].z, FMA(q.y, k[j].y, FMA(q.x, k[j].x, scores[i][j]))));
                }
            }
        }
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
            for (int j = 0; j < KEYS_MINE; j++) {
                const int r = ty + i * DOWN, key = key0 + tx + j * ACROSS, position = position0 + r / heads;
                const bool seen = key < to && (!CAUSAL || key <= position) && (WINDOW == 0 || position - key < WINDOW);
                float score = scores[i][j];
                if (CODES && seen) score *= *in.k_scales.of(room.rows[tx + j * ACROSS], key_head);
                room.p[r * P_LINE + tx + j * ACROSS] = seen ? attention_score(score) : -INF_F;
            }
        __syncthreads();
        for (int r = warp; r < rows; r += BLOCK / 32) {
            float top = -INF_F, sum = 0.0f;
            for (int j = lane; j < KEYS; j += 32) top = room.p[r * P_LINE + j] > top ? room.p[r * P_LINE + j] : top;
            const float before = room.scale[ROWS + r];
            top = warp_max(top), top = before > top ? before : top;
            for (int j = lane; j < KEYS; j += 32) {
                const float s = room.p[r * P_LINE + j], p = s == -INF_F ? 0.0f : m_exp(s - top);
                room.p[r * P_LINE + j] = p, sum += p;
            }
            sum = warp_sum(sum);
            const float left = before == -INF_F ? 0.0f : m_exp(before - top);
            __syncwarp(); /* the greatest score so far is read */
            if (lane == 0) room.scale[r] = left, room.scale[ROWS + r] = top, room.scale[2 * ROWS + r] = FMA(room.scale[2 * ROWS + r], left, sum);
        }
        __syncthreads();
        const int sees_all = CAUSAL ? position0 : to - 1, sees_from = WINDOW > 0 ? position0 + queries - WINDOW : 0;
        const bool whole = key0 + count - 1 <= sees_all && key0 >= sees_from;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float left = ty + i * DOWN < rows ? room.scale[ty + i * DOWN] : 0.0f;
#pragma unroll
            for (int c = 0; c < V_MINE; c++) sums[i][c] *= left;
        }
        for (int j0 = 0; j0 < count; j0 += V_KEYS) {
            const int some = count - j0 < V_KEYS ? count - j0 : V_KEYS;
            const auto value_at = [&](int j) { return in.v.of(room.rows[j0 + j], key_head); };
            heads_stage<v_of, V_FOUR, DV_UP>(room.stage, DV_UP, 0, DV, some, V_KEYS, value_at);
            __syncthreads();
            if (whole) {
                attention_blend(in, room, rows, key_head, key0, j0, some, sums, [](int, int) { return true; });
            } else {
                attention_blend(in, room, rows, key_head, key0, j0, some, sums, [&](int r, int key) {
                    const int position = position0 + r / heads;
                    return (!CAUSAL || key <= position) && (WINDOW == 0 || position - key < WINDOW);
                });
            }
            __syncthreads();
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int r = ty + i * DOWN;
        if (r >= rows) continue;
        const index_t result = (index_t)(start + query0 + r / heads) * HEADS + head_of(r);
        float top = room.scale[ROWS + r], sum = room.scale[2 * ROWS + r];
        if (MOST_SPLITS > 1 && splits > 1) {
            float *const mine = part + (result * splits + split) * PART;
            for (int c = 0; c < V_MINE; c++)
                if (tx + c * ACROSS < DV) mine[tx + c * ACROSS] = sums[i][c];
            if (tx == 0) mine[DV] = top, mine[DV + 1] = sum;
            continue;
        }
        const float keep = attention_close(in, result, head_of(r), top, sum, tx == 0);
#pragma unroll
        for (int c = 0; c < V_MINE; c++)
            if (tx + c * ACROSS < DV) in.o[result * DV + tx + c * ACROSS] = o_of::element(sums[i][c] * keep);
    }
}

/* One row of the result from what its splits left: a thread reads what one of them says of itself, for all. */
METHOD void attention_join(const attention_in &in, index_t result, int splits, const float *part) {
    /* Whole pieces of 16 bytes: the assembler reads as many at once, also what lies behind the last. */
    enum { ROOM = (MOST_SPLITS + 3) / 4 * 4 };
    __shared__ float tops[ROOM], weights[ROOM], totals[ROOM];
    const float *const mine = part + result * splits * PART;
    __syncthreads(); /* the last row's are read */
    for (int s = (int)threadIdx.x; s < splits; s += BLOCK) tops[s] = mine[s * PART + DV], totals[s] = mine[s * PART + DV + 1];
    __syncthreads();
    float top = -INF_F, sum = 0.0f;
    for (int s = 0; s < splits; s++) top = tops[s] > top ? tops[s] : top;
    /* A split without keys has nothing to read. */
    for (int s = (int)threadIdx.x; s < splits; s += BLOCK) weights[s] = tops[s] == -INF_F ? 0.0f : m_exp(tops[s] - top);
    __syncthreads();
    for (int s = 0; s < splits; s++) sum = FMA(totals[s], weights[s], sum);
    const float keep = attention_close(in, result, (int)(result % HEADS), top, sum, threadIdx.x == 0);
    for (int d = (int)threadIdx.x; d < DV; d += BLOCK) {
        float x = 0.0f;
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            const float some = mine[s * PART + d];
            if (tops[s] != -INF_F) x = FMA(some, weights[s], x);
        }
        in.o[result * DV + d] = o_of::element(x * keep);
    }
}
