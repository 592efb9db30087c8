/* The part of the host dot that is written once per translation unit for integer codes by rows that are rounded to integers, after
 * `dot_codes.c`.
 *
 * Enters: rows of f32; panels of codes and of their scales. Leaves: f32 sums. A group of a row is rounded to integers of eight bits with a
 * scale; products of integers are summed exactly, so that each instruction set has the same sum of a group, whatever the number of rows.
 * That sum times the row's scale is added to the sum of the weight's group, and that times the weight's scale to the whole: one rounding
 * each, in the order of k.
 *
 * Layouts
 *   int4, scales, offsets   those of `dot_codes.c`; a word has four even and four odd k
 *   int8                    [ceil(N/32)][K/4][32][4] signed bytes
 *   rows                    tile of mr rows: [K/chunk][mr][chunk] bytes, chunk 32 or 64; for int4 each eight k as four even and four odd
 */
#define DOT_ROUNDED_MOST 192 /* numbers of a group of a row */
/* Instructions of 256-bit vectors that multiply unsigned by signed bytes and add neighbours, in 16 bits (without AVX_VNNI). */
#if DOT_LANES == 8 && !defined(__AVXVNNI__)
#define DOT_BY_HALVES 1
#else
#define DOT_BY_HALVES 0
#endif
/* What codes are more than their values, as unsigned bytes; by halves those of eight bits are signed. */
#define DOT_MORE(kind) ((kind) == DOT_INT4 ? 8 : DOT_BY_HALVES ? 0 : 128)
#if DOT_LANES == 16
#define DOT_INTEGER_ROWS 7
#define DOT_INTEGER_PANELS DOT_ROW_PANELS /* of a row alone, at most DOT_INTEGER_ROWS */
#else
#define DOT_INTEGER_ROWS 2
/* int4 reads so little that one panel after another is best. */
#define DOT_INTEGER_PANELS (DOT_BY_HALVES && DOT_CODE == DOT_INT8 ? DOT_ROW_PANELS : 1)
#endif
#if defined(DOT_AMX_ROWS) && (defined(__AMX_INT8__) || defined(DOT_AMX_MODEL))
#define DOT_AMX_INTEGERS 1
#define DOT_AMX_PARTS 4 /* groups whose sums wait in the first-level cache */
#else
#define DOT_AMX_INTEGERS 0
#endif

/* A tile of so many rows, at most DOT_INTEGER_ROWS: TILE(rows, panels) takes literals. */
#if DOT_INTEGER_ROWS == 7
#define DOT_BY_HEIGHT(rows, TILE)                                                                                      \
    switch (rows) {                                                                                                    \
    case 7: TILE(7, 1); break;                                                                                         \
    case 6: TILE(6, 1); break;                                                                                         \
    case 5: TILE(5, 1); break;                                                                                         \
    case 4: TILE(4, 1); break;                                                                                         \
    case 3: TILE(3, 1); break;                                                                                         \
    case 2: TILE(2, 1); break;                                                                                         \
    default: TILE(1, 1);                                                                                               \
    }
#else
#define DOT_BY_HEIGHT(rows, TILE)                                                                                      \
    if ((rows) == 2) TILE(2, 1); else TILE(1, 1)
#endif

/* Of `rows` rows of `sum` integers, which lie at the begin of scratch: row m's scales, a group each; behind all of them its corrections;
 * behind those, where groups of weights have offsets, its sums of these. */
DOT_INLINE float *dot_row_scales(const void *scratch, int64_t rows, int64_t sum, int64_t rounded, int64_t m)
{
    return (float *)((char *)scratch + rows * sum) + m * (sum / rounded);
}
DOT_INLINE int32_t *dot_row_minus(const void *scratch, int64_t rows, int64_t sum, int64_t rounded, int64_t m)
{
    return (int32_t *)dot_row_scales(scratch, rows, sum, rounded, rows + m);
}
DOT_INLINE float *dot_row_sums(const void *scratch, int64_t rows, int64_t sum, int64_t rounded, int64_t group, int64_t m)
{
    return dot_row_scales(scratch, rows, sum, rounded, 2 * rows) + m * (sum / group);
}

DOT_INLINE dot_vi dot_splat_int(int32_t x) { return x + (dot_vi){0}; }

#if defined(__SSE2__)
/* sum + the products of both halves, signed, of each lane. */
DOT_INLINE dot_vi dot_halves(dot_vi sum, dot_vi a, dot_vi b)
{
#if DOT_LANES >= 8
    __asm__("vpmaddwd %1, %0, %0" : "+v"(a) : "v"(b));
#else
    __asm__("pmaddwd %1, %0" : "+x"(a) : "x"(b));
#endif
    return sum + a;
}
#endif

/* sum + the products of four unsigned bytes of w by four signed bytes of x, in each lane. */
DOT_INLINE dot_vi dot_quads(dot_vi sum, dot_vu w, dot_vi x)
{
#if DOT_LANES == 8 && defined(__AVXVNNI__)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#elif defined(__SSE2__)
    /* Bytes 0 and 2, then 1 and 3, as halves of 16 bits. */
    typedef int16_t halves __attribute__((vector_size(4 * DOT_LANES)));
    halves even = (halves)(x << 8) >> 8, odd = (halves)x >> 8;
    sum = dot_halves(sum, (dot_vi)(w & 0x00ff00ff), (dot_vi)even);
    sum = dot_halves(sum, (dot_vi)(w >> 8 & 0x00ff00ff), (dot_vi)odd);
#else
    for (int i = 0; i < 4; i++) sum += (dot_vi)(w >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
#endif
    return sum;
}

typedef int32_t dot_four_any __attribute__((aligned(1), may_alias));

/* The same by four bytes of a row for every column, which instructions of whole vectors take from memory. */
DOT_INLINE dot_vi dot_four(dot_vi sum, dot_vu w, const int8_t *x)
{
#if DOT_LANES == 16 && defined(__AVX512VNNI__)
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const dot_four_any *)x));
    return sum;
#else
    int32_t word;
    memcpy(&word, x, 4);
    return dot_quads(sum, w, dot_splat_int(word));
#endif
}

/* DOT_LANES columns' codes of four k as unsigned bytes, `half` 0 or 1 of eight k at w; j is the first column. */
DOT_INLINE dot_vu dot_unsigned_codes(int kind, const uint8_t *w, int half, int j)
{
    if (kind == DOT_INT4) return dot_load_u(w + 4 * j) >> (4 * half) & 0x0f0f0f0f;
    return dot_load_u(w + half * 4 * DOT_NR + 4 * j) ^ 0x80808080;
}

#if DOT_BY_HALVES
/* sums[p * mr + r] += the products of 32 k of the rows x, `chunk` apart, by np panels at w, `panel` apart; mr and np are literals, one of
 * them 1. Products of int4 are so small that eight pairs of them fit into 16 bits (8 * 2 * 15 * 127); of int8 one pair does, of magnitudes
 * by bytes with the sign of the product. */
DOT_INLINE void dot_add_halves(int kind, int mr, int np, const int8_t *x, int64_t chunk, const uint8_t *w, int64_t panel,
                               dot_vi (*sums)[DOT_NR / 8])
{
    enum { wide = DOT_NR / 8 };
    typedef int16_t halves __attribute__((vector_size(32)));
    const halves ones = (halves){0} + 1;
    halves parts[2][wide];
    for (int n = 0; n < mr * np; n++)
        for (int j = 0; j < wide; j++) parts[n][j] = (halves){0};
#pragma GCC unroll 8
    for (int k = 0; k < 32; k += 4) {
        dot_vi row[2];
        for (int r = 0; r < mr; r++) {
            int32_t word;
            memcpy(&word, x + r * chunk + k, 4);
            row[r] = dot_splat_int(word);
        }
#pragma GCC unroll 8
        for (int j = 0; j < np * wide; j++) {
            const dot_vu_any *at =
                (const dot_vu_any *)(w + j / wide * panel + DOT_CODE_BYTES(kind, kind == DOT_INT4 ? k & ~7 : k) + j % wide * 32);
            dot_vu size;
            if (kind == DOT_INT4) size = *at >> (k & 4) & 0x0f0f0f0f;
            else __asm__("vpabsb %1, %0" : "=x"(size) : "m"(*at));
            for (int r = 0; r < mr; r++) {
                int n = j / wide * mr + r;
                halves pairs;
                if (kind == DOT_INT4)
                    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                            : "+x"(parts[n][j % wide]), "=&x"(pairs) : "x"(size), "x"(row[r]));
                else
                    __asm__("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
                            : "+x"(sums[n][j % wide]), "=&x"(pairs) : "x"(size), "m"(*at), "x"(row[r]), "x"(ones));
            }
        }
    }
    for (int n = 0; n < (kind == DOT_INT4 ? mr * np : 0); n++)
        for (int j = 0; j < wide; j++) sums[n][j] = dot_halves(sums[n][j], (dot_vi)parts[n][j], (dot_vi)ones);
}
#endif

/* Rounds a group of a row to integers, one after another in `codes`. Returns the scale; `sum` becomes that of the integers. */
DOT_INLINE float dot_round_group(const float *row, int64_t group, int32_t *codes, int32_t *sum)
{
    dot_vi top = {0}, total = {0};
    for (int64_t i = 0; i < group; i += DOT_LANES) {
        /* Bits of magnitudes are in the order of the magnitudes, those of what is no number above all. */
        dot_vi bits = (dot_vi)(dot_load_u(row + i) & 0x7fffffff), greater = bits > top;
        top = (bits & greater) | (top & ~greater);
    }
    int32_t lanes[DOT_LANES], most = 0;
    memcpy(lanes, &top, sizeof top);
    for (int i = 0; i < DOT_LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    *sum = 0;
    if (most >= 0x7f800000 || most < (127 - 100) << 23) {
        for (int64_t i = 0; i < group; i++) codes[i] = 0;
        return most >= 0x7f800000 ? NAN_F : 0.0f;
    }
    float greatest = bits_f32((uint32_t)most);
    dot_vf by = dot_splat(127.0f / greatest), whole = dot_splat(12582912.0f); /* 1.5 * 2^23: an addition rounds to integers there */
    for (int64_t i = 0; i < group; i += DOT_LANES) {
        dot_vi code = (dot_vi)(dot_load(row + i) * by + whole) - (dot_vi)whole;
        total += code;
        memcpy(codes + i, &code, sizeof code);
    }
    memcpy(lanes, &total, sizeof total);
    for (int i = 0; i < DOT_LANES; i++) *sum += lanes[i];
    return greatest / 127.0f;
}

/* Integers as bytes; for int4 each eight as four even and four odd. */
DOT_INLINE void dot_place_codes(int kind, int8_t *restrict to, const int32_t *restrict codes, int64_t count)
{
    if (kind == DOT_INT8) {
        for (int64_t i = 0; i < count; i++) to[i] = (int8_t)codes[i];
        return;
    }
    for (int64_t i = 0; i < count; i += 8)
        for (int k = 0; k < 4; k++) to[i + k] = (int8_t)codes[i + 2 * k], to[i + 4 + k] = (int8_t)codes[i + 2 * k + 1];
}

/* A row of `count` numbers: integers in chunks that lie `step` bytes apart, for each group a scale and by how much codes that are more
 * than their values make its sum too great; where groups of weights have offsets, the sums of those. */
DOT_INLINE void dot_round_row(int kind, const float *row, int64_t count, int64_t rounded, int8_t *to, int64_t chunk, int64_t step,
                              float *scales, int32_t *minus, float *sums, int64_t group)
{
    int32_t codes[DOT_ROUNDED_MOST] __attribute__((aligned(64)));
    float part = 0;
    for (int64_t k = 0; k < count; k += rounded) {
        int32_t sum;
        *scales = dot_round_group(row + k, rounded, codes, &sum);
        for (int64_t i = 0; i < rounded; i += chunk, to += step) dot_place_codes(kind, to, codes + i, chunk);
        *minus++ = -DOT_MORE(kind) * sum;
        if (sums) {
            part = FMA((float)sum, *scales, part);
            if ((k + rounded) % group == 0) *sums++ = part, part = 0;
        }
        scales++;
    }
}

/* mr rows of a tile of `height` by np panels; literals but for the pointers and height. Rows begin at `a`; their scales, corrections and
 * sums lie sum / rounded, or sum / group, apart. c is [np][mr][32]. */
DOT_INLINE void dot_integer_tile(int kind, int mr, int np, const int8_t *a, int64_t height, int64_t chunk, const float *row_scales,
                                 const int32_t *minus, const float *sums, const uint8_t *w, const void *scales, int type,
                                 const void *offsets, int64_t sum, int64_t group, int64_t rounded, float *c)
{
    enum { wide = DOT_NR / DOT_LANES, most = DOT_INTEGER_ROWS };
    int64_t panel = DOT_CODE_BYTES(kind, sum), groups = sum / group, pieces = sum / rounded, piece = 0;
    const uint8_t *begin = w;
    dot_vf whole[most][wide];
    for (int n = 0; n < mr * np; n++)
        for (int j = 0; j < wide; j++) whole[n][j] = (dot_vf){0};
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; g++) {
        dot_vf part[most][wide];
        for (int n = 0; n < mr * np; n++)
            for (int j = 0; j < wide; j++) part[n][j] = (dot_vf){0};
#pragma GCC unroll 1
        for (int64_t end = piece + group / rounded; piece < end; piece++) {
            dot_vi whole_sum[most][wide];
#pragma GCC unroll 8
            for (int n = 0; n < mr * np; n++)
                for (int j = 0; j < wide; j++) whole_sum[n][j] = dot_splat_int(minus[n % mr * pieces + piece]);
#pragma GCC unroll 1
            for (int64_t k = piece * rounded; k < (piece + 1) * rounded; k += 32) {
                const int8_t *x = a + k / chunk * chunk * height + k % chunk;
#if DOT_BY_HALVES
                dot_add_halves(kind, mr, np, x, chunk, w, panel, whole_sum);
                w += DOT_CODE_BYTES(kind, 32);
#else
                /* Beyond the ends of these panels lie those that come next. */
                int64_t far = DOT_PREFETCH_BYTES + (w - begin + DOT_PREFETCH_BYTES < panel ? 0 : (np - 1) * panel);
#pragma GCC unroll 4
                for (int i = 0; i < 32; i += 8, w += DOT_CODE_BYTES(kind, 8)) {
#pragma GCC unroll 4
                    for (int p = 0; p < (mr == 1 ? np : 0); p++)
#pragma GCC unroll 4
                        for (int line = 0; line < DOT_CODE_BYTES(kind, 8); line += 64)
                            __builtin_prefetch(w + p * panel + line + far, 0, 3);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                        for (int p = 0; p < np; p++)
#pragma GCC unroll 8
                            for (int j = 0; j < wide; j++) {
                                dot_vu codes = dot_unsigned_codes(kind, w + p * panel, half, j * DOT_LANES);
#pragma GCC unroll 8
                                for (int r = 0; r < mr; r++)
                                    whole_sum[p * mr + r][j] = dot_four(whole_sum[p * mr + r][j], codes, x + r * chunk + i + 4 * half);
                            }
                }
#endif
            }
#pragma GCC unroll 8
            for (int n = 0; n < mr * np; n++)
                for (int j = 0; j < wide; j++) {
                    dot_vf number = __builtin_convertvector(whole_sum[n][j], dot_vf);
                    part[n][j] = dot_fma(number, dot_splat(row_scales[n % mr * pieces + piece]), part[n][j]);
                }
        }
#pragma GCC unroll 4
        for (int p = 0; p < np; p++)
            for (int j = 0; j < wide; j++) {
                int64_t at = (p * groups + g) * DOT_NR + j * DOT_LANES;
                dot_vf scale = dot_scale(type, scales, at), offset = offsets ? dot_scale(type, offsets, at) : (dot_vf){0};
#pragma GCC unroll 8
                for (int r = 0; r < mr; r++) {
                    dot_vf *to = &whole[p * mr + r][j];
                    *to = dot_fma(scale, part[p * mr + r][j], *to);
                    if (offsets) *to = dot_fma(offset, dot_splat(sums[r * groups + g]), *to);
                }
            }
    }
    for (int n = 0; n < mr * np; n++)
        for (int j = 0; j < wide; j++) dot_save(c + n * DOT_NR + j * DOT_LANES, whole[n][j]);
}

#if DOT_AMX_INTEGERS
/* Sums of products of bytes: tiles of 16 rows by 16 columns of integers, of `chunk` k each. Tiles as those of bf16. */
DOT_INLINE void dot_amx_configure_integers(int rows, int chunk)
{
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    for (int i = 0; i < 8; i++) {
        int height = i >= 6 ? chunk / 4 : (i < 4 ? i < 2 : i == 4) ? upper : lower;
        config.rows[i] = (uint8_t)height, config.bytes[i] = height ? (i == 4 || i == 5 ? chunk : 64) : 0;
    }
    DOT_AMX_CONFIGURE(config);
}

#ifdef DOT_AMX_MODEL
DOT_OUTLINE void dot_amx_load_bytes(int tile, const void *at, int64_t chunk)
{
    for (int r = 0; r < dot_amx_tiles.rows[tile]; r++) {
        dot_amx_tiles.line[tile][r] = (dot_vu){0};
        memcpy(&dot_amx_tiles.line[tile][r], (const char *)at + r * chunk, chunk);
    }
}
DOT_OUTLINE void dot_amx_integers(int c, int a, int w)
{
    for (int r = 0; r < dot_amx_tiles.rows[c]; r++)
        for (int k = 0; k < dot_amx_tiles.rows[w]; k++) {
            dot_vi x = (dot_vi)(dot_amx_tiles.line[a][r][k] + (dot_vu){0}), y = (dot_vi)dot_amx_tiles.line[w][k];
            for (int i = 0; i < 4; i++)
                dot_amx_tiles.line[c][r] += (dot_vu)((x << (24 - 8 * i) >> 24) * (y << (24 - 8 * i) >> 24));
        }
}
#define DOT_AMX_ROWS_OF(tile, at, chunk) dot_amx_load_bytes(tile, at, chunk)
#define DOT_AMX_INTEGER_DOT(c, a, w) dot_amx_integers(c, a, w)
#else
#define DOT_AMX_ROWS_OF(tile, at, chunk) DOT_AMX_PASS(tile, at, chunk)
#define DOT_AMX_INTEGER_DOT(c, a, w) __asm__ volatile("tdpbssd %tmm" #w ", %tmm" #a ", %tmm" #c)
#endif

/* Sums of the products of a group, `rounded` k, of `rows` rows by a panel: c[rows][32]. Rows lie [rounded/chunk][rows][chunk], the panel
 * [rounded/4][32][4]. */
DOT_INLINE void dot_amx_integer_group(int rows, int64_t chunk, const int8_t *a, const int8_t *w, int64_t rounded, int32_t *c)
{
    DOT_AMX_ZERO(0); DOT_AMX_ZERO(1);
    if (rows > 16) { DOT_AMX_ZERO(2); DOT_AMX_ZERO(3); }
    for (int64_t k = 0; k < rounded; k += chunk, a += rows * chunk, w += chunk * DOT_NR) {
        DOT_AMX_LOAD(6, w, 128); DOT_AMX_LOAD(7, w + 64, 128);
        DOT_AMX_ROWS_OF(4, a, chunk);
        DOT_AMX_INTEGER_DOT(0, 4, 6); DOT_AMX_INTEGER_DOT(1, 4, 7);
        if (rows > 16) {
            DOT_AMX_ROWS_OF(5, a + 16 * chunk, chunk);
            DOT_AMX_INTEGER_DOT(2, 5, 6); DOT_AMX_INTEGER_DOT(3, 5, 7);
        }
    }
    DOT_AMX_SAVE(0, c, 128); DOT_AMX_SAVE(1, c + 16, 128);
    if (rows > 16) { DOT_AMX_SAVE(2, c + 512, 128); DOT_AMX_SAVE(3, c + 528, 128); }
}

/* Codes of `count` k from k on as signed bytes, [count/4][32][4] in the order of the rows. */
DOT_INLINE void dot_signed_codes(int8_t *restrict to, const uint8_t *panel, int64_t k, int64_t count)
{
    typedef int8_t bytes __attribute__((vector_size(4 * DOT_LANES)));
    panel += DOT_CODE_BYTES(DOT_INT4, k);
    for (int64_t i = 0; i < count; i += 8, panel += DOT_CODE_BYTES(DOT_INT4, 8))
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < DOT_NR; j += DOT_LANES, to += 4 * DOT_LANES) {
                bytes value = (bytes)dot_unsigned_codes(DOT_INT4, panel, half, j) - 8;
                memcpy(to, &value, sizeof value);
            }
}

/* sums[rows][32] += those of `count` groups, [count][32][32], whose rows have scales (`pieces` apart) and which each are a group of the
 * weight with scales of its own; `sums` of a row's numbers likewise. A literal count keeps the scales in registers. */
DOT_INLINE void dot_add_groups(float *to, const int32_t *parts, int count, int64_t rows, const float *row_scales, int64_t pieces,
                               const void *scales, int type, const void *offsets, const float *sums, int first)
{
    enum { wide = DOT_NR / DOT_LANES };
    dot_vf scale[DOT_AMX_PARTS][wide], offset[DOT_AMX_PARTS][wide];
#pragma GCC unroll 4
    for (int n = 0; n < count; n++)
        for (int j = 0; j < wide; j++) {
            scale[n][j] = dot_scale(type, scales, n * DOT_NR + j * DOT_LANES);
            if (offsets) offset[n][j] = dot_scale(type, offsets, n * DOT_NR + j * DOT_LANES);
        }
    for (int64_t r = 0; r < rows; r++, to += DOT_NR, parts += DOT_NR, row_scales += pieces, sums += pieces)
        for (int j = 0; j < wide; j++) {
            dot_vf sum = first ? (dot_vf){0} : dot_load(to + j * DOT_LANES);
#pragma GCC unroll 4
            for (int n = 0; n < count; n++) {
                dot_vi part = (dot_vi)dot_load_u(parts + n * 32 * DOT_NR + j * DOT_LANES);
                dot_vf number = __builtin_convertvector(part, dot_vf) * dot_splat(row_scales[n]);
                sum = dot_fma(scale[n][j], number, sum);
                if (offsets) sum = dot_fma(offset[n][j], dot_splat(sums[n]), sum);
            }
            dot_save(to + j * DOT_LANES, sum);
        }
}

/* The same of groups that are pieces of one of the weight's: their sum, without its scale. */
DOT_INLINE void dot_add_pieces(float *to, const int32_t *parts, int count, int64_t rows, const float *row_scales, int64_t pieces, int first)
{
    for (int64_t r = 0; r < rows; r++, to += DOT_NR, parts += DOT_NR, row_scales += pieces)
        for (int j = 0; j < DOT_NR; j += DOT_LANES) {
            dot_vf sum = first ? (dot_vf){0} : dot_load(to + j);
#pragma GCC unroll 4
            for (int n = 0; n < count; n++) {
                dot_vi part = (dot_vi)dot_load_u(parts + n * 32 * DOT_NR + j);
                sum = dot_fma(__builtin_convertvector(part, dot_vf), dot_splat(row_scales[n]), sum);
            }
            dot_save(to + j, sum);
        }
}
#endif
