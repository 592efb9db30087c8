/* What adapters add to joined linear layers: out[t, n] = sum over r of B(r, n) * sum over k of A(k, r) * x(t, k), by the factors of the slot
 * of token t; -0 for a token without an adapter. Included once per kernel; the emitter defines the slots before and undefines them
 * after.
 *
 *   NAME(x)                     prefixes a symbol of this kernel
 *   TOKENS, ROWS                tokens, and those of them that have an adapter: runtime expressions over `dims`
 *   SLOTS, K, RANK, LAYERS, N   literals; COLUMNS: those of each layer's result, a list
 *   FACTOR_A, FACTOR_B          [SLOTS][K][LAYERS * RANK] and [SLOTS][RANK][N], of types A_T and B_T
 *   LOAD_A(x), LOAD_B(x)        what a load makes of an element; A_F32, A_BF16, B_F32, B_BF16: 1 for the element's type
 *   SLOT_OF                     i32 [TOKENS], negative without an adapter
 *   TOKEN_OF, OFFSETS           i32 [ROWS] and [SLOTS + 1]: tokens in the order of their slots, and where those of each slot begin
 *   PROLOGUE_ROW(t, row)        writes x(t, 0..K) as f32 to `row`
 *   RESULT                      f32 [TOKENS][N]
 *
 * Factors are read once for the few rows of a tile, which are of one slot, as they lie: one row after another, so that memory is read in
 * long runs. Phase 0 multiplies by A into scratch, phase 1 by B. Sums over k have two accumulators, of even and of odd k; sums over r
 * have one, r ascending: a row's bits depend neither on the other rows nor on the threads.
 */
enum {
    NAME(lanes) = LAYERS * RANK,
    NAME(high) = 4,                          /* rows of a tile */
    NAME(wide) = V_REGS == 32 ? 3 : 1,       /* vectors of A's columns at once, each with two accumulators a row */
    NAME(strip) = V_REGS == 32 ? 4 : 2,      /* vectors of B's columns at once */
    NAME(chunks) = (N + 511) / 512,          /* units of a tile in phase 1 */
    NAME(block) = 64,                        /* tokens of a unit that looks for those without an adapter */
};

typedef uint16_t NAME(half) __attribute__((vector_size(2 * VW), aligned(2), may_alias));
typedef uint32_t NAME(word) __attribute__((vector_size(4 * VW)));

/* VW neighbours of a factor. Compilers widen whole vectors in halves. */
INLINE vf NAME(widen)(const uint16_t *p)
{
    NAME(word) w;
#if defined(__AVX512F__)
    __asm__("vpmovzxwd %1, %0" : "=v"(w) : "m"(*(const NAME(half) *)p));
#else
    w = __builtin_convertvector(*(const NAME(half) *)p, NAME(word));
#endif
    return (vf)(w << 16);
}

INLINE vf NAME(load_a)(const A_T *p)
{
#if A_F32
    return v_load(p);
#elif A_BF16
    return NAME(widen)(p);
#else
    float x[VW];
    for (int i = 0; i < VW; i++) x[i] = LOAD_A(p[i]);
    return v_load(x);
#endif
}
INLINE vf NAME(load_b)(const B_T *p)
{
#if B_F32
    return v_load(p);
#elif B_BF16
    return NAME(widen)(p);
#else
    float x[VW];
    for (int i = 0; i < VW; i++) x[i] = LOAD_B(p[i]);
    return v_load(x);
#endif
}

/* Rows of a slot, with their places in the order of slots and their tokens. */
struct NAME(tile) {
    int64_t slot, rows, place[NAME(high)], token[NAME(high)];
};

/* Most tiles that these rows may make. */
static int64_t NAME(tiles)(const int64_t *dims) { return ROWS / NAME(high) + (ROWS < SLOTS ? ROWS : SLOTS); }

/* Tile u: rows of tokens that have an adapter (where none has, one that has none stands there); none beyond the last tile. */
static struct NAME(tile) NAME(find)(void *const *bufs, const int64_t *dims, int64_t u)
{
    struct NAME(tile) t = {0};
    for (; t.slot < SLOTS; t.slot++) {
        int64_t begin = OFFSETS[t.slot], n = OFFSETS[t.slot + 1] - begin, tiles = (n + NAME(high) - 1) / NAME(high);
        if (u < tiles) {
            for (int64_t at = begin + u * n / tiles; at < begin + (u + 1) * n / tiles; at++) {
                int64_t token = TOKEN_OF[at];
                if (token < 0 || token >= TOKENS || SLOT_OF[token] < 0) continue;
                t.place[t.rows] = at, t.token[t.rows] = token, t.rows++;
            }
            return t;
        }
        u -= tiles;
    }
    return t;
}

int64_t NAME(units0)(const int64_t *dims) { return NAME(tiles)(dims); }

/* `wide` vectors of A's columns, from `lane` on, by `rows` rows; both literals. */
INLINE void NAME(down)(int rows, int wide, const float *x, const A_T *a, float *const *low, int lane)
{
    vf even[NAME(high)][NAME(wide)], odd[NAME(high)][NAME(wide)];
    a += lane;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) even[r][j] = odd[r][j] = (vf){0};
#pragma GCC unroll 1
    for (int64_t k = 0; k + 2 <= K; k += 2, a += 2 * NAME(lanes)) {
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) {
            vf column = NAME(load_a)(a + j * VW);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) even[r][j] = v_fma(v_splat(x[r * K + k]), column, even[r][j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) {
            vf column = NAME(load_a)(a + NAME(lanes) + j * VW);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) odd[r][j] = v_fma(v_splat(x[r * K + k + 1]), column, odd[r][j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) {
            if (K % 2) even[r][j] = v_fma(v_splat(x[r * K + K - 1]), NAME(load_a)(a + j * VW), even[r][j]);
            v_store(low[r] + lane + j * VW, even[r][j] + odd[r][j]);
        }
}

INLINE void NAME(down_all)(int rows, const float *x, const A_T *a, float *const *low)
{
    int lane = 0;
    for (; lane + NAME(wide) * VW <= NAME(lanes); lane += NAME(wide) * VW)
        NAME(down)(rows, NAME(wide), x, a, low, lane);
    for (; lane + VW <= NAME(lanes); lane += VW) NAME(down)(rows, 1, x, a, low, lane);
    for (; lane < NAME(lanes); lane++)
        for (int r = 0; r < rows; r++) {
            float sum[2] = {0, 0};
            for (int64_t k = 0; k < K; k++)
                sum[k % 2] = FMA(x[r * K + k], LOAD_A(a[k * NAME(lanes) + lane]), sum[k % 2]);
            low[r][lane] = sum[0] + sum[1];
        }
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    float x[NAME(high) * K] __attribute__((aligned(64)));
    for (int64_t u = begin; u < end; u++) {
        struct NAME(tile) t = NAME(find)(bufs, dims, u);
        const A_T *a = FACTOR_A + t.slot * K * NAME(lanes);
        float *low[NAME(high)];
        for (int64_t r = 0; r < t.rows; r++) {
            PROLOGUE_ROW(t.token[r], x + r * K);
            low[r] = (float *)scratch + t.place[r] * NAME(lanes);
        }
        switch (t.rows) {
        case 1: NAME(down_all)(1, x, a, low); break;
        case 2: NAME(down_all)(2, x, a, low); break;
        case 3: NAME(down_all)(3, x, a, low); break;
        case 4: NAME(down_all)(4, x, a, low); break;
        }
    }
}

/* `wide` vectors of B's columns by `rows` rows; both literals. Rows of B are far apart, and processors do not see the next slot's
 * coming: the same columns of the B that lies `ahead` are asked for. */
INLINE void NAME(up)(int rows, int wide, const float *const *low, const B_T *b, int64_t ahead, float *const *to, int64_t n)
{
    vf sum[NAME(high)][NAME(strip)];
    b += n;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sum[r][j] = (vf){0};
#pragma GCC unroll 1
    for (int64_t k = 0; k < RANK; k++, b += N) {
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) {
            vf column = NAME(load_b)(b + j * VW);
            if (j * VW * sizeof(B_T) % 64 == 0) __builtin_prefetch(b + ahead + j * VW, 0, 2);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r][j] = v_fma(v_splat(low[r][k]), column, sum[r][j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) v_store(to[r] + n + j * VW, sum[r][j]);
}

/* Columns n .. end of one layer. */
INLINE void NAME(up_all)(int rows, const float *const *low, const B_T *b, int64_t ahead, float *const *to, int64_t n,
                         int64_t end)
{
    for (; n + NAME(strip) * VW <= end; n += NAME(strip) * VW) NAME(up)(rows, NAME(strip), low, b, ahead, to, n);
    for (; n + VW <= end; n += VW) NAME(up)(rows, 1, low, b, ahead, to, n);
    for (; n < end; n++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t k = 0; k < RANK; k++) sum = FMA(low[r][k], LOAD_B(b[k * N + n]), sum);
            to[r][n] = sum;
        }
}

/* Behind the units of tiles come those of tokens without an adapter. */
int64_t NAME(units1)(const int64_t *dims)
{
    return NAME(tiles)(dims) * NAME(chunks) + (TOKENS + NAME(block) - 1) / NAME(block);
}

void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    static const int64_t columns[] = {COLUMNS};
    int64_t tiles = NAME(tiles)(dims), known = -1;
    struct NAME(tile) t = {0}, next = {0};
    for (int64_t u = begin; u < end; u++) {
        if (u >= tiles * NAME(chunks)) {
            int64_t at = (u - tiles * NAME(chunks)) * NAME(block), last = at + NAME(block);
            for (; at < (last < TOKENS ? last : TOKENS); at++)
                for (int64_t n = 0; SLOT_OF[at] < 0 && n < N; n++) RESULT[at * N + n] = -0.0f;
            continue;
        }
        if (u / NAME(chunks) != known) {
            t = known < 0 ? NAME(find)(bufs, dims, u / NAME(chunks)) : next;
            known = u / NAME(chunks), next = NAME(find)(bufs, dims, known + 1);
        }
        const B_T *b = FACTOR_B + t.slot * RANK * N;
        int64_t ahead = next.rows > 0 ? (next.slot - t.slot) * RANK * N : 0;
        const float *low[NAME(high)];
        float *to[NAME(high)];
        for (int64_t r = 0; r < t.rows; r++) {
            low[r] = (const float *)scratch + t.place[r] * NAME(lanes);
            to[r] = RESULT + t.token[r] * N;
        }
        int64_t c = u % NAME(chunks), from = c * N / NAME(chunks) / 64 * 64;
        int64_t until = c + 1 < NAME(chunks) ? (c + 1) * N / NAME(chunks) / 64 * 64 : N, first = 0;
        for (int64_t layer = 0; layer < LAYERS; first += columns[layer++]) {
            int64_t n = first > from ? first : from, n_end = first + columns[layer];
            if (n_end > until) n_end = until;
            switch (t.rows) {
            case 1: NAME(up_all)(1, low, b, ahead, to, n, n_end); break;
            case 2: NAME(up_all)(2, low, b, ahead, to, n, n_end); break;
            case 3: NAME(up_all)(3, low, b, ahead, to, n, n_end); break;
            case 4: NAME(up_all)(4, low, b, ahead, to, n, n_end); break;
            }
            for (int64_t r = 0; r < t.rows; r++) low[r] += RANK;
        }
    }
}
