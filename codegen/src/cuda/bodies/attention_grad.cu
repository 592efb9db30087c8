/* Gradient of attention: scores are made again tile by tile and never stored.
 *
 * Enters: values.cu, tile.cu, heads.cu; BLOCK; as constants what attention.cu has but pages, splits and PART, of ROWS a tile by
 * KEYS of what it walks; G_LINE, and W_UP, the wider of D_UP and DV_UP; q_of k_of v_of o_of g_of sink_of dq_of dk_of dv_of dsink_of,
 * types of elements. Leaves: gradient_delta, gradient_unit, gradient_sink.
 *
 * With p = exp(s - lse), delta = sum(g o): dv = pT g, ds = p (g vT - delta) slope SCALE, dq = ds k, dk = dsT q. Units of queries
 * walk the keys, units of keys the queries of all heads that share them: no two blocks add to one sum, so that the bits depend on
 * neither their order nor their number. What a query does not see has weight 0.
 */
struct gradient_in {
    heads_at<q_of> q;
    heads_at<k_of> k;
    heads_at<v_of> v;
    heads_at<o_of> o;
    heads_at<g_of> g;
    const float *lse;
    const int32_t *starts;
    index_t tokens, sequences;
    float *delta;
};

/* One number a row: sum(g o). A warp has a row. */
METHOD void gradient_delta(const gradient_in &in, index_t unit) {
    const index_t row = unit * (BLOCK / 32) + threadIdx.x / 32;
    if (row >= in.tokens * HEADS) return;
    const g_of::type *const g = in.g.of(row / HEADS, row % HEADS);
    const o_of::type *const o = in.o.of(row / HEADS, row % HEADS);
    float sum = 0.0f;
    for (int d = (int)threadIdx.x % 32; d < DV; d += 32) sum = FMA(g_of::number(g[d]), o_of::number(o[d]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) in.delta[row] = sum;
}

/* The rows of a unit and what they walk: queries and keys, or the other way round. */
struct gradient_span {
    int start;            /* token of the sequence's first */
    int row0, rows;       /* query or key of row 0, rows */
    int walk0, walks;     /* of what is walked */
    int key_head, head0, heads; /* heads of a query among the rows, or among what is walked */
};

/* Sums of a tile of shared memory: mine[i][c] += by[r][j] * staged[j][c]. */
template <int N> METHOD void gradient_blend(float (&sums)[MINE][N], const float *by, const float *staged, int some, int width) {
    const int tx = (int)threadIdx.x % ACROSS, ty = (int)threadIdx.x / ACROSS;
    for (int j = 0; j < some; j++) {
        float x[N];
#pragma unroll
        for (int c = 0; c < N; c++) x[c] = tx + c * ACROSS < width ? staged[j * width + tx + c * ACROSS] : 0.0f;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float p = by[(ty + i * DOWN) * P_LINE + j];
#pragma unroll
            for (int c = 0; c < N; c++) sums[i][c] = FMA(p, x[c], sums[i][c]);
        }
    }
}

/* Products of the rows' lines with those that are walked, DEPTH elements at a time. */
template <class Element, bool FOUR, class Line>
METHOD void gradient_products(float (&out)[MINE][KEYS_MINE], const float *rows, int length, int size, float *stage, int count, const Line &line) {
    const int tx = (int)threadIdx.x % ACROSS, ty = (int)threadIdx.x / ACROSS, up = (size + 7) / 8 * 8;
#pragma unroll
    for (int i = 0; i < MINE; i++)
#pragma unroll
        for (int j = 0; j < KEYS_MINE; j++) out[i][j] = 0.0f;
    for (int d0 = 0; d0 < size; d0 += DEPTH) {
        __syncthreads();
        heads_stage<Element, FOUR, DEPTH>(stage, K_LINE, d0, size, count, KEYS, line);
        __syncthreads();
        const int depth = up - d0 < DEPTH ? up - d0 : DEPTH;
#pragma unroll 1
        for (int d = 0; d < depth; d += 4) {
            quad y[KEYS_MINE];
#pragma unroll
            for (int j = 0; j < KEYS_MINE; j++) y[j] = *(const quad *)(stage + (tx + j * ACROSS) * K_LINE + d);
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                const quad x = *(const quad *)(rows + (ty + i * DOWN) * length + d0 + d);
#pragma unroll
                for (int j = 0; j < KEYS_MINE; j++)
                    out[i][j] = FMA(x.w, y[j].w, FMA(x.z, y[j].z, FMA(x.y, y[j].y, FMA(x.x, y[j].x, out[i][j]))));
            }
        }
    }
}

/* OF_KEYS: the rows are keys, whose dk and dv this makes of the queries that see them; else queries, whose dq. */
template <bool OF_KEYS>
METHOD void gradient_unit(const gradient_in &in, const gradient_span &u, dq_of::type *dq, dk_of::type *dk, dv_of::type *dv, float *shared) {
    float *const a = shared, *const b = a + ROWS * Q_LINE, *const stage = b + ROWS * G_LINE;
    float *const weights = stage + STAGE, *const slopes = weights + ROWS * P_LINE, *const numbers = slopes + ROWS * P_LINE;
    const int tx = (int)threadIdx.x % ACROSS, ty = (int)threadIdx.x / ACROSS;
    /* The token and the head of a row, or of what is walked: queries count their heads. */
    const auto query_of = [&](int first, int i) { return first + i / u.heads; };
    const auto head_of = [&](int i) { return u.key_head * GROUP + u.head0 + i % u.heads; };
    const auto row_query = [&](int r) { return u.start + query_of(u.row0, r); };
    __syncthreads(); /* the last unit's memory is read */
    if (OF_KEYS) {
        heads_stage<k_of, K_FOUR, D_UP>(a, Q_LINE, 0, D, u.rows, ROWS, [&](int r) { return in.k.of(u.start + u.row0 + r, u.key_head); });
        heads_stage<v_of, V_FOUR, DV_UP>(b, G_LINE, 0, DV, u.rows, ROWS, [&](int r) { return in.v.of(u.start + u.row0 + r, u.key_head); });
    } else {
        heads_stage<q_of, Q_FOUR, D_UP>(a, Q_LINE, 0, D, u.rows, ROWS, [&](int r) { return in.q.of(row_query(r), head_of(r)); });
        heads_stage<g_of, G_FOUR, DV_UP>(b, G_LINE, 0, DV, u.rows, ROWS, [&](int r) { return in.g.of(row_query(r), head_of(r)); });
        for (int r = (int)threadIdx.x; r < u.rows; r += BLOCK) {
            const index_t at = (index_t)row_query(r) * HEADS + head_of(r);
            numbers[r] = in.lse[at], numbers[KEYS + r] = in.delta[at];
        }
    }
    float first[MINE][D_MINE], second[MINE][V_MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
#pragma unroll
        for (int c = 0; c < D_MINE; c++) first[i][c] = 0.0f;
#pragma unroll
        for (int c = 0; c < V_MINE; c++) second[i][c] = 0.0f;
    }
    for (int w0 = 0; w0 < u.walks; w0 += KEYS) {
        const int count = u.walks - w0 < KEYS ? u.walks - w0 : KEYS;
        const auto key_at = [&](int j) { return in.k.of(u.start + u.walk0 + w0 + j, u.key_head); };
        const auto value_at = [&](int j) { return in.v.of(u.start + u.walk0 + w0 + j, u.key_head); };
        const auto query_at = [&](int j) { return in.q.of(u.start + query_of(u.walk0, w0 + j), head_of(w0 + j)); };
        const auto slope_at = [&](int j) { return in.g.of(u.start + query_of(u.walk0, w0 + j), head_of(w0 + j)); };
        float scores[MINE][KEYS_MINE], slants[MINE][KEYS_MINE];
        if (OF_KEYS) {
            gradient_products<q_of, Q_FOUR>(scores, a, Q_LINE, D, stage, count, query_at);
            gradient_products<g_of, G_FOUR>(slants, b, G_LINE, DV, stage, count, slope_at);
            for (int j = (int)threadIdx.x; j < count; j += BLOCK) {
                const index_t at = (index_t)(u.start + query_of(u.walk0, w0 + j)) * HEADS + head_of(w0 + j);
                numbers[j] = in.lse[at], numbers[KEYS + j] = in.delta[at];
            }
            __syncthreads();
        } else {
            gradient_products<k_of, K_FOUR>(scores, a, Q_LINE, D, stage, count, key_at);
            gradient_products<v_of, V_FOUR>(slants, b, G_LINE, DV, stage, count, value_at);
        }
#pragma unroll
        for (int i = 0; i < MINE; i++)
#pragma unroll
            for (int j = 0; j < KEYS_MINE; j++) {
                const int r = ty + i * DOWN, w = tx + j * ACROSS, of = OF_KEYS ? w : r;
                const int query = OF_KEYS ? query_of(u.walk0, w0 + w) : query_of(u.row0, r);
                const int key = OF_KEYS ? u.row0 + r : u.walk0 + w0 + w;
                const bool seen = r < u.rows && w < count && (!CAUSAL || key <= query) && (WINDOW == 0 || query - key < WINDOW);
                float p = 0.0f, ds = 0.0f;
                if (seen) {
                    float s = scores[i][j] * SCALE, slope = SCALE;
                    if (SOFTCAP > 0) {
                        const float t = m_tanh(s / (SOFTCAP > 0 ? SOFTCAP : 1.0f));
                        s = SOFTCAP * t, slope *= FMA(-t, t, 1.0f);
                    }
                    p = m_exp(s - numbers[of]), ds = p * (slants[i][j] - numbers[KEYS + of]) * slope;
                }
                slopes[r * P_LINE + w] = ds;
                if (OF_KEYS) weights[r * P_LINE + w] = p;
            }
        __syncthreads();
        for (int j0 = 0; j0 < count; j0 += V_KEYS) {
            const int some = count - j0 < V_KEYS ? count - j0 : V_KEYS;
            if (OF_KEYS)
                heads_stage<q_of, Q_FOUR, D_UP>(stage, D_UP, 0, D, some, V_KEYS, [&](int j) { return query_at(j0 + j); });
            else
                heads_stage<k_of, K_FOUR, D_UP>(stage, D_UP, 0, D, some, V_KEYS, [&](int j) { return key_at(j0 + j); });
            __syncthreads();
            gradient_blend(first, slopes + j0, stage, some, D_UP);
            __syncthreads();
            if (!OF_KEYS) continue;
            heads_stage<g_of, G_FOUR, DV_UP>(stage, DV_UP, 0, DV, some, V_KEYS, [&](int j) { return slope_at(j0 + j); });
            __syncthreads();
            gradient_blend(second, weights + j0, stage, some, DV_UP);
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int r = ty + i * DOWN;
        if (r >= u.rows) continue;
        const index_t key = ((index_t)(u.start + u.row0 + r) * KV_HEADS + u.key_head);
        const index_t query = (index_t)row_query(r) * HEADS + head_of(r);
#pragma unroll
        for (int c = 0; c < D_MINE; c++) {
            const int d = tx + c * ACROSS;
            if (d >= D) continue;
            if (!OF_KEYS) dq[query * D + d] = dq_of::element(first[i][c]);
            else if (dk) dk[key * D + d] = dk_of::element(first[i][c]);
        }
#pragma unroll
        for (int c = 0; OF_KEYS && c < V_MINE; c++)
            if (dv && tx + c * ACROSS < DV) dv[key * DV + tx + c * ACROSS] = dv_of::element(second[i][c]);
    }
}

/* dq of some queries' heads that share keys. */
METHOD void gradient_queries(const gradient_in &in, index_t unit, index_t slots, dq_of::type *dq, float *shared) {
    const int part = (int)(unit % (KV_HEADS * HEAD_PARTS));
    const index_t slot = slots - 1 - unit / (KV_HEADS * HEAD_PARTS), sequence = slot_of(in.starts, in.sequences, slot, QUERIES);
    gradient_span u;
    u.start = in.starts[sequence];
    const int length = in.starts[sequence + 1] - u.start;
    u.row0 = (int)((slot - u.start / QUERIES - sequence) * QUERIES);
    if (u.row0 >= length) return;
    const int queries = length - u.row0 < QUERIES ? length - u.row0 : QUERIES;
    u.key_head = part / HEAD_PARTS, u.head0 = part % HEAD_PARTS * PART_HEADS;
    u.heads = GROUP - u.head0 < PART_HEADS ? GROUP - u.head0 : PART_HEADS, u.rows = queries * u.heads;
    u.walk0 = WINDOW > 0 && u.row0 - WINDOW + 1 > 0 ? u.row0 - WINDOW + 1 : 0;
    u.walks = (CAUSAL && u.row0 + queries < length ? u.row0 + queries : length) - u.walk0;
    gradient_unit<false>(in, u, dq, nullptr, nullptr, shared);
}

/* dk and dv of some keys of a head. */
METHOD void gradient_keys(const gradient_in &in, index_t unit, dk_of::type *dk, dv_of::type *dv, float *shared) {
    const index_t slot = unit / KV_HEADS, sequence = slot_of(in.starts, in.sequences, slot, ROWS);
    gradient_span u;
    u.start = in.starts[sequence];
    const int length = in.starts[sequence + 1] - u.start;
    u.row0 = (int)((slot - u.start / ROWS - sequence) * ROWS);
    if (u.row0 >= length) return;
    u.rows = length - u.row0 < ROWS ? length - u.row0 : ROWS;
    u.key_head = (int)(unit % KV_HEADS), u.head0 = 0, u.heads = GROUP;
    u.walk0 = CAUSAL ? u.row0 : 0;
    const int last = u.row0 + u.rows - 1 + WINDOW;
    u.walks = ((WINDOW > 0 && last < length ? last : length) - u.walk0) * GROUP;
    gradient_unit<true>(in, u, nullptr, dk, dv, shared);
}

/* The cotangent of a head's sink. */
METHOD void gradient_sink(const gradient_in &in, int head, const sink_of::type *sinks, dsink_of::type *to) {
    const float sink = sink_of::number(sinks[head]);
    float sum = 0.0f;
    for (index_t t = threadIdx.x; t < in.tokens; t += BLOCK)
        sum = FMA(m_exp(sink - in.lse[t * HEADS + head]), in.delta[t * HEADS + head], sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) to[head] = dsink_of::element(-sum);
}
