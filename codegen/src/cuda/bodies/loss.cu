/* A token's logits become its loss, and their own gradient in place; a row a block.
 *
 * Enters: values.cu; BLOCK; as constants VOCAB; SMOOTHING, SOFTCAP (0: none); NARROW (1: gradients are rounded to bf16 values).
 * Leaves: loss_capped, loss_row. A target below 0 is ignored, one from VOCAB on makes the token's results NaN.
 */
METHOD float loss_capped(float x) {
    return SOFTCAP > 0 ? SOFTCAP * m_tanh(x / (SOFTCAP > 0 ? SOFTCAP : 1.0f)) : x;
}

METHOD float loss_kept(float x) { return NARROW ? bf16_to_f32(f32_to_bf16(x)) : x; }

/* `loss` and `slope`, the loss's cotangent, may be null. */
METHOD void loss_row(float *row, int target, const float *slope, float *loss) {
    const bool counts = target >= 0 && target < VOCAB;
    float of = target < 0 ? 0.0f : NAN_F, top = -INF_F, sum = 0.0f, all = 0.0f;
    if (counts) {
        for (int v = (int)threadIdx.x; v < VOCAB; v += BLOCK) top = m_max(top, row[v]);
        top = block_max(top);
        for (int v = (int)threadIdx.x; v < VOCAB; v += BLOCK) {
            sum += m_exp(row[v] - top);
            if (SMOOTHING > 0) all += row[v];
        }
        float aim = row[target];
        sum = block_sum(sum);
        if (SMOOTHING > 0) aim = FMA(SMOOTHING, block_sum(all) / (float)VOCAB, (1.0f - SMOOTHING) * aim);
        of = m_log(sum) + (top - aim);
    }
    if (loss && threadIdx.x == 0) *loss = of;
    if (!slope) return;
    const float even = SMOOTHING / (float)VOCAB, share = 1.0f / sum, by = *slope;
    for (int v = (int)threadIdx.x; v < VOCAB; v += BLOCK) {
        float d = of;
        if (counts) {
            const float x = row[v], t = SOFTCAP > 0 ? x / (SOFTCAP > 0 ? SOFTCAP : 1.0f) : 0.0f;
            d = by * FMA(m_exp(x - top), share, v == target ? -(even + (1.0f - SMOOTHING)) : -even) * FMA(-t, t, 1.0f);
        }
        row[v] = loss_kept(d);
    }
}
