/* A token for each row of logits, as `Sample` in the graph's operators means it: the same arithmetic, and the same order where order matters.
 *
 * Enters: BLOCK, 256; as constants VOCABULARY; LOGITS and BLOCKS, the logits of a block of a row and its blocks, of which BLOCK / LANES make one
 * of its PARTS; LANES, DRAWS, REALS, INTEGERS; STEPS, and the numbers of the exponential.
 * Leaves: sample_maxima, sample_sums, a part of a row a block of threads; sample_row. -1: the row's logits are no distribution.
 *
 * A rank is larger for what is likelier: the bits of the logit, ordered as integers, above those of the id, inverted. Sums are integers, so that
 * threads may add them up in any order. What top-k or top-p keep has a least rank, which is found a byte at a time.
 */
#define METHOD __device__ __forceinline__

struct sample_weights {
    float inverse, shift, floor;
};

METHOD float sample_exp(float x) {
    constexpr float terms[] = {EXP_TERMS};
    const float shifted = FMA(x, LOG2_E, ROUND), n = shifted - ROUND;
    const float r = FMA(n, -LN_2_REST, FMA(n, -LN_2, x));
    float p = terms[0];
    for (int i = 1; i < (int)(sizeof terms / sizeof *terms); i++) p = FMA(r, p, terms[i]);
    const float scaled = bits_f32(f32_bits(p) + (f32_bits(shifted) << 23));
    return x < LEAST ? 0.0f : scaled;
}

METHOD float sample_weight(const sample_weights &w, float x) { return sample_exp(FMA(x, w.inverse, w.shift)); }

METHOD int64_t sample_steps(float weight) { return (int64_t)(weight * STEPS); }

METHOD int64_t sample_part(uint64_t word, int64_t sum) { return (int64_t)__umul64hi(word, (uint64_t)sum); }

METHOD uint64_t sample_rank(float x, int id) {
    const uint32_t bits = f32_bits(x + 0.0f); /* zero has one sign */
    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (uint32_t)~id;
}

METHOD float sample_logit(uint64_t rank) {
    const uint32_t ordered = (uint32_t)(rank >> 32);
    return bits_f32(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

/* The sum of what the threads before this one hold; all threads of a block together. */
METHOD int64_t block_before(int64_t x) {
    __shared__ int64_t part[BLOCK / 32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int64_t all = x;
    for (int by = 1; by < 32; by *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, all, by);
        if (lane >= by) all += other;
    }
    __syncthreads(); /* the last parts are read */
    if (lane == 31) part[warp] = all;
    __syncthreads();
    for (int w = 0; w < warp; w++) all += part[w];
    return all - x;
}

/* The largest logit of each block of a part; infinity where one is NaN or infinite. */
METHOD void sample_maxima(const float *row, int part, float *maxima) {
    const int lane = (int)threadIdx.x % LANES, b = part * (BLOCK / LANES) + (int)threadIdx.x / LANES;
    float most = -INF_F;
    if (b < BLOCKS)
        for (int i = b * LOGITS + lane; i < VOCABULARY && i < (b + 1) * LOGITS; i += LANES) {
            const float x = row[i];
            most = !(x < INF_F) ? INF_F : x > most ? x : most;
        }
    for (int half = LANES / 2; half; half /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, half);
        most = other > most ? other : most;
    }
    if (b < BLOCKS && lane == 0) maxima[b] = most;
}

/* The sum of the weights of a block's logits that are not below `least`, or, where `above`, that are above it: in lanes, joined by halves. All
 * lanes of a warp call it, each LANES of them for a block or for none. */
METHOD float sample_sum(const float *row, int b, bool some, float least, bool above, const sample_weights &w) {
    float sum = 0.0f;
    if (some)
        for (int i = b * LOGITS + (int)threadIdx.x % LANES; i < VOCABULARY && i < (b + 1) * LOGITS; i += LANES) {
            const float x = row[i];
            if (above ? x > least : x >= least) sum += sample_weight(w, x);
        }
    for (int half = LANES / 2; half; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
    return sum;
}

/* The largest logit of a row. */
METHOD float sample_top(const float *maxima) {
    float top = -INF_F;
    for (int b = (int)threadIdx.x; b < BLOCKS; b += BLOCK) top = maxima[b] > top ? maxima[b] : top;
    return block_max(top);
}

METHOD sample_weights sample_weights_of(float top, const float *reals) {
    const float floor = top + reals[1], least = -3.40282347e38f;
    return {reals[0], -(top * reals[0]), floor > least ? floor : least};
}

/* Whether top-k drops some. */
METHOD bool sample_counts(const int32_t *integers) {
    return integers[0] != 0 && (uint32_t)integers[0] < (uint32_t)VOCABULARY;
}

/* Sums of the weights of each block of a part, for rows that are drawn by them. */
METHOD void sample_sums(const float *row, int part, const float *reals, const int32_t *integers, const float *maxima,
                        int64_t *sums) {
    if (reals[0] == 0.0f || sample_counts(integers)) return;
    const float top = sample_top(maxima);
    const sample_weights w = sample_weights_of(top, reals);
    const int b = part * (BLOCK / LANES) + (int)threadIdx.x / LANES;
    const float sum = sample_sum(row, b, b < BLOCKS && maxima[b < BLOCKS ? b : 0] >= w.floor, w.floor, false, w);
    if (b < BLOCKS && threadIdx.x % LANES == 0) sums[b] = sample_steps(sum);
}

/* The first of the largest logits. */
METHOD int sample_best(const float *row, const float *maxima, float top) {
    int64_t first = BLOCKS;
    for (int b = (int)threadIdx.x; b < BLOCKS; b += BLOCK)
        if (maxima[b] == top && b < first) first = b;
    const int i = (int)block_min(first) * LOGITS + (int)threadIdx.x;
    const bool best = threadIdx.x < LOGITS && i < VOCABULARY && row[i] == top;
    return (int)block_min(best ? (int64_t)i : (int64_t)VOCABULARY);
}

/* The least rank of the fewest likeliest, one at least, that are so many, or WEIGH so much together; of those not below the floor and from the rank
 * `from` on. Where all are too few it is `from`. */
template <bool WEIGH>
METHOD uint64_t sample_cut(const float *row, const float *maxima, uint64_t from, int64_t target, const sample_weights &w) {
    __shared__ unsigned long long bins[256];
    __shared__ int64_t left;
    __shared__ int digit;
    uint64_t cut = 0;
    const int lane = (int)threadIdx.x % 32, own = 255 - (int)threadIdx.x;
    for (int shift = 56; shift >= 0; shift -= 8) {
        bins[threadIdx.x] = 0;
        if (threadIdx.x == 0) digit = -1;
        __syncthreads();
        const float least = sample_logit(cut);
        for (int b = (int)threadIdx.x / 32; b < BLOCKS; b += BLOCK / 32) {
            if (maxima[b] < w.floor || maxima[b] < least) continue;
            for (int i = b * LOGITS + lane; i < VOCABULARY && i < (b + 1) * LOGITS; i += 32) {
                const float x = row[i];
                const uint64_t rank = sample_rank(x, i);
                if (x < w.floor || rank < from || (shift < 56 && (rank ^ cut) >> (shift + 8))) continue;
                atomicAdd(&bins[rank >> shift & 255], WEIGH ? (unsigned long long)sample_steps(sample_weight(w, x)) : 1ull);
            }
        }
        __syncthreads();
        const int64_t here = (int64_t)bins[own], before = block_before(here);
        if (before < target && target <= before + here) digit = own, left = target - before;
        __syncthreads();
        if (digit < 0) return from;
        cut |= (uint64_t)digit << shift, target = left;
        const bool whole = (int64_t)bins[digit] == target;
        __syncthreads(); /* all has been read */
        if (whole) return cut;
    }
    return cut;
}

/* Sums of each block's weights from a rank on; the sum of all. */
METHOD int64_t sample_weigh(const float *row, const float *maxima, int64_t *sums, uint64_t cut, const sample_weights &w) {
    const int lane = (int)threadIdx.x % 32;
    int64_t all = 0;
    for (int b = (int)threadIdx.x / 32; b < BLOCKS; b += BLOCK / 32) {
        int64_t sum = 0;
        if (!(maxima[b] < w.floor || maxima[b] < sample_logit(cut)))
            for (int i = b * LOGITS + lane; i < VOCABULARY && i < (b + 1) * LOGITS; i += 32) {
                const float x = row[i];
                if (x >= w.floor && sample_rank(x, i) >= cut) sum += sample_steps(sample_weight(w, x));
            }
        for (int half = 16; half; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
        if (lane == 0) sums[b] = sum, all += sum;
    }
    return block_sum(all);
}

/* The token at which the running sum of the weights from a rank on exceeds `target`, first by sums of blocks, which are `total` together; in the
 * block the last that weighs anything where rounding leaves too little. -1: nothing weighs anything. */
METHOD int sample_walk(const float *row, const int64_t *sums, int64_t total, int64_t target, uint64_t cut, const sample_weights &w) {
    __shared__ int block;
    __shared__ int64_t left;
    constexpr int64_t FOUND = 1ll << 40;
    if (total == 0) return -1;
    constexpr int many = (BLOCKS + BLOCK - 1) / BLOCK;
    int b = (int)threadIdx.x * many;
    int64_t here = 0;
    for (int j = 0; j < many && b + j < BLOCKS; j++) here += sums[b + j];
    int64_t rest = target - block_before(here);
    if (rest >= 0 && rest < here) {
        for (; rest >= sums[b]; b++) rest -= sums[b];
        block = b, left = rest;
    }
    __syncthreads();
    const int i = block * LOGITS + (int)threadIdx.x;
    rest = left, here = 0;
    if (threadIdx.x < LOGITS && i < VOCABULARY) {
        const float x = row[i];
        if (x >= w.floor && sample_rank(x, i) >= cut) here = sample_steps(sample_weight(w, x));
    }
    rest -= block_before(here);
    return (int)block_max(rest >= 0 && rest < here ? FOUND + i : here > 0 ? (int64_t)i : (int64_t)-1);
}

/* The weight of all tokens that are likelier than one. */
METHOD int64_t sample_above(const float *row, const float *maxima, int id, const sample_weights &w) {
    const float least = row[id];
    const int own = id / LOGITS, half = (int)threadIdx.x % 32 / LANES;
    int64_t sum = 0;
    for (int pair = (int)threadIdx.x / 32; pair * (32 / LANES) < BLOCKS; pair += BLOCK / 32) {
        const int b = pair * (32 / LANES) + half;
        const bool some = b < BLOCKS && b != own && maxima[b < BLOCKS ? b : 0] >= least;
        const int64_t of = sample_steps(sample_sum(row, b, some, least, b > own, w));
        if (threadIdx.x % LANES == 0) sum += of;
    }
    const int i = own * LOGITS + (int)threadIdx.x;
    if (threadIdx.x < LOGITS && i < VOCABULARY) {
        const float x = row[i];
        if (x > least || (x == least && i < id)) sum += sample_steps(sample_weight(w, x));
    }
    return block_sum(sum);
}

METHOD uint64_t sample_word(const int32_t *integers, int draw) {
    return (uint64_t)(uint32_t)integers[2 * draw + 2] << 32 | (uint32_t)integers[2 * draw + 1];
}

/* What top-p keeps of a sum. Exact: a power of two. Twice the sum, since 1 is half of all words. */
METHOD int64_t sample_mass(float top_p, int64_t sum) {
    return sample_part((uint64_t)(top_p * 9223372036854775808.0f), 2 * sum);
}

/* A draw of what has ranks from `cut` on, or -1. */
METHOD int sample_listed(const float *row, const float *maxima, int64_t *sums, uint64_t cut, uint64_t word,
                         const sample_weights &w) {
    const int64_t total = sample_weigh(row, maxima, sums, cut, w);
    return sample_walk(row, sums, total, sample_part(word, total), cut, w);
}

METHOD int sample_row(const float *row, const float *reals, const int32_t *integers, const float *maxima, int64_t *sums) {
    const float top = sample_top(maxima), top_p = reals[2];
    if (top == INF_F || top == -INF_F) return -1;
    if (reals[0] == 0.0f) return sample_best(row, maxima, top);
    const sample_weights w = sample_weights_of(top, reals);
    if (sample_counts(integers)) {
        uint64_t cut = sample_cut<false>(row, maxima, 0, (int64_t)(uint32_t)integers[0], w);
        if (top_p < 1.0f) {
            const int64_t mass = sample_mass(top_p, sample_weigh(row, maxima, sums, cut, w));
            cut = sample_cut<true>(row, maxima, cut, mass > 1 ? mass : 1, w);
        }
        return sample_listed(row, maxima, sums, cut, sample_word(integers, 0), w);
    }
    int64_t total = 0;
    for (int b = (int)threadIdx.x; b < BLOCKS; b += BLOCK) total += sums[b];
    total = block_sum(total);
    const int64_t mass = top_p < 1.0f ? sample_mass(top_p, total) : INT64_MAX;
    for (int draw = 0; draw < DRAWS; draw++) {
        int id = sample_walk(row, sums, total, sample_part(sample_word(integers, draw), total), 0, w);
        if (id < 0) id = sample_best(row, maxima, top);
        if (mass == INT64_MAX || sample_above(row, maxima, id, w) < mass) return id;
    }
    const uint64_t cut = sample_cut<true>(row, maxima, 0, mass > 1 ? mass : 1, w);
    return sample_listed(row, maxima, sums, cut, sample_word(integers, DRAWS), w);
}
