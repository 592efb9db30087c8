/* What attention and its gradient share: register tiles of small products, a transposition, the exponential, chunks of keys.
 *
 * Enters: prelude.c and scalar.c before it in the unit. Leaves: attn_product, attn_product_t, attn_transpose, attn_widen, attn_value,
 * attn_values, attn_line, ATTN_UNIT, attn_exp, attn_exp2_narrow, attn_any_above, attn_greatest, attn_narrow, attn_pair_keys,
 * attn_across, attn_rows, ATTN_KEYS, ATTN_BLOCK, attn_chunk, attn_chunk_end.
 * Here so that a unit of several attention kernels holds it once. No slots.
 */
#include <string.h>

#define ATTN_KEYS 64 /* keys in a tile: part of the numerics */
#define ATTN_CHUNK 512 /* the least keys in a chunk, too: a multiple of the former */
#define ATTN_BLOCK 48 /* rows whose scores rest in the first-level cache: a multiple of VW and of six */
#if V_REGS == 32
#define ATTN_NV 4
#else
#define ATTN_NV 2
#endif
#define ATTN_EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)

/* Keys in the chunk that key j is of. Behind sixteen of the shortest, eight to sixteen chunks are as long as what lies before
 * them, so that a long sequence has a few dozens. */
INLINE int attn_chunk_keys(int j) {
    int keys = ATTN_CHUNK;
    while (j / 16 >= keys) keys *= 2;
    return keys;
}

/* The number of that chunk, and the first key behind it. */
INLINE int attn_chunk(int j) {
    int keys = attn_chunk_keys(j), doubled = 0;
    for (int n = ATTN_CHUNK; n < keys; n *= 2) doubled++;
    return 8 * doubled + j / keys;
}
INLINE int attn_chunk_end(int j) { return (j / attn_chunk_keys(j) + 1) * attn_chunk_keys(j); }

/* c[MR][NV * VW] (+)= a[MR][k0..k1) b[k0..k1)[NV * VW], k ascending, one accumulator an element. AT says where
 * a[r][k] lies: rows of a are rows of memory (`r * lda + k`) or its columns (`k * lda + r`); SPLAT and ADD are those of f32,
 * or of pairs of two bf16. */
#define ATTN_TILE(NAME, MR, NV, ...) ATTN_TILE_AS(static void, NAME, MR, NV, __VA_ARGS__)
#define ATTN_TILE_AS(KIND, NAME, MR, NV, AT, SPLAT, ADD)                                           \
    KIND NAME##_##MR##_##NV(const float *a, int64_t lda, const float *b, int64_t ldb,              \
                            float *c, int64_t ldc, int64_t k0, int64_t k1, int fresh) {            \
        vf acc[MR][NV];                                                                            \
        ATTN_EACH(r, MR) ATTN_EACH(n, NV)                                                          \
            acc[r][n] = fresh ? (vf){0} : v_load(c + r * ldc + n * VW);                            \
        for (int64_t k = k0; k < k1; k++) {                                                        \
            vf bv[NV];                                                                             \
            ATTN_EACH(n, NV) bv[n] = v_load(b + k * ldb + n * VW);                                 \
            ATTN_EACH(r, MR) {                                                                     \
                vf av = SPLAT(a[AT]);                                                              \
                ATTN_EACH(n, NV) acc[r][n] = ADD(av, bv[n], acc[r][n]);                            \
            }                                                                                      \
        }                                                                                          \
        ATTN_EACH(r, MR) ATTN_EACH(n, NV) v_store(c + r * ldc + n * VW, acc[r][n]);                \
    }

typedef void attn_tile(const float *, int64_t, const float *, int64_t, float *, int64_t, int64_t, int64_t, int);

#define ATTN_TILES(NAME, NV, ...)                                                                  \
    ATTN_TILE(NAME, 1, NV, __VA_ARGS__) ATTN_TILE(NAME, 2, NV, __VA_ARGS__)                        \
    ATTN_TILE(NAME, 4, NV, __VA_ARGS__) ATTN_TILE(NAME, 6, NV, __VA_ARGS__)
#define ATTN_ROW(NAME, NV) {0, NAME##_1_##NV, NAME##_2_##NV, 0, NAME##_4_##NV, 0, NAME##_6_##NV}
#if ATTN_NV == 4
#define ATTN_TABLE(NAME, ...)                                                                      \
    ATTN_TILES(NAME, 1, __VA_ARGS__) ATTN_TILES(NAME, 2, __VA_ARGS__) ATTN_TILES(NAME, 4, __VA_ARGS__) \
    static attn_tile *const NAME##s[3][7] = {ATTN_ROW(NAME, 1), ATTN_ROW(NAME, 2), ATTN_ROW(NAME, 4)};
#else
#define ATTN_TABLE(NAME, ...)                                                                      \
    ATTN_TILES(NAME, 1, __VA_ARGS__) ATTN_TILES(NAME, 2, __VA_ARGS__)                              \
    static attn_tile *const NAME##s[2][7] = {ATTN_ROW(NAME, 1), ATTN_ROW(NAME, 2)};
#endif
ATTN_TABLE(attn_tile_n, r *lda + k, v_splat, v_fma)
ATTN_TABLE(attn_tile_t, k *lda + r, v_splat, v_fma)
#if DOT_BF16_PAIRS
ATTN_TABLE(attn_tile_p, r *lda + k, dot_splat_word, dot_pair)
#endif

/* A whole tile where lengths of lines are literal: addresses that follow from them take no registers. */
#if ATTN_NV == 4
ATTN_TILE_AS(INLINE void, attn_whole_n, 6, 4, r *lda + k, v_splat, v_fma)
#define ATTN_WHOLE(NAME) \
    if (rows == 6 && cols == 4 * VW) return NAME##_6_4(a, lda, b, ldb, c, ldc, k0, k1, fresh)
#if DOT_BF16_PAIRS
ATTN_TILE_AS(INLINE void, attn_whole_p, 6, 4, r *lda + k, dot_splat_word, dot_pair)
#endif
#else
#define ATTN_WHOLE(NAME)
#endif

/* Rows taken at once when `left` remain. */
INLINE int attn_rows(int left) { return left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

INLINE void attn_by(attn_tile *const tiles[][7], int rows, const float *a, int64_t lda, const float *b, int64_t ldb,
                    float *c, int64_t ldc, int cols, int k0, int k1, int fresh) {
    for (int n = 0; n < cols;) {
        int left = (cols - n) / VW;
        int step = ATTN_NV == 4 && left >= 4 ? 2 : left >= 2 ? 1 : 0;
        tiles[step][rows](a, lda, b + n, ldb, c + n, ldc, k0, k1, fresh);
        n += VW << step;
    }
}

/* c[rows][cols] (+)= a[rows][k0..k1) b[k0..k1)[cols] */
INLINE void attn_product(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                         int64_t ldc, int cols, int k0, int k1, int fresh) {
    ATTN_WHOLE(attn_whole_n);
    attn_by(attn_tile_ns, rows, a, lda, b, ldb, c, ldc, cols, k0, k1, fresh);
}

#if DOT_BF16_PAIRS
/* As attn_product, of bf16 pairs. */
INLINE void attn_product_bf16_pairs(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                                    int64_t ldc, int cols, int k0, int k1, int fresh) {
    ATTN_WHOLE(attn_whole_p);
    attn_by(attn_tile_ps, rows, a, lda, b, ldb, c, ldc, cols, k0, k1, fresh);
}
#endif

/* c[rows][cols] (+)= a[k0..k1)[rows] transposed, times b[k0..k1)[cols] */
static void attn_product_t(int rows, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                           int64_t ldc, int cols, int k0, int k1, int fresh) {
    attn_by(attn_tile_ts, rows, a, lda, b, ldb, c, ldc, cols, k0, k1, fresh);
}

INLINE vf attn_zip_lo(vf a, vf b) {
#if VW == 16
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif VW == 8
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

INLINE vf attn_zip_hi(vf a, vf b) {
#if VW == 16
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif VW == 8
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

/* Transposes VW x VW in registers. */
#if VW == 8
/* Lines i and i + 4 meet in a vector as they are loaded, so that all that is left stays within halves of vectors: a shuffle across
 * halves takes longer. */
INLINE vf attn_halves(const float *low, const float *high) {
    typedef float half __attribute__((vector_size(16), aligned(4), may_alias));
    return __builtin_shufflevector(*(const half *)low, *(const half *)high, 0, 1, 2, 3, 4, 5, 6, 7);
}
#define ATTN_TRANSPOSE(LINE, to, ld_to)                                                            \
    _Pragma("GCC unroll 2") for (int w = 0; w < VW; w += 4) {                                      \
        vf x[4], y[4];                                                                             \
        ATTN_EACH(i, 4) x[i] = attn_halves(LINE(i) + w, LINE(i + 4) + w);                          \
        ATTN_EACH(i, 2) {                                                                          \
            y[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);      \
            y[i + 2] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15); \
        }                                                                                          \
        for (int i = 0; i < 4; i += 2) {                                                           \
            v_store(to + (w + i) * ld_to, __builtin_shufflevector(y[i], y[i + 1], 0, 1, 8, 9, 4, 5, 12, 13)); \
            v_store(to + (w + i + 1) * ld_to, __builtin_shufflevector(y[i], y[i + 1], 2, 3, 10, 11, 6, 7, 14, 15)); \
        }                                                                                          \
    }
#else
/* Each round of zips rotates the bits of (row, lane) by one. */
#define ATTN_TRANSPOSE(LINE, to, ld_to)                                                            \
    vf x[VW], y[VW];                                                                               \
    ATTN_EACH(i, VW / 2) { x[i] = v_load(LINE(i)); x[i + VW / 2] = v_load(LINE(i + VW / 2)); }     \
    _Pragma("GCC unroll 4") for (int w = 1; w < VW; w *= 2) {                                      \
        ATTN_EACH(i, VW / 2) {                                                                     \
            y[2 * i] = attn_zip_lo(x[i], x[i + VW / 2]);                                           \
            y[2 * i + 1] = attn_zip_hi(x[i], x[i + VW / 2]);                                       \
        }                                                                                          \
        ATTN_EACH(i, VW / 2) { x[2 * i] = y[2 * i]; x[2 * i + 1] = y[2 * i + 1]; }                 \
    }                                                                                              \
    ATTN_EACH(i, VW / 2) { v_store(to + i * ld_to, x[i]); v_store(to + (i + VW / 2) * ld_to, x[i + VW / 2]); }
#endif

INLINE void attn_transpose(const float *from, int64_t ld_from, float *to, int64_t ld_to) {
#define ATTN_LINE(i) (from + (i) * ld_from)
    ATTN_TRANSPOSE(ATTN_LINE, to, ld_to)
#undef ATTN_LINE
}

/* As attn_transpose, of lines anywhere in memory. */
INLINE void attn_transpose_lines(const float *const *from, float *to, int64_t ld_to) {
#define ATTN_LINE(i) from[i]
    ATTN_TRANSPOSE(ATTN_LINE, to, ld_to)
#undef ATTN_LINE
}

/* The greatest lane, or the sum of the lanes, of each of VW vectors: that of vector i in lane i. Each round of zips halves the lanes of two
 * vectors side by side. */
INLINE vf attn_across(const float (*from)[VW], int sums) {
    vf x[VW];
    ATTN_EACH(i, VW / 2) { x[i] = v_load(from[i]); x[i + VW / 2] = v_load(from[i + VW / 2]); }
    _Pragma("GCC unroll 4") for (int half = VW / 2; half > 0; half /= 2)
        ATTN_EACH(i, half) {
            vf low = attn_zip_lo(x[i], x[i + half]), high = attn_zip_hi(x[i], x[i + half]);
            x[i] = sums ? low + high : v_max(high, low);
        }
    return x[0];
}

typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vh_loose __attribute__((vector_size(2 * VW), aligned(2), may_alias));

/* VW numbers of bf16 as f32. */
INLINE vf attn_widen(const void *from) {
#if defined(__AVX512F__) && !defined(__clang__)
    typedef short half __attribute__((vector_size(32)));
    typedef int whole __attribute__((vector_size(64)));
    half h = (half) * (const vh_loose *)from;
    return (vf)((vu)__builtin_ia32_pmovzxwd512_mask(h, (whole){0}, (uint16_t)-1) << 16);
#elif VW == 8 && defined(__AVX2__) && !defined(__clang__)
    typedef short half __attribute__((vector_size(16)));
    return (vf)((vu)__builtin_ia32_pmovzxwd256((half) * (const vh_loose *)from) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_loose *)from, vu) << 16);
#endif
}

typedef int32_t vi __attribute__((vector_size(4 * VW)));

/* What attn_value gives of a code, times this, is its value: e4m3 comes as the f16 of the same bits. */
#define ATTN_UNIT(kind) ((kind) == 2 ? 256.0f : 1.0f)

/* Values of the codes in the lowest bytes, in units: integers (kind 1), or floats of 1.4.3 bits (kind 2), of which those of exponent 0
 * have no leading one and 0x7f is none. bf16 holds each of them. */
INLINE vf attn_value(int kind, vu code) {
    if (kind == 1) return __builtin_convertvector((vi)(code << 24) >> 24, vf);
    vu exponent = code >> 3 & 15, low = (vu)(exponent == 0) & 1, mantissa = (code & 7) | (8 & (low - 1));
    vf value = __builtin_convertvector((vi)mantissa, vf) * (vf)((exponent + low + 109) << 23);
    return (vf)((vu)value | (code & 128) << 24 | (vu)((code & 127) == 127));
}

/* The same of VW codes in memory; compilers take vectors of bytes apart one by one. */
INLINE vf attn_values(int kind, const void *from) {
    typedef uint8_t bytes __attribute__((vector_size(VW), aligned(1), may_alias));
#if VW >= 8 && defined(__AVX2__)
    typedef uint16_t halves __attribute__((vector_size(2 * VW)));
    if (kind == 1) {
        vi wide;
        __asm__("vpmovsxbd %1, %0" : "=v"(wide) : "m"(*(const bytes *)from));
        return __builtin_convertvector(wide, vf);
    }
    halves half;
    vf value;
    __asm__("vpmovsxbw %1, %0" : "=v"(half) : "m"(*(const bytes *)from));
    half = (half << 7) & 0xbfff;
    half |= (halves)((half & 0x3f80) == 0x3f80);
    __asm__("vcvtph2ps %1, %0" : "=v"(value) : "v"(half));
    return value;
#else
    return attn_value(kind, __builtin_convertvector(*(const bytes *)from, vu));
#endif
}

#if defined(DOT_PAIRS)
/* The same of 32 codes, as bf16. */
INLINE dot_q8 attn_line(int kind, const void *codes) {
    const uint8_t *from = codes;
    typedef uint16_t v32h __attribute__((vector_size(64)));
    vf low = attn_values(kind, from), high = attn_values(kind, from + 16);
    return (dot_q8)__builtin_shufflevector((v32h)low, (v32h)high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33,
                                           35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}
#endif

/* exp for weights relative to a maximum, x <= 0 but for rounding: below e^-87 a weight is 0. */
INLINE float attn_exp(float x) {
    float c = x < -87.0f ? -87.0f : x;
    float t = FMA(c, 1.44269504f, 12582912.0f), p = m_exp_rest(c, t - 12582912.0f);
    float v = bits_f32(f32_bits(p) + (f32_bits(t) << 23));
    v = x < -87.0f ? 0.0f : v;
    return x == x ? v : x;
}

#if DOT_BF16_PAIRS
/* 2^x for weights that are rounded to bf16, x < 127: within 2^-18, never below 2^-126, which a sum of weights does not feel. NaN stays. */
INLINE vf attn_exp2_narrow(vf x) {
    const vf magic = v_splat(12582912.0f);
    x = v_max(v_splat(-126.0f), x);
    vf t = x + magic, r = x - (t - magic);
    vf p = v_fma(r, v_splat(9.582818386e-03f), v_splat(5.590637020e-02f));
    p = v_fma(p, r, v_splat(2.402409887e-01f));
    p = v_fma(p, r, v_splat(6.931241998e-01f));
    p = v_fma(p, r, v_splat(1.0f));
    return (vf)((vu)p + ((vu)t << 23));
}

/* Whether a lane is above a limit; NaN is not. */
INLINE int attn_any_above(vf x, float limit) {
    uint16_t lanes;
    __asm__("vcmpps $30, %2, %1, %0" : "=k"(lanes) : "v"(x), "v"(v_splat(limit)));
    return lanes != 0;
}

/* The greatest lane; one that is no number may hide others. */
INLINE float attn_greatest(vf x) {
    x = v_max(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7), x);
    x = v_max(__builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11), x);
    x = v_max(__builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), x);
    x = v_max(__builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), x);
    return x[0];
}

/* 2 * VW numbers as bf16, of which neighbours share a word. */
INLINE vf attn_narrow(vf low, vf high) {
    vf words;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(words) : "v"(low), "v"(high));
    return words;
}

/* 32 columns of two keys: words of both keys' values, sixteen columns each. */
INLINE void attn_pair_keys(dot_q8 first, dot_q8 second, vf *words) {
    words[0] = (vf)__builtin_shufflevector((dot_h32)first, (dot_h32)second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
    words[1] = (vf)__builtin_shufflevector((dot_h32)first, (dot_h32)second, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54,
                                           23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}
#endif
