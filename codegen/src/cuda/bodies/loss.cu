/* A token's logits become its loss and statistics, and their own gradient in place; a row a block.
 *
 * Enters: values.cu; BLOCK; as constants VOCAB; SMOOTHING, SOFTCAP (0: none); NARROW (1: gradients are bf16, from the row's beginning on);
 * STATISTICS (1: there are more results than the loss, and cotangents of the first of them).
 * Leaves: loss_capped, loss_row. A target below 0 is ignored, one from VOCAB on makes the token's results NaN.
 */
METHOD float loss_capped(float x) {
    return SOFTCAP > 0 ? SOFTCAP * m_tanh(x / (SOFTCAP > 0 ? SOFTCAP : 1.0f)) : x;
}

#define FAR -1e30f /* takes the place of -inf, which times 0 were NaN */

/* Results: the loss, the log-sum-exp, the mean of the logits, the entropy, the log of the sum of p squared, whether the target is the
 * likeliest. `slopes`: cotangents of the first four. Each pointer may be null; without STATISTICS all but the first are. */
METHOD void loss_row(float *row, int target, const float *const (&slopes)[4], float *const (&results)[6]) {
    const bool counts = target >= 0 && target < VOCAB;
    float of = target < 0 ? 0.0f : NAN_F, top = -INF_F, sum = 0.0f, all = 0.0f, below = 0.0f, squares = 0.0f;
    float got[6] = {of, of, of, of, of, of};
    if (counts) {
        for (int v = (int)threadIdx.x; v < VOCAB; v += BLOCK) top = m_max(top, row[v]);
        top = block_max(top);
        for (int v = (int)threadIdx.x; v < VOCAB; v += BLOCK) {
            const float x = STATISTICS ? m_max(row[v] - top, FAR) : row[v] - top, e = m_exp(x);
            sum += e;
            if (SMOOTHING > 0 || STATISTICS) all += row[v];
            if (STATISTICS) below = FMA(e, x, below), squares = FMA(e, e, squares);
        }
        float aim = row[target];
        const bool best = aim >= top;
        sum = block_sum(sum);
        if (SMOOTHING > 0 || STATISTICS) all = block_sum(all) / (float)VOCAB;
        if (SMOOTHING > 0) aim = FMA(SMOOTHING, all, (1.0f - SMOOTHING) * aim);
        of = m_log(sum) + (top - aim);
        got[0] = of;
        if (STATISTICS) {
            below = block_sum(below) / sum;
            squares = block_sum(squares);
            got[1] = m_log(sum) + top, got[2] = all, got[3] = m_log(sum) - below;
            got[4] = m_log(squares) - 2.0f * m_log(sum), got[5] = best;
        }
    }
    for (int i = 0; i < 6; i++)
        if (results[i] && threadIdx.x == 0) *results[i] = got[i];
    if (!slopes[0]) return;
    const float a = *slopes[0], b = STATISTICS ? *slopes[1] : 0.0f;
    const float c = STATISTICS ? *slopes[2] : 0.0f, d = STATISTICS ? *slopes[3] : 0.0f;
    const float even = (c - a * SMOOTHING) / (float)VOCAB, share = (a + b + d * below) / sum, turn = -d / sum;
    for (int v0 = 0; v0 < VOCAB; v0 += BLOCK) {
        const int v = v0 + (int)threadIdx.x;
        float y = of;
        if (counts && v < VOCAB) {
            const float x = STATISTICS ? m_max(row[v] - top, FAR) : row[v] - top;
            const float t = SOFTCAP > 0 ? row[v] / (SOFTCAP > 0 ? SOFTCAP : 1.0f) : 0.0f;
            const float hit = v == target ? a * (1.0f - SMOOTHING) : 0.0f;
            y = (FMA(m_exp(x), STATISTICS ? FMA(turn, x, share) : share, even) - hit) * FMA(-t, t, 1.0f);
        }
        /* A narrow gradient lies where logits of the first half of these were, and of those before. */
        if (NARROW) __syncthreads();
        if (v >= VOCAB) break;
        if (NARROW)
            ((bf16 *)row)[v] = f32_to_bf16(y);
        else
            row[v] = y;
    }
}
