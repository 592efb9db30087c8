/* The choice of experts for each token, and the lists that products by groups need. Included once per kernel, after
 * `scalar.c`; the emitter defines the slots before and undefines them after.
 *
 *   NAME(x)                    prefixes a symbol of this kernel
 *   TOKENS                     a runtime expression over `dims`; EXPERTS and CHOSEN are literals
 *   LOGITS                     f32 [TOKENS, EXPERTS]; CORRECTION (optional): f32 [EXPERTS], added for the choice
 *   SIGMOID, SOFTMAX_ALL       0 or 1: what scores are; neither: the logits, and softmax of the chosen ones
 *   BY_LOGITS                  0 or 1: scores rank as logits do
 *   GROUPS, GROUPS_KEPT, BEST_TWO   optional: only experts of the best groups, ranked by their best or the sum of two
 *   NORMALISE, FACTOR          weights divided by their sum (0 or 1), times FACTOR
 *   CHOICE_OUT, WEIGHTS_OUT, SLOTS_OUT, PLACES_OUT, OFFSETS_OUT   results, each optional
 *
 * Phase 0 chooses, tokens apart; phase 1, a single unit, sorts by expert, stable, by counting. The order of all sums is
 * fixed, so that a token's numbers do not depend on the others. NaN ranks above every number, ties go to the lower expert.
 */
#define ROUTE_TOKENS 32 /* of a unit */

int64_t NAME(scratch)(const int64_t *dims) { return TOKENS * CHOSEN * (int64_t)sizeof(int32_t); }
int64_t NAME(units0)(const int64_t *dims) { return (TOKENS + ROUTE_TOKENS - 1) / ROUTE_TOKENS; }
int64_t NAME(units1)(const int64_t *dims) { return 1; }

INLINE int NAME(above)(float a, float b) { return a > b || (a != a && b == b); }

/* e^(x - max) over their sum. */
INLINE void NAME(softmax)(const float *x, float *p, int64_t n)
{
    float top = -INF_F, sum = 0;
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int64_t i = 0; i < n; i++) p[i] = m_exp(x[i] - top);
    for (int64_t i = 0; i < n; i++) sum += p[i];
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

#ifdef GROUPS
/* Marks the experts of all but the best groups as taken. */
static void NAME(limit)(const float *by, uint8_t *taken)
{
    enum { size = EXPERTS / GROUPS };
    float score[GROUPS];
    uint8_t kept[GROUPS] = {0};
    for (int g = 0; g < GROUPS; g++) {
        const float *of = by + g * size;
        int first = 0, second = -1;
        for (int i = 1; i < size; i++) {
            if (NAME(above)(of[i], of[first])) second = first, first = i;
            else if (second < 0 || NAME(above)(of[i], of[second])) second = i;
        }
        score[g] = BEST_TWO ? of[first] + of[second < 0 ? first : second] : of[first];
    }
    for (int n = 0; n < GROUPS_KEPT; n++) {
        int best = -1;
        for (int g = 0; g < GROUPS; g++)
            if (!kept[g] && (best < 0 || NAME(above)(score[g], score[best]))) best = g;
        kept[best] = 1;
    }
    for (int e = 0; e < EXPERTS; e++) taken[e] = !kept[e / size];
}
#endif

static void NAME(token)(const float *logits, const float *correction, int32_t *chosen, float *weights)
{
    float scores[EXPERTS], by[EXPERTS];
    uint8_t taken[EXPERTS];
    __builtin_memset(taken, 0, sizeof taken);
    if (SOFTMAX_ALL)
        NAME(softmax)(logits, scores, EXPERTS);
    else
        for (int e = 0; e < EXPERTS; e++) scores[e] = SIGMOID ? m_sigmoid(logits[e]) : logits[e];
    for (int e = 0; e < EXPERTS; e++) by[e] = BY_LOGITS ? logits[e] : correction ? scores[e] + correction[e] : scores[e];
#ifdef GROUPS
    NAME(limit)(by, taken);
#endif
    for (int n = 0; n < CHOSEN; n++) {
        int best = -1;
        for (int e = 0; e < EXPERTS; e++)
            if (!taken[e] && (best < 0 || NAME(above)(by[e], by[best]))) best = e;
        taken[best] = 1, chosen[n] = best, weights[n] = scores[best];
    }
    if (!SOFTMAX_ALL && !SIGMOID) NAME(softmax)(weights, weights, CHOSEN);
    float sum = 0;
    for (int n = 0; n < CHOSEN; n++) sum += weights[n];
    if (NORMALISE)
        for (int n = 0; n < CHOSEN; n++) weights[n] /= sum + 1e-20f;
    for (int n = 0; n < CHOSEN; n++) weights[n] *= FACTOR;
}

void NAME(phase0)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    int64_t last = end * ROUTE_TOKENS < TOKENS ? end * ROUTE_TOKENS : TOKENS;
    const float *correction = 0;
#ifdef CORRECTION
    correction = CORRECTION;
#endif
    for (int64_t t = begin * ROUTE_TOKENS; t < last; t++) {
        int32_t *chosen = (int32_t *)scratch + t * CHOSEN;
        float weights[CHOSEN];
        NAME(token)(LOGITS + t * EXPERTS, correction, chosen, weights);
        for (int n = 0; n < CHOSEN; n++) {
#ifdef CHOICE_OUT
            CHOICE_OUT[t * CHOSEN + n] = chosen[n];
#endif
#ifdef WEIGHTS_OUT
            WEIGHTS_OUT[t * CHOSEN + n] = weights[n];
#endif
        }
    }
}

void NAME(phase1)(void *const *bufs, const int64_t *dims, char *scratch, int64_t begin, int64_t end)
{
    const int32_t *chosen = (const int32_t *)scratch;
    int64_t slots = TOKENS * CHOSEN;
    int32_t next[EXPERTS + 1];
    __builtin_memset(next, 0, sizeof next);
    for (int64_t s = 0; s < slots; s++) next[chosen[s] + 1]++;
    for (int e = 0; e < EXPERTS; e++) next[e + 1] += next[e];
#ifdef OFFSETS_OUT
    for (int e = 0; e <= EXPERTS; e++) OFFSETS_OUT[e] = next[e];
#endif
    for (int64_t s = 0; s < slots; s++) {
        int32_t place = next[chosen[s]]++;
        (void)place;
#ifdef SLOTS_OUT
        SLOTS_OUT[place] = (int32_t)s;
#endif
#ifdef PLACES_OUT
        PLACES_OUT[s] = place;
#endif
    }
}

#undef ROUTE_TOKENS
