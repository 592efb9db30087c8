/* Cross-entropy of a linear layer, and its gradient, on the host: the logits of a chunk of tokens at a time.
 *
 * Enters, as #defines before each inclusion of this text (prelude.c, scalar.c, dot_core.c and dot_blocks.c come first):
 *   NAME(x)                      prefixes every symbol of this instance
 *   SYMBOLS, BUFFERS             values in `dims`, addresses in `bufs`
 *   TOKENS                       expression over dims; VOCAB, WIDTH literals
 *   CHUNK, SLICE                 most tokens whose logits exist at once; rows of the weight that one round's products take
 *   TARGETS_BUF                  i32 [TOKENS]; below 0 is ignored, from VOCAB on makes the token's results NaN
 *   STATISTICS                   1: what the statistics need is computed
 *   LOSSES_BUF                   optional: f32 [TOKENS]; with STATISTICS also LSE_BUF, MEAN_BUF, ENTROPY_BUF, SQUARES_BUF, TOP_BUF
 *   GRAD_BUF                     only with the gradient: f32 [TOKENS], the losses' cotangent; with STATISTICS beside it
 *                                LSE_GRAD_BUF, MEAN_GRAD_BUF, ENTROPY_GRAD_BUF
 *   DHIDDEN_BUF, DWEIGHT_BUF     optional: f32 [TOKENS, WIDTH], [VOCAB, WIDTH]
 *   NARROW                       1: the logits' gradient is rounded to bf16, and lies at the front of its row
 *   SMOOTHING, SOFTCAP           f32 literals; a SOFTCAP of 0 is none
 *   LOGITS_ROW, SLICES, FIRST, COUNT, VOCAB0, VOCABS   see the emitter
 * and after it three dots (dot_free.c) under the names NAME(logits_x), NAME(dhidden_x), NAME(dweight_x).
 * Leaves: NAME(units0..), NAME(phase0..). In scratch lie the chunk's logits; at PACKED the packed left side of the first product,
 *   or those of the other two, the last at SECOND.
 *
 * A round is a slice of the vocabulary for a chunk of tokens. The first round of a chunk makes its logits (phases 0 and 1)
 * and turns each row into its loss and its gradient in place (phase 2); every round adds its slice's part to the two
 * products (phases 3 and 4). Chunks and slices ascend, hence the sums have one order on any number of threads.
 */

/* What the dots and rows of a round see: the buffers, then the logits; the symbols, then FIRST, COUNT, VOCAB0, VOCABS. */
struct NAME(round) {
    void *bufs[BUFFERS + 1];
    int64_t dims[SYMBOLS + 4];
};

INLINE void NAME(size)(struct NAME(round) *r, const int64_t *dims, int64_t token, int64_t row) {
    for (int i = 0; i < SYMBOLS; i++) r->dims[i] = dims[i];
    r->dims[SYMBOLS] = token, r->dims[SYMBOLS + 1] = i_min(CHUNK, TOKENS - token);
    r->dims[SYMBOLS + 2] = row, r->dims[SYMBOLS + 3] = i_min(SLICE, VOCAB - row);
}

/* The sizes of the round whose number follows the symbols; whether it is the first of its chunk. */
INLINE int NAME(begin)(struct NAME(round) *r, const int64_t *dims) {
    int64_t chunk = dims[SYMBOLS] / SLICES, slice = dims[SYMBOLS] % SLICES;
    NAME(size)(r, dims, chunk * CHUNK, slice * SLICE);
    return slice == 0;
}

INLINE void NAME(bind)(struct NAME(round) *r, void *const *bufs, char *scratch) {
    for (int i = 0; i < BUFFERS; i++) r->bufs[i] = bufs[i];
    r->bufs[BUFFERS] = scratch;
}

#define DOT_FUNCTIONS(dot)                                                                                             \
    int64_t NAME(dot##_units0)(const int64_t *);                                                                       \
    int64_t NAME(dot##_units1)(const int64_t *);                                                                       \
    void NAME(dot##_phase0)(void *const *, const int64_t *, char *, int64_t, int64_t);                                 \
    void NAME(dot##_phase1)(void *const *, const int64_t *, char *, int64_t, int64_t);
DOT_FUNCTIONS(logits)
DOT_FUNCTIONS(dhidden)
DOT_FUNCTIONS(dweight)
#undef DOT_FUNCTIONS

/* Columns n0 .. n0 + valid of row m of the chunk's logits. */
static void NAME(keep)(void *const *bufs, int64_t m, int64_t n0, const float *acc, int valid) {
    float *to = (float *)bufs[BUFFERS] + m * LOGITS_ROW + n0;
    float line[32] __attribute__((aligned(64)));
    if (SOFTCAP > 0) {
        for (int j = 0; j < 32; j++) line[j] = SOFTCAP * m_tanh(acc[j] / (SOFTCAP > 0 ? SOFTCAP : 1.0f));
        acc = line;
    }
    if (valid == 32)
        memcpy(to, acc, 32 * sizeof *to); /* of a literal length: no call */
    else
        memcpy(to, acc, (size_t)valid * sizeof *to);
}

#define LANES 64

/* The greatest of a row, -inf beyond VOCAB; a NaN wins. */
static float NAME(greatest)(const float *x) {
    float most[LANES];
    for (int j = 0; j < LANES; j++) most[j] = x[j];
    for (int64_t i = LANES; i < VOCAB; i += LANES)
        for (int j = 0; j < LANES; j++) most[j] = m_max(most[j], x[i + j]);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++) most[j] = m_max(most[j], most[j + w]);
    return most[0];
}

INLINE float NAME(total)(float *sum) {
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++) sum[j] += sum[j + w];
    return sum[0];
}

#if defined(GRAD_BUF)
#define EXP_STAYS (SOFTCAP == 0 && !STATISTICS) /* the slope of a cap and that of the entropy need the logits themselves */
#else
#define EXP_STAYS 0
#endif

/* The sum of exp(x - top), which takes the place of x where EXP_STAYS. */
static float NAME(sum_exp)(float *x, float top) {
    float sum[LANES] = {0};
    for (int64_t i = 0; i < VOCAB; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float e = m_exp(x[i + j] - top);
            if (EXP_STAYS) x[i + j] = e;
            sum[j] += e;
        }
    return NAME(total)(sum);
}

static float NAME(mean)(const float *x) {
    float sum[LANES] = {0};
    for (int64_t i = 0; i < VOCAB / LANES * LANES; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += x[i + j];
    for (int64_t i = VOCAB / LANES * LANES; i < VOCAB; i++) sum[i % LANES] += x[i];
    return NAME(total)(sum) / VOCAB;
}

#if STATISTICS
#define FAR -1e30f /* takes the place of the -inf beyond VOCAB, which times 0 were NaN */

/* The expected x - top, and log of the sum of p squared, given the sum of exp(x - top). */
static float NAME(expected)(const float *x, float top, float sum, float *squares) {
    float first[LANES] = {0}, second[LANES] = {0};
    for (int64_t i = 0; i < VOCAB; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float below = m_max(x[i + j] - top, FAR), e = m_exp(below);
            first[j] = FMA(e, below, first[j]), second[j] = FMA(e, e, second[j]);
        }
    *squares = m_log(NAME(total)(second)) - 2 * m_log(sum);
    return NAME(total)(first) / sum;
}
#endif

#ifdef GRAD_BUF
/* grad * (p - wanted), times the slope of the cap, from what sum_exp left of a logit. */
INLINE float NAME(slope)(float x, float grad, float top, float share, float wanted) {
    if (EXP_STAYS) return grad * FMA(x, share, -wanted);
    float t = x / (SOFTCAP > 0 ? SOFTCAP : 1.0f);
    return grad * FMA(m_exp(x - top), share, -wanted) * FMA(-t, t, 1.0f);
}

INLINE void NAME(put)(float *row, int64_t i, const float *d, int n) {
    if (NARROW) {
        bf16 line[LANES];
        for (int j = 0; j < n; j++) line[j] = f32_to_bf16(d[j]);
        memcpy((char *)row + i * sizeof *line, line, (size_t)n * sizeof *line);
    } else {
        memcpy(row + i, d, (size_t)n * sizeof *d);
    }
}

/* The row becomes the gradient: wanted is (1 - s) onehot + s / VOCAB. */
static void NAME(differentiate)(float *row, int64_t target, float grad, float top, float sum) {
    const float even = SMOOTHING / VOCAB, share = 1.0f / sum;
    float hit = NAME(slope)(row[target], grad, top, share, even + (1.0f - SMOOTHING));
    for (int64_t i = 0; i < VOCAB; i += LANES) {
        float d[LANES];
        memcpy(d, row + i, sizeof d);
        for (int j = 0; j < LANES; j++) d[j] = NAME(slope)(d[j], grad, top, share, even);
        NAME(put)(row, i, d, LANES);
    }
    NAME(put)(row, target, &hit, 1);
}

#if STATISTICS
/* The same with cotangents g of loss, log-sum-exp, mean and entropy; `below` is the expected x - top. */
static void NAME(differentiate_all)(float *row, int64_t target, const float *g, float top, float sum, float below) {
    const float even = (g[2] - g[0] * SMOOTHING) / VOCAB, share = (g[0] + g[1] + g[3] * below) / sum, turn = -g[3] / sum;
    for (int64_t i = 0; i < VOCAB; i += LANES) {
        float d[LANES];
        memcpy(d, row + i, sizeof d);
        for (int j = 0; j < LANES; j++) {
            float x = m_max(d[j] - top, FAR), t = d[j] / (SOFTCAP > 0 ? SOFTCAP : 1.0f), hit = i + j == target;
            float y = FMA(m_exp(x), FMA(turn, x, share), even) - hit * g[0] * (1.0f - SMOOTHING);
            d[j] = SOFTCAP > 0 ? y * FMA(-t, t, 1.0f) : y;
        }
        NAME(put)(row, i, d, LANES);
    }
}
#endif

/* A row of one number: 0 for an ignored token, NaN for a target that does not exist. */
static void NAME(flatten)(float *row, float x) {
    float d[LANES];
    for (int j = 0; j < LANES; j++) d[j] = x;
    for (int64_t i = 0; i < VOCAB; i += LANES) NAME(put)(row, i, d, LANES);
}
#endif

/* Row m of the chunk: from logits to a loss, statistics and a gradient. */
static void NAME(row)(void *const *bufs, const int64_t *dims, int64_t m) {
    float *row = (float *)bufs[BUFFERS] + m * LOGITS_ROW;
    int64_t token = FIRST + m, target = ((const int32_t *)bufs[TARGETS_BUF])[token];
    float loss = target < 0 ? 0.0f : NAN_F;
#if STATISTICS
    float lse = loss, mean = loss, entropy = loss, squares = loss, best = loss;
#endif
    if (target >= 0 && target < VOCAB) {
        for (int64_t i = VOCAB; i % LANES != 0; i++) row[i] = -INF_F;
        float top = NAME(greatest)(row), aim = row[target];
#if STATISTICS
        best = aim >= top, mean = NAME(mean)(row);
#endif
        if (SMOOTHING > 0) aim = FMA(SMOOTHING, NAME(mean)(row), (1.0f - SMOOTHING) * aim);
        float sum = NAME(sum_exp)(row, top);
        loss = m_log(sum) + (top - aim);
#if STATISTICS
        float below = NAME(expected)(row, top, sum, &squares);
        lse = m_log(sum) + top, entropy = m_log(sum) - below;
#endif
#ifdef GRAD_BUF
#if STATISTICS
#define OF(buf) ((const float *)bufs[buf])[token]
        const float g[4] = {OF(GRAD_BUF), OF(LSE_GRAD_BUF), OF(MEAN_GRAD_BUF), OF(ENTROPY_GRAD_BUF)};
#undef OF
        NAME(differentiate_all)(row, target, g, top, sum, below);
#else
        NAME(differentiate)(row, target, ((const float *)bufs[GRAD_BUF])[token], top, sum);
#endif
    } else {
        NAME(flatten)(row, loss);
#endif
    }
#define RESULT(buf, x) ((float *)bufs[buf])[token] = x
#ifdef LOSSES_BUF
    RESULT(LOSSES_BUF, loss);
#endif
#ifdef LSE_BUF
    RESULT(LSE_BUF, lse);
#endif
#ifdef MEAN_BUF
    RESULT(MEAN_BUF, mean);
#endif
#ifdef ENTROPY_BUF
    RESULT(ENTROPY_BUF, entropy);
#endif
#ifdef SQUARES_BUF
    RESULT(SQUARES_BUF, squares);
#endif
#ifdef TOP_BUF
    RESULT(TOP_BUF, best);
#endif
#undef RESULT
}

INLINE void NAME(add)(float *to, const float *acc, int valid, int first) {
    if (valid < 32)
        for (int j = 0; j < valid; j++) to[j] = first ? acc[j] : to[j] + acc[j];
    else if (first)
        memcpy(to, acc, 32 * sizeof *to);
    else
        for (int j = 0; j < 32; j++) to[j] += acc[j];
}

#ifdef DHIDDEN_BUF
static void NAME(add_hidden)(void *const *bufs, const int64_t *dims, int64_t m, int64_t n0, const float *acc, int valid) {
    NAME(add)((float *)bufs[DHIDDEN_BUF] + (FIRST + m) * WIDTH + n0, acc, valid, VOCAB0 == 0);
}
#endif

#ifdef DWEIGHT_BUF
/* The sums so far have left the caches since the last chunk: those of the next tile's rows are asked for now. */
static void NAME(add_weight)(void *const *bufs, const int64_t *dims, int64_t m, int64_t n0, const float *acc, int valid) {
    float *to = (float *)bufs[DWEIGHT_BUF] + (VOCAB0 + m) * WIDTH + n0;
    __builtin_prefetch(to + DOT_MR * WIDTH, 1, 3), __builtin_prefetch(to + DOT_MR * WIDTH + 16, 1, 3);
    NAME(add)(to, acc, valid, FIRST == 0);
}
#endif

int64_t NAME(units0)(const int64_t *dims) {
    struct NAME(round) r;
    return NAME(begin)(&r, dims) ? NAME(logits_units0)(r.dims) : 0;
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(round) r;
    NAME(begin)(&r, dims), NAME(bind)(&r, bufs, scratch);
    NAME(logits_phase0)(r.bufs, r.dims, scratch + PACKED, begin, end);
}

int64_t NAME(units1)(const int64_t *dims) {
    struct NAME(round) r;
    return NAME(begin)(&r, dims) ? NAME(logits_units1)(r.dims) : 0;
}

void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(round) r;
    NAME(begin)(&r, dims), NAME(bind)(&r, bufs, scratch);
    NAME(logits_phase1)(r.bufs, r.dims, scratch + PACKED, begin, end);
}

int64_t NAME(units2)(const int64_t *dims) {
    struct NAME(round) r;
    return NAME(begin)(&r, dims) ? r.dims[SYMBOLS + 1] : 0;
}

void NAME(phase2)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {
    struct NAME(round) r;
    NAME(begin)(&r, dims), NAME(bind)(&r, bufs, scratch);
    for (int64_t m = begin; m < end; m++) NAME(row)(r.bufs, r.dims, m);
}

#ifdef GRAD_BUF
#ifdef DHIDDEN_BUF
#define OF_HIDDEN(phase) NAME(dhidden_##phase)
#else
#define OF_HIDDEN(phase) NAME(nothing_##phase)
#endif
#ifdef DWEIGHT_BUF
#define OF_WEIGHT(phase) NAME(dweight_##phase)
#else
#define OF_WEIGHT(phase) NAME(nothing_##phase)
#endif
#define NOTHING(i)                                                                                                     \
    INLINE int64_t NAME(nothing_units##i)(const int64_t *dims) { return 0; }                                           \
    INLINE void NAME(nothing_phase##i)(void *const *b, const int64_t *d, char *s, int64_t begin, int64_t end) {}
NOTHING(0)
NOTHING(1)

/* Units of both products, those of the hidden states first. */
#define PRODUCTS(at, i)                                                                                                \
    int64_t NAME(units##at)(const int64_t *dims) {                                                                     \
        struct NAME(round) r;                                                                                          \
        NAME(begin)(&r, dims);                                                                                         \
        return OF_HIDDEN(units##i)(r.dims) + OF_WEIGHT(units##i)(r.dims);                                              \
    }                                                                                                                  \
    void NAME(phase##at)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end) {          \
        struct NAME(round) r;                                                                                          \
        NAME(begin)(&r, dims), NAME(bind)(&r, bufs, scratch);                                                          \
        int64_t n = OF_HIDDEN(units##i)(r.dims);                                                                       \
        if (begin < n) OF_HIDDEN(phase##i)(r.bufs, r.dims, scratch + PACKED, begin, i_min(end, n));                  \
        if (end > n) OF_WEIGHT(phase##i)(r.bufs, r.dims, scratch + SECOND, i_max(begin, n) - n, end - n);            \
    }
PRODUCTS(3, 0)
PRODUCTS(4, 1)
#undef PRODUCTS
#undef NOTHING
#undef OF_HIDDEN
#undef OF_WEIGHT
#endif
#undef LANES
#undef EXP_STAYS
#undef FAR
