/* Packs a weight for the host dot: row-major [N, K] of f32, bf16 or f16 enters, panels as `dot_core.c` describes
 * leave. Written once per translation unit, after `dot_core.c`. Panels are independent of each other. */

enum dot_type { DOT_TYPE_F32, DOT_TYPE_BF16, DOT_TYPE_F16 };

DOT_INLINE float dot_float(uint32_t bits)
{
    union { uint32_t u; float f; } x = {bits};
    return x.f;
}

/* Scaling by 2^112 moves the exponent's bias and makes subnormals normal, exactly; infinity and NaN keep all ones. */
DOT_INLINE float dot_half(uint16_t h)
{
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    uint32_t scaled = dot_bits(dot_float(magnitude) * 0x1p112f);
    return dot_float((magnitude < 0x0f800000u ? scaled : magnitude | 0x7f800000u) | (uint32_t)(h & 0x8000) << 16);
}

DOT_INLINE float dot_element(const void *src, enum dot_type type, int64_t i)
{
    if (type == DOT_TYPE_F16) return dot_half(((const uint16_t *)src)[i]);
    return dot_widen(src, type == DOT_TYPE_BF16, i);
}

/* To nearest, ties to even; a NaN stays one. */
DOT_INLINE uint32_t dot_round_bf16(float x)
{
    uint32_t u = dot_bits(x);
    return x != x ? (u >> 16 | 0x40) : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

#define DOT_STAGE 256 /* columns of k staged at a time, so that the transposition works in cache */

/* Packs columns k0 .. k0 + kc of a panel: `n` rows of src, length k, as f32 or (bf16) rounded into pairs. */
DOT_INLINE void dot_pack_block(float *to, const void *src, enum dot_type type, int bf16, int64_t k, int64_t k0, int kc,
                               int n)
{
    float stage[DOT_NR * DOT_STAGE] __attribute__((aligned(64)));
    for (int j = 0; j < n; j++) {
        float *row = stage + j * DOT_STAGE;
        for (int i = 0; i < kc; i++) row[i] = dot_element(src, type, j * k + k0 + i);
        if (kc % 2) row[kc] = 0;
        for (int i = 0; bf16 && i < kc; i += 2)
            row[i / 2] = dot_float(dot_round_bf16(row[i]) | dot_round_bf16(row[i + 1]) << 16);
    }
    dot_panel_nk(to, stage, 0, DOT_STAGE, bf16 ? (kc + 1) / 2 : kc, n);
}

/* Packs panels begin .. end of `src` [n, k]; `to` is the whole weight: ceil(n/32) panels of k * 32 f32 values, or (bf16)
 * of ceil(k/2) * 32 words of two values. Values narrow to nearest, ties to even. */
void dot_pack(void *to, const void *src, int type, int bf16, int64_t n, int64_t k, int64_t begin, int64_t end)
{
    int64_t depth = bf16 ? (k + 1) / 2 : k, size = type == DOT_TYPE_F32 ? 4 : 2;
    for (int64_t p = begin; p < end; p++) {
        int valid = n - p * DOT_NR < DOT_NR ? (int)(n - p * DOT_NR) : DOT_NR;
        const void *rows = (const char *)src + p * DOT_NR * k * size;
        for (int64_t k0 = 0; k0 < k; k0 += DOT_STAGE) {
            int kc = k - k0 < DOT_STAGE ? (int)(k - k0) : DOT_STAGE;
            float *block = (float *)to + (p * depth + (bf16 ? k0 / 2 : k0)) * DOT_NR;
            if (type == DOT_TYPE_F32) dot_pack_block(block, rows, DOT_TYPE_F32, bf16, k, k0, kc, valid);
            else if (type == DOT_TYPE_BF16) dot_pack_block(block, rows, DOT_TYPE_BF16, bf16, k, k0, kc, valid);
            else dot_pack_block(block, rows, DOT_TYPE_F16, bf16, k, k0, kc, valid);
        }
    }
}
