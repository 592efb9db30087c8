/* The part of the host dot that is written once per translation unit, after `dot_core.c`, for processors with a matrix unit:
 * tiles of 16 rows by 16 columns of f32; an instruction adds 32 products to each, pairs of k ascending. Rounding differs from the
 * chain of fused multiply-adds (and subnormals count as zero), but it too is the same for a row whatever the other rows are, so
 * a kernel keeps to one of the two ways for every number of rows.
 */
#if defined(__AMX_BF16__) && defined(__linux__) || defined(DOT_AMX_MODEL)
#define DOT_AMX_ROWS 32
#define DOT_AMX_WHOLE 32     /* steps of 32 of k: so short a sum stays in the tiles to its end */
#define DOT_AMX_STEPS 16     /* steps of a block of longer sums, which wait in memory between blocks */
#define DOT_AMX_STAY 20      /* steps of a block of a panel, 40 KiB, stay in the first-level cache while the tiles of rows pass */
#define DOT_AMX_NEAR 786432  /* bytes of packed rows that a unit reads again for each panel, from the second-level cache */
#define DOT_AMX_FAR 8192     /* short inputs wait for memory: bytes of w asked for ahead */

/* From here to dot_unflush subnormals count as zero for this thread's vector units, too. Operands come from memory and results
 * go there in between, which keeps the compiler from moving arithmetic out. */
DOT_INLINE uint32_t dot_flush(void)
{
    uint32_t before, flushing;
    __asm__ volatile("vstmxcsr %0" : "=m"(before)::"memory");
    flushing = before | 0x8040;
    __asm__ volatile("vldmxcsr %0" ::"m"(flushing) : "memory");
    return before;
}
DOT_INLINE void dot_unflush(uint32_t before) { __asm__ volatile("vldmxcsr %0" ::"m"(before) : "memory"); }

#ifdef DOT_AMX_MODEL
/* Vectors in the place of the unit, bit for bit, so that all that uses it can be tried on a processor without it: a product is
 * a chain of 16 even k and one of 16 odd k from zero, the two added, then that to the sum. */
enum { dot_amx = 1 };
static __thread struct { uint8_t rows[8]; dot_vu line[8][16]; } dot_amx_tiles;

DOT_OUTLINE void dot_amx_load(int tile, const void *at, int64_t stride)
{
    for (int r = 0; r < 16; r++) {
        const void *line = (const char *)at + r * stride;
        dot_amx_tiles.line[tile][r] = r < dot_amx_tiles.rows[tile] ? dot_load_u(line) : (dot_vu){0};
    }
}

DOT_OUTLINE void dot_amx_save(int tile, void *at, int64_t stride)
{
    for (int r = 0; r < dot_amx_tiles.rows[tile]; r++)
        memcpy((char *)at + r * stride, &dot_amx_tiles.line[tile][r], sizeof(dot_vu));
}

DOT_OUTLINE void dot_amx_dot(int c, int a, int w)
{
    uint32_t before = dot_flush();
    for (int r = 0; r < dot_amx_tiles.rows[c]; r++) {
        dot_vf even = {0}, odd = {0};
        for (int k = 0; k < 16; k++) {
            dot_vu x = dot_amx_tiles.line[a][r][k] + (dot_vu){0}, y = dot_amx_tiles.line[w][k];
            even = dot_fma(dot_low(x), dot_low(y), even), odd = dot_fma(dot_high(x), dot_high(y), odd);
        }
        dot_amx_tiles.line[c][r] = (dot_vu)((dot_vf)dot_amx_tiles.line[c][r] + (even + odd));
    }
    dot_unflush(before);
}

#define DOT_AMX_CONFIGURE(config) memcpy(dot_amx_tiles.rows, (config).rows, sizeof dot_amx_tiles.rows)
#define DOT_AMX_RELEASE                                                                                                \
    memset(dot_amx_tiles.rows, 0, sizeof dot_amx_tiles.rows), memset(dot_amx_tiles.line, 0xff, sizeof dot_amx_tiles.line)
#define DOT_AMX_LOAD(tile, at, stride) dot_amx_load(tile, at, stride)
#define DOT_AMX_PASS(tile, at, stride) dot_amx_load(tile, at, stride)
#define DOT_AMX_SAVE(tile, at, stride) dot_amx_save(tile, at, stride)
#define DOT_AMX_ZERO(tile) memset(dot_amx_tiles.line[tile], 0, sizeof dot_amx_tiles.line[tile])
#define DOT_AMX_DOT(c, a, w) dot_amx_dot(c, a, w)
#else
static int dot_amx; /* whether the system lets this process use the unit */

__attribute__((constructor, unused)) static void dot_amx_request(void)
{
    long result = 158; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for all threads of the process */
    __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    dot_amx = result == 0;
}

#define DOT_AMX_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config))
#define DOT_AMX_RELEASE __asm__ volatile("tilerelease")
#define DOT_AMX_LOAD(tile, at, stride)                                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((long)(stride)) : "memory")
/* As the load, of lines that are not read again soon: they take no room from those that are. */
#define DOT_AMX_PASS(tile, at, stride)                                                                                 \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(at), "r"((long)(stride)) : "memory")
#define DOT_AMX_SAVE(tile, at, stride)                                                                                 \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"((long)(stride)) : "memory")
#define DOT_AMX_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define DOT_AMX_DOT(c, a, w) __asm__ volatile("tdpbf16ps %tmm" #w ", %tmm" #a ", %tmm" #c)
#endif

/* Tiles 0 to 3 hold c, 4 and 5 the upper and lower rows of a, 6 and 7 the left and right columns of w. */
DOT_INLINE void dot_amx_configure(int rows)
{
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    for (int i = 0; i < 8; i++) {
        int height = i >= 6 ? 16 : (i < 4 ? i < 2 : i == 4) ? upper : lower;
        config.rows[i] = (uint8_t)height, config.bytes[i] = height ? 64 : 0;
    }
    DOT_AMX_CONFIGURE(config);
}

DOT_INLINE void dot_amx_release(void) { DOT_AMX_RELEASE; }

/* Instructions that do nothing, after a product: where another thread shares the core, products close upon another hold up the
 * loads behind them, and run at half their speed (four loads and four products then take 1.2 to 1.4 times as long as with these
 * between). Where none does, they cost nothing. Lines asked for serve as well. */
#define DOT_AMX_REST __asm__ volatile(".rept 12\n\tnop\n\t.endr")

/* Sums start from zero or from c[rows][32]. */
DOT_INLINE void dot_amx_open(int rows, const float *c, int first)
{
    if (first) {
        DOT_AMX_ZERO(0); DOT_AMX_ZERO(1);
        if (rows > 16) { DOT_AMX_ZERO(2); DOT_AMX_ZERO(3); }
    } else {
        DOT_AMX_LOAD(0, c, 128); DOT_AMX_LOAD(1, c + 16, 128);
        if (rows > 16) { DOT_AMX_LOAD(2, c + 512, 128); DOT_AMX_LOAD(3, c + 528, 128); }
    }
}

/* A step of 32 of k of a[rows][32] and of a panel, which `stays` near or passes. */
DOT_INLINE void dot_amx_sides(int rows, const uint16_t *a, const uint32_t *w, int stays)
{
    if (stays) {
        DOT_AMX_LOAD(6, w, 128); DOT_AMX_LOAD(7, w + 16, 128);
    } else {
        DOT_AMX_PASS(6, w, 128); DOT_AMX_PASS(7, w + 16, 128);
    }
    DOT_AMX_PASS(4, a, 64);
    if (rows > 16) DOT_AMX_PASS(5, a + 512, 64);
}

/* So many lines are asked for, into the first-level cache. */
#define DOT_AMX_ASK(at, lines)                                                                                         \
    for (int line_ = 0; line_ < (lines); line_++) __asm__ volatile("prefetcht0 (%0)" ::"r"((at) + line_ * 32))

DOT_INLINE void dot_amx_rows(const uint16_t *a) { DOT_AMX_LOAD(4, a, 64); DOT_AMX_LOAD(5, a + 512, 64); }
DOT_INLINE void dot_amx_columns(const uint16_t *w) { DOT_AMX_LOAD(6, w, 128); DOT_AMX_LOAD(7, w + 32, 128); }

/* Four products, and after each of them, in place of a rest, eight lines of what comes next are asked for, from two places. */
DOT_INLINE void dot_amx_products(const uint16_t *next, const uint16_t *after)
{
    DOT_AMX_DOT(0, 4, 6); DOT_AMX_ASK(next, 4); DOT_AMX_ASK(after, 4);
    DOT_AMX_DOT(1, 4, 7); DOT_AMX_ASK(next + 128, 4); DOT_AMX_ASK(after + 128, 4);
    DOT_AMX_DOT(2, 5, 6); DOT_AMX_ASK(next + 256, 4); DOT_AMX_ASK(after + 256, 4);
    DOT_AMX_DOT(3, 5, 7); DOT_AMX_ASK(next + 384, 4); DOT_AMX_ASK(after + 384, 4);
}

/* Sums of 32 rows += 32 of k of bf16 numbers. Meanwhile the rows of the next step arrive; columns are near. */
DOT_INLINE void dot_amx_step(const uint16_t *a, const uint16_t *w, const uint16_t *next_a)
{
    dot_amx_columns(w), dot_amx_rows(a), dot_amx_products(next_a, next_a + 512);
}

/* Sums of 32 rows += 32 of k of f32 numbers in three bf16 pieces, [3][1024] each side, the greatest first. Three of the nine
 * products of pieces are left out, together at most 2^-23 of the whole and 2^-27 in the root mean square, of either sign; sums
 * round far more. Tiles stay for as many products as can be. Meanwhile the sides of the next step arrive. */
DOT_INLINE void dot_amx_split(const uint16_t *a, const uint16_t *w, const uint16_t *next_a, const uint16_t *next_w)
{
    dot_amx_rows(a), dot_amx_columns(w + 2048), dot_amx_products(next_a, next_w);
    dot_amx_columns(w + 1024), dot_amx_products(next_a + 512, next_w + 512);
    dot_amx_rows(a + 1024), dot_amx_products(next_a + 1024, next_w + 1024);
    dot_amx_columns(w), dot_amx_products(next_a + 1536, next_w + 1536);
    dot_amx_rows(a + 2048), dot_amx_products(next_a + 2048, next_w + 2048);
    dot_amx_rows(a), dot_amx_products(next_a + 2560, next_w + 2560);
}

DOT_INLINE void dot_amx_close(int rows, float *c)
{
    DOT_AMX_SAVE(0, c, 128); DOT_AMX_SAVE(1, c + 16, 128);
    if (rows > 16) { DOT_AMX_SAVE(2, c + 512, 128); DOT_AMX_SAVE(3, c + 528, 128); }
}

/* One row by np panels (a literal), bit for bit as the matrix unit does it: 16 products of even k and 16 of odd k each make a
 * chain from zero, the two are added, then that to the sum; subnormals count as zero. A row alone waits for memory, and vectors
 * read several panels side by side, which memory serves faster than one after the other. `words` is a panel's length. */
DOT_INLINE void dot_amx_row(int np, const float *a, const uint32_t *w, int64_t words, float *c)
{
    dot_vf sum[4][2];
    uint32_t before = dot_flush();
#pragma GCC unroll 4
    for (int p = 0; p < np; p++) sum[p][0] = sum[p][1] = (dot_vf){0};
#pragma GCC unroll 1
    for (int64_t at = 0; at < words; at += 512, a += 32) {
        int64_t far = at + DOT_PREFETCH_BYTES / 4 + (at + DOT_PREFETCH_BYTES / 4 < words ? 0 : (np - 1) * words);
        dot_vf even[4][2], odd[4][2];
#pragma GCC unroll 4
        for (int p = 0; p < np; p++) even[p][0] = even[p][1] = odd[p][0] = odd[p][1] = (dot_vf){0};
#pragma GCC unroll 4
        for (int k = 0; k < 16; k++) {
            dot_vf x = dot_splat(a[2 * k]), y = dot_splat(a[2 * k + 1]);
#pragma GCC unroll 4
            for (int p = 0; p < np; p++)
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    const uint32_t *line = w + p * words + k * 32 + j * 16;
                    __builtin_prefetch(line + far, 0, 3);
                    dot_vu both = dot_load_u(line + at);
                    even[p][j] = dot_fma(x, dot_low(both), even[p][j]);
                    odd[p][j] = dot_fma(y, dot_high(both), odd[p][j]);
                }
        }
#pragma GCC unroll 4
        for (int p = 0; p < np; p++)
            for (int j = 0; j < 2; j++) sum[p][j] += even[p][j] + odd[p][j];
    }
#pragma GCC unroll 4
    for (int p = 0; p < np; p++) dot_save(c + p * DOT_NR, sum[p][0]), dot_save(c + p * DOT_NR + 16, sum[p][1]);
    dot_unflush(before);
}
#define DOT_AMX_ROW(np)                                                                                                \
    DOT_OUTLINE void dot_amx_row##np(const float *a, const uint32_t *w, int64_t words, float *c)                       \
    {                                                                                                                  \
        dot_amx_row(np, a, w, words, c);                                                                               \
    }
DOT_AMX_ROW(1)
DOT_AMX_ROW(2)
DOT_AMX_ROW(4)
#endif
