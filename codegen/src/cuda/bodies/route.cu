/* The choice of experts for each token, and the lists that products by groups need.
 *
 * Enters: BLOCK; as constants EXPERTS CHOSEN, WARPS (tokens that a block chooses for at once), SIGMOID SOFTMAX_ALL (what scores
 * are; neither: the logits, and softmax of the chosen ones), BY_LOGITS (scores rank as logits do), GROUPS GROUPS_KEPT BEST_TWO
 * (GROUPS 0: none; only experts of the best groups, ranked by their best or the sum of two), NORMALISE, FACTOR.
 * Leaves: route_token, a token a warp; route_sort, an expert a block.
 *
 * Sums are joined in a tree of lanes. NaN ranks above every number, ties go to the lower expert.
 */
METHOD bool route_above(float a, float b) { return a > b || (a != a && b == b); }

/* The best of `count` numbers that are not taken, the lower of equals; a warp together. */
METHOD int route_best(const float *by, const uint8_t *taken, int count) {
    int best = -1;
    float most = 0.0f;
    for (int e = (int)threadIdx.x % 32; e < count; e += 32)
        if (!taken[e] && (best < 0 || route_above(by[e], most))) best = e, most = by[e];
    for (int half = 16; half; half /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, best, half);
        const float x = __shfl_xor_sync(0xffffffffu, most, half);
        const bool tie = !route_above(x, most) && !route_above(most, x);
        if (other >= 0 && (best < 0 || route_above(x, most) || (tie && other < best))) best = other, most = x;
    }
    return best;
}

/* e^(x - max) over their sum, in place; a warp together. */
METHOD void route_softmax(float *x, int count) {
    float top = -INF_F, sum = 0.0f;
    for (int e = (int)threadIdx.x % 32; e < count; e += 32) top = x[e] > top ? x[e] : top;
    top = warp_max(top);
    for (int e = (int)threadIdx.x % 32; e < count; e += 32) {
        const float p = m_exp(x[e] - top);
        x[e] = p, sum += p;
    }
    sum = warp_sum(sum);
    for (int e = (int)threadIdx.x % 32; e < count; e += 32) x[e] /= sum;
    __syncwarp();
}

/* Marks the experts of all but the best groups as taken; `group` has room for a score of each. */
METHOD void route_limit(const float *by, uint8_t *taken, float *group, uint8_t *kept) {
    enum { groups = GROUPS > 0 ? GROUPS : 1, size = EXPERTS / groups };
    for (int g = (int)threadIdx.x % 32; g < groups; g += 32) {
        const float *const of = by + g * size;
        int first = 0, second = -1;
        for (int i = 1; i < size; i++) {
            if (route_above(of[i], of[first])) second = first, first = i;
            else if (second < 0 || route_above(of[i], of[second])) second = i;
        }
        group[g] = BEST_TWO ? of[first] + of[second < 0 ? first : second] : of[first];
        kept[g] = 0;
    }
    __syncwarp();
    for (int n = 0; n < GROUPS_KEPT; n++) {
        const int best = route_best(group, kept, groups);
        __syncwarp();
        if (threadIdx.x % 32 == 0) kept[best] = 1;
        __syncwarp();
    }
    for (int e = (int)threadIdx.x % 32; e < EXPERTS; e += 32) taken[e] = !kept[e / size];
    __syncwarp();
}

/* Chooses for token t; `room` is a warp's: scores, what ranks them, scores of groups, weights, then marks of experts and groups. */
METHOD void route_token(const float *logits, const float *correction, index_t t, int32_t *choice, int32_t *chosen, float *weights, float *room) {
    float *const scores = room, *const by = scores + EXPERTS, *const group = by + EXPERTS, *const mine = group + (GROUPS > 0 ? GROUPS : 1);
    uint8_t *const taken = (uint8_t *)(mine + CHOSEN), *const kept = taken + EXPERTS;
    const int lane = (int)threadIdx.x % 32;
    __syncwarp(); /* the last token's are read */
    for (int e = lane; e < EXPERTS; e += 32) {
        const float x = logits[t * EXPERTS + e];
        scores[e] = SIGMOID ? m_sigmoid(x) : x, taken[e] = 0;
    }
    __syncwarp();
    if (SOFTMAX_ALL) route_softmax(scores, EXPERTS);
    for (int e = lane; e < EXPERTS; e += 32)
        by[e] = BY_LOGITS ? logits[t * EXPERTS + e] : correction ? scores[e] + correction[e] : scores[e];
    __syncwarp();
    if (GROUPS > 0) route_limit(by, taken, group, kept);
    for (int n = 0; n < CHOSEN; n++) {
        const int best = route_best(by, taken, EXPERTS);
        __syncwarp();
        if (lane == 0) {
            taken[best] = 1, mine[n] = scores[best], chosen[t * CHOSEN + n] = best;
            if (choice) choice[t * CHOSEN + n] = best;
        }
        __syncwarp();
    }
    if (!SOFTMAX_ALL && !SIGMOID) route_softmax(mine, CHOSEN);
    float sum = 0.0f;
    for (int n = 0; n < CHOSEN; n++) sum += mine[n];
    for (int n = lane; weights && n < CHOSEN; n += 32) weights[t * CHOSEN + n] = (NORMALISE ? mine[n] / (sum + 1e-20f) : mine[n]) * FACTOR;
}

/* Where expert e's slots begin, and these in order: it counts the slots of lower experts, then lists its own. */
METHOD void route_sort(const int32_t *chosen, index_t count, int e, int32_t *slots, int32_t *places, int32_t *offsets, int32_t *found, int32_t *counts) {
    int64_t lower = 0;
    for (index_t s = threadIdx.x; s < count; s += BLOCK) lower += chosen[s] < e;
    index_t place = (index_t)block_sum(lower);
    if (offsets && threadIdx.x == 0) {
        offsets[e] = (int32_t)place;
        if (e == EXPERTS - 1) offsets[EXPERTS] = (int32_t)count;
    }
    for (index_t first = 0; first < count; first += BLOCK) {
        const index_t s = first + threadIdx.x;
        const int all = block_list(s < count && chosen[s] == e, s, found, counts);
        for (int i = (int)threadIdx.x; i < all; i += BLOCK) {
            if (slots) slots[place + i] = found[i];
            if (places) places[found[i]] = (int32_t)(place + i);
        }
        place += all;
        __syncthreads();
    }
}
