/* The part of the host dot that is written once per translation unit for weights stored as codes, after `dot_core.c` and `dot_amx.c`.
 *
 * Enters: panels of codes and of their scales. Leaves: f32 sums, or blocks of panels for the tiles. A sum is that of its groups:
 * within a group products with the values of codes are summed as everywhere, from zero; that sum times the group's scale is added
 * to the whole, in one rounding, and where groups have offsets the sum of the group's activations times the offset in another. Scales thus cost one operation a group, and a row alone has the bits that it has among others.
 *
 * Layouts
 *   int4    [ceil(N/32)][K/8][32] words: eight neighbours along k, the first in the lowest bits, each 8 more than its value
 *   fp4     the same of e2m1
 *   int8    [ceil(N/32)][K][32] signed bytes
 *   fp8     [ceil(N/32)][K][32] e4m3
 *   scales  [ceil(N/32)][K/group][32] f32, bf16 or f16; offsets likewise
 */
#define DOT_INT4 0
#define DOT_INT8 1
#define DOT_FP8 2
#define DOT_FP4 3
#define DOT_CODE_BYTES(kind, k) ((kind) == DOT_INT4 || (kind) == DOT_FP4 ? (k) * DOT_NR / 2 : (k) * DOT_NR) /* of a panel of so many k */

typedef int32_t dot_vi __attribute__((vector_size(4 * DOT_LANES)));
typedef int8_t dot_vb_any __attribute__((vector_size(DOT_LANES), aligned(1), may_alias));
typedef uint8_t dot_vub_any __attribute__((vector_size(DOT_LANES), aligned(1), may_alias));
typedef uint16_t dot_vh_any __attribute__((vector_size(2 * DOT_LANES), aligned(2), may_alias));

/* DOT_LANES bytes as integers; compilers take vectors of bytes apart one by one. */
#if DOT_LANES >= 8
#define DOT_BYTES(name, instruction)                                                                                   \
    DOT_INLINE dot_vi name(const uint8_t *at)                                                                          \
    {                                                                                                                  \
        dot_vi wide;                                                                                                   \
        __asm__(instruction " %1, %0" : "=v"(wide) : "m"(*(const dot_vub_any *)at));                                  \
        return wide;                                                                                                   \
    }
DOT_BYTES(dot_signed, "vpmovsxbd")
DOT_BYTES(dot_unsigned, "vpmovzxbd")
#else
DOT_INLINE dot_vi dot_signed(const uint8_t *at) { return __builtin_convertvector(*(const dot_vb_any *)at, dot_vi); }
DOT_INLINE dot_vi dot_unsigned(const uint8_t *at) { return __builtin_convertvector(*(const dot_vub_any *)at, dot_vi); }
#endif

/* A turn's codes written out one by one; of narrow vectors there are so many that compilers would take minutes. */
#if DOT_LANES >= 8
#define DOT_UNROLL_CODES _Pragma("GCC unroll 8")
#else
#define DOT_UNROLL_CODES _Pragma("GCC unroll 1")
#endif

/* 1.4.3 bits without infinities: numbers of exponent 0 have no leading one, 0x7f is none. */
DOT_INLINE dot_vf dot_fp8(dot_vu code)
{
    dot_vu exponent = code >> 3 & 15, low = (dot_vu)(exponent == 0) & 1;
    dot_vu mantissa = (code & 7) | (8 & (low - 1));
    dot_vf value = __builtin_convertvector((dot_vi)mantissa, dot_vf) * (dot_vf)((exponent + low + 117) << 23);
    return (dot_vf)((dot_vu)value | (code & 128) << 24 | (dot_vu)((code & 127) == 127));
}

/* Of the four lowest bits: integers 8 more than their values, or 1.2.1 bits, of which those of exponent 0 have no leading one. */
#if defined(__AVX512F__)
DOT_INLINE dot_vf dot_look_up(int kind, dot_vu at)
{
    dot_vf whole = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    dot_vf real = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    __asm__("vpermps %1, %0, %0" : "+v"(at) : "v"(kind == DOT_INT4 ? whole : real));
    return (dot_vf)at;
}
#else
DOT_INLINE dot_vf dot_look_up(int kind, dot_vu at)
{
    if (kind == DOT_INT4) return __builtin_convertvector((dot_vi)(at & 15), dot_vf) - 8;
    dot_vu exponent = at >> 1 & 3, low = (dot_vu)(exponent == 0) & 1, mantissa = (at & 1) | (2 & (low - 1));
    dot_vf value = __builtin_convertvector((dot_vi)mantissa, dot_vf) * (dot_vf)((exponent + low + 125) << 23);
    return (dot_vf)((dot_vu)value | (at & 8) << 28);
}
#endif

/* Values of the codes of k in DOT_LANES columns from j on; k is less than 8. */
DOT_INLINE dot_vf dot_value(int kind, const uint8_t *w, int k, int j)
{
    if (kind == DOT_INT4 || kind == DOT_FP4) return dot_look_up(kind, dot_load_u(w + 4 * j) >> (4 * k));
    w += k * DOT_NR + j;
    if (kind == DOT_INT8) return __builtin_convertvector(dot_signed(w), dot_vf);
    return dot_fp8((dot_vu)dot_unsigned(w));
}

/* Scales of DOT_LANES columns. */
DOT_INLINE dot_vf dot_scale(int type, const void *scales, int64_t at)
{
    if (type == 0) return dot_load((const float *)scales + at);
    dot_vh_any narrow = *(const dot_vh_any *)((const uint16_t *)scales + at);
    if (type == 1) return (dot_vf)(__builtin_convertvector(narrow, dot_vu) << 16);
    dot_vf wide;
#if DOT_LANES >= 8
    __asm__("vcvtph2ps %1, %0" : "=v"(wide) : "v"(narrow)); /* subnormals too, where arithmetic flushes them */
#else
    for (int i = 0; i < DOT_LANES; i++) wide[i] = f16_to_f32(narrow[i]);
#endif
    return wide;
}

#if defined(DOT_AMX_ROWS)
#define DOT_CODES_FLUSH uint32_t before_ = dot_flush()
#define DOT_CODES_UNFLUSH dot_unflush(before_)
#else
#define DOT_CODES_FLUSH
#define DOT_CODES_UNFLUSH
#endif

/* Sums of the groups of a row, f32 or bf16, in lanes that are added in order. */
DOT_INLINE void dot_sum_groups(float *to, const void *row, int bf16, int64_t sum, int64_t group)
{
    for (int64_t g = 0; g < sum; g += group, to++) {
        float lanes[16] = {0};
        for (int64_t k = g; k < g + group; k += 16)
            for (int i = 0; i < 16; i++) lanes[i] += dot_widen(row, bf16, k + i);
        *to = lanes[0];
        for (int i = 1; i < 16; i++) *to += lanes[i];
    }
}

/* One row by np panels (a literal). `chains`: 1 is the chain of fused multiply-adds of vectors; 2 are the matrix unit's, one of 16
 * even and one of 16 odd k, added to the group's sum. */
DOT_INLINE void dot_codes_row(int kind, int np, int chains, const float *a, const uint8_t *w, const void *scales, int type,
                              const void *offsets, const float *sums, int64_t sum, int64_t group, float *c)
{
    enum { wide = DOT_NR / DOT_LANES };
    int64_t panel = DOT_CODE_BYTES(kind, sum), groups = sum / group, step = group % 32 ? 16 : 32;
    const uint8_t *begin = w;
    dot_vf whole[4][wide];
    for (int p = 0; p < np; p++)
        for (int j = 0; j < wide; j++) whole[p][j] = (dot_vf){0};
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++) {
        dot_vf part[4][wide];
        for (int p = 0; p < np; p++)
            for (int j = 0; j < wide; j++) part[p][j] = (dot_vf){0};
#pragma GCC unroll 1
        for (int64_t k = 0; k < group; k += step, a += step) {
            dot_vf even[4][wide], odd[4][wide];
            for (int p = 0; p < np; p++)
                for (int j = 0; j < wide; j++) even[p][j] = chains == 1 ? part[p][j] : (dot_vf){0}, odd[p][j] = (dot_vf){0};
            /* Beyond the ends of these panels lie those that come next. */
            int64_t far = DOT_PREFETCH_BYTES + (w - begin + DOT_PREFETCH_BYTES < panel ? 0 : (np - 1) * panel);
            DOT_UNROLL_CODES
            for (int i = 0; i < step; i += 8, w += DOT_CODE_BYTES(kind, 8)) {
#pragma GCC unroll 4
                for (int p = 0; p < np; p++)
#pragma GCC unroll 4
                    for (int line = 0; line < DOT_CODE_BYTES(kind, 8); line += 64)
                        __builtin_prefetch(w + p * panel + line + far, 0, 3);
                DOT_UNROLL_CODES
                for (int s = 0; s < 8; s++) {
                    dot_vf x = dot_splat(a[i + s]);
#pragma GCC unroll 4
                    for (int p = 0; p < np; p++)
#pragma GCC unroll 8
                        for (int j = 0; j < wide; j++) {
                            dot_vf v = dot_value(kind, w + p * panel, s, j * DOT_LANES);
                            dot_vf *to = chains == 2 && s % 2 ? &odd[p][j] : &even[p][j];
                            *to = dot_fma(x, v, *to);
                        }
                }
            }
            for (int p = 0; p < np; p++)
                for (int j = 0; j < wide; j++) part[p][j] = chains == 1 ? even[p][j] : part[p][j] + (even[p][j] + odd[p][j]);
        }
        for (int p = 0; p < np; p++)
            for (int j = 0; j < wide; j++) {
                int64_t at = (p * groups + g) * DOT_NR + j * DOT_LANES;
                whole[p][j] = dot_fma(dot_scale(type, scales, at), part[p][j], whole[p][j]);
                if (offsets) whole[p][j] = dot_fma(dot_scale(type, offsets, at), dot_splat(sums[g]), whole[p][j]);
            }
    }
    for (int p = 0; p < np; p++)
        for (int j = 0; j < wide; j++) dot_save(c + p * DOT_NR + j * DOT_LANES, whole[p][j]);
}

/* sums[rows][32] += scale * parts[rows][32], and the offset times the sum of the row's group, which lie `step` apart. */
DOT_INLINE void dot_codes_add(float *sums, const float *parts, int64_t rows, const void *scales, int type, int first,
                              const void *offsets, const float *groups, int64_t step)
{
    dot_vf scale[DOT_NR / DOT_LANES], offset[DOT_NR / DOT_LANES];
    for (int j = 0; j < DOT_NR / DOT_LANES; j++) {
        scale[j] = dot_scale(type, scales, j * DOT_LANES);
        if (offsets) offset[j] = dot_scale(type, offsets, j * DOT_LANES);
    }
    for (int64_t r = 0; r < rows; r++, sums += DOT_NR, parts += DOT_NR, groups += step)
        for (int j = 0; j < DOT_NR / DOT_LANES; j++) {
            dot_vf sum = first ? (dot_vf){0} : dot_load(sums + j * DOT_LANES);
            sum = dot_fma(scale[j], dot_load(parts + j * DOT_LANES), sum);
            if (offsets) sum = dot_fma(offset[j], dot_splat(*groups), sum);
            dot_save(sums + j * DOT_LANES, sum);
        }
}

/* The values of `count` k from k on, [count][32] f32. A multiple of 8 each. */
DOT_INLINE void dot_codes_block(int kind, float *restrict to, const uint8_t *panel, int64_t k, int64_t count)
{
    panel += DOT_CODE_BYTES(kind, k);
    for (int64_t i = 0; i < count; i += 8, panel += DOT_CODE_BYTES(kind, 8))
        DOT_UNROLL_CODES
        for (int s = 0; s < 8; s++, to += DOT_NR)
            for (int j = 0; j < DOT_NR; j += DOT_LANES) dot_save(to + j, dot_value(kind, panel, s, j));
}

/* The same as pairs of bf16, [count / 2][32]; values of codes are bf16 values. */
DOT_INLINE void dot_codes_pairs(int kind, uint32_t *restrict to, const uint8_t *panel, int64_t k, int64_t count)
{
    panel += DOT_CODE_BYTES(kind, k);
    for (int64_t i = 0; i < count; i += 8, panel += DOT_CODE_BYTES(kind, 8))
#pragma GCC unroll 4
        for (int s = 0; s < 8; s += 2, to += DOT_NR)
            for (int j = 0; j < DOT_NR; j += DOT_LANES) {
                dot_vu low = (dot_vu)dot_value(kind, panel, s, j), high = (dot_vu)dot_value(kind, panel, s + 1, j);
                *(dot_vu_any *)(to + j) = low >> 16 | (high & 0xffff0000u);
            }
}
