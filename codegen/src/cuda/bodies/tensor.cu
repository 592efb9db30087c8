/* A tile of a product of bf16 by tensor cores, mma.sync of 16 x 8 sums in f32; and a tile by what its sides allow.
 *
 * Enters: tile.cu; BLOCK. Leaves: product_floats, product_sums; few_columns, few_sums, where the left side has at most sixteen rows. Tensor cores
 * want sides whose neighbours in memory come eight at once; the right one may be codes, which bf16 holds all, where 32 neighbours share a
 * scale: the sums of 32 terms are scaled, in f32.
 *
 * Steps of 32 or 64 terms wait in shared memory, several on their way at a time (cp.async). A side lies there as in memory, lines of its
 * runs; pieces of 16 bytes are swizzled, so that the eight rows of an ldmatrix meet in no bank. Terms ascend by sixteens: the bits depend on
 * nothing but the operands.
 */
enum { TENSOR_MOST = 48 << 10 };

/* Terms of a step: small tiles meet at half as many barriers; of codes as many as have a scale at least. Bytes, and steps that wait at a time. */
template <class Right> METHOD constexpr int tensor_depth(int rows, int columns) { return !Right::coded && rows + columns <= 128 ? 64 : 32; }
template <class Left, class Right> METHOD constexpr int tensor_bytes(int rows, int columns) {
    return (rows * Left::bits + columns * Right::bits) * tensor_depth<Right>(rows, columns) / 8;
}
METHOD constexpr int tensor_stages(int bytes) { return TENSOR_MOST / bytes < 6 ? TENSOR_MOST / bytes : 6; }

METHOD uint32_t shared_at(const void *p) {
    uint64_t at;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(at) : "l"(p));
    return (uint32_t)at;
}

/* Sums of 16 x 8 plus the product of 16 x 16 and 16 x 8. */
METHOD void tensor_mma(float (&s)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Starts a copy of 16 bytes to shared memory; zeros where nothing is there. */
METHOD void tensor_copy(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

/* Four 8 x 8 blocks, of which lanes name the lines by eights; of ACROSS transposed. */
template <bool ACROSS> METHOD void tensor_fetch(uint32_t (&x)[4], uint32_t at) {
    if (ACROSS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

/* ROWS lines, or columns, of a side by DEPTH terms. */
template <class Side, int ROWS, int DEPTH> struct tensor_side {
    /* Pieces of 16 bytes in a line of shared memory, and lines. */
    enum { pieces = (Side::along ? DEPTH : ROWS) / 8, lines = Side::along ? ROWS : DEPTH };

    /* Byte of a piece. */
    static METHOD int place(int line, int piece) {
        const int by = pieces == 4 ? line / 2 % 4 : line % 8;
        return (line * pieces + (piece ^ by)) * 16;
    }

    /* Starts copies of terms k0 .. k0 + DEPTH; zeros beyond the last row and term. */
    static METHOD void copy(const Side &from, index_t row0, index_t rows, index_t k0, index_t end, uint32_t to) {
#pragma unroll
        for (int at = (int)threadIdx.x; at < lines * pieces; at += BLOCK) {
            const int line = at / pieces, piece = at % pieces;
            const index_t row = row0 + (Side::along ? line : piece * 8), k = k0 + (Side::along ? piece * 8 : line);
            const bool there = row < rows && k < end;
            tensor_copy(to + place(line, piece), from.address(there ? row : 0, there ? k : 0), there);
        }
    }

    /* Registers of an operand of mma: four 8 x 8 blocks from row0, k0 on, multiples of sixteen. SECOND_ROW: the block after the first has the next
     * rows; else the next terms. */
    template <bool SECOND_ROW> static METHOD void fetch(uint32_t (&x)[4], uint32_t from, int row0, int k0) {
        const int lane = (int)threadIdx.x % 32, block = lane / 8, in = lane % 8;
        const int row = (SECOND_ROW ? block % 2 : block / 2) * 8, k = k0 + (SECOND_ROW ? block / 2 : block % 2) * 8;
        /* Sixteen lines do not change how pieces are swizzled: row0 is added, and all blocks have one address but for a constant. */
        tensor_fetch<!Side::along>(x, from + (Side::along ? place(row + in, k / 8) + row0 * (pieces * 16) : place(k + in, (row0 + row) / 8)));
    }
};

/* The right side of a tile, of a warp that has DOWN by ACROSS blocks of 16 by 8 sums. */
template <class Side, int COLUMNS, int DEPTH, int DOWN, int ACROSS> struct tensor_right : tensor_side<Side, COLUMNS, DEPTH> {
    METHOD void read(const Side &, index_t, index_t, index_t) {}

    /* Adds a step's products; a_side is the left side's, whose lines are at `a`, those of this one at `b`. */
    template <class a_side> METHOD void add(float (&sums)[DOWN][ACROSS][4], uint32_t a_at, int row0, uint32_t b_at, const char *, int column0) {
#pragma unroll
        for (int kk = 0; kk < DEPTH; kk += 16) {
            uint32_t a[DOWN][4], b[ACROSS / 2][4];
#pragma unroll
            for (int i = 0; i < DOWN; i++) a_side::template fetch<true>(a[i], a_at, row0 + i * 16, kk);
#pragma unroll
            for (int j = 0; j < ACROSS / 2; j++) tensor_side<Side, COLUMNS, DEPTH>::template fetch<false>(b[j], b_at, column0 + j * 16, kk);
#pragma unroll
            for (int i = 0; i < DOWN; i++)
#pragma unroll
                for (int j = 0; j < ACROSS; j++) tensor_mma(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
};

/* The same of 32 codes, which wait in shared memory as they are: pieces of 16 bytes of 16 or 32. */
template <class Code, class Scale, int GROUP, bool OFFSETS, int COLUMNS, int DOWN, int ACROSS>
struct tensor_right<coded_side<Code, Scale, GROUP, OFFSETS>, COLUMNS, 32, DOWN, ACROSS> {
    typedef coded_side<Code, Scale, GROUP, OFFSETS> Side;
    enum { pieces = 2 / Code::per, pair_bytes = 2 / Code::per };
    float scales[ACROSS][2], offsets[ACROSS][2];

    static METHOD int place(int column, int piece) { return (column * pieces + (pieces == 1 ? 0 : piece ^ column / 4 % 2)) * 16; }

    static METHOD void copy(const Side &from, index_t column0, index_t columns, index_t k0, index_t, uint32_t to) {
#pragma unroll
        for (int at = (int)threadIdx.x; at < COLUMNS * pieces; at += BLOCK) {
            const int column = at / pieces, piece = at % pieces;
            const bool there = column0 + column < columns;
            tensor_copy(to + place(column, piece), from.row(there ? column0 + column : 0) + k0 / Code::per + piece * 16, there);
        }
    }

    /* Scales and offsets of the terms from k on, of the columns of a lane's sums, the first of which is `column`. */
    METHOD void read(const Side &from, index_t column, index_t columns, index_t k) {
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const index_t of = column + j * 8 + c < columns ? column + j * 8 + c : columns - 1;
                scales[j][c] = from.scale(of, k), offsets[j][c] = from.offset(of, k);
            }
    }

    template <class a_side> METHOD void add(float (&sums)[DOWN][ACROSS][4], uint32_t a_at, int row0, uint32_t, const char *codes, int column0) {
        int lane = (int)threadIdx.x % 32;
        /* Beside offsets, addresses kept from step to step would not fit: the compiler may assume nothing of the lane. */
        if (OFFSETS) asm volatile("" : "+r"(lane));
        uint32_t b[ACROSS][4];
#pragma unroll
        for (int j = 0; j < ACROSS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int byte = (i * 4 + lane % 4) * pair_bytes;
                const char *const at = codes + place(lane / 4, byte / 16) + byte % 16 + (column0 + j * 8) * (pieces * 16);
                b[j][i] = Code::pair(pair_bytes == 1 ? *(const uint8_t *)at : *(const uint16_t *)at);
            }
#pragma unroll
        for (int i = 0; i < DOWN; i++) {
            float part[ACROSS][4], all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < ACROSS; j++) part[j][0] = part[j][1] = part[j][2] = part[j][3] = 0.0f;
#pragma unroll
            for (int kk = 0; kk < 2; kk++) {
                uint32_t a[4];
                a_side::template fetch<true>(a, a_at, row0 + i * 16, kk * 16);
#pragma unroll
                for (int j = 0; j < ACROSS; j++) tensor_mma(part[j], a, b[j][2 * kk], b[j][2 * kk + 1]);
                /* An offset's terms are the left side's times one. */
                if (OFFSETS) tensor_mma(all, a, 0x3f803f80u, 0x3f803f80u);
            }
#pragma unroll
            for (int j = 0; j < ACROSS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (OFFSETS) sums[i][j][c] = FMA(all[c], offsets[j][c % 2], sums[i][j][c]);
                    sums[i][j][c] = FMA(part[j][c], scales[j][c % 2], sums[i][j][c]);
                }
        }
    }
};

/* Like tile_sums; a warp has WARP_R by WARP_C sums. */
template <int ROWS, int COLUMNS, int WARP_R, int WARP_C, class Left, class Right, class Store>
METHOD void tensor_sums(const Left &left, const Right &right, index_t row0, index_t rows, index_t column0, index_t columns, index_t k,
                        index_t end, float *shared, const Store &store) {
    enum { stage = tensor_bytes<Left, Right>(ROWS, COLUMNS), stages = tensor_stages(stage), warps_r = ROWS / WARP_R };
    enum { depth = tensor_depth<Right>(ROWS, COLUMNS), left_bytes = ROWS * depth * 2 };
    enum { down = WARP_R / 16, across = WARP_C / 8, line = COLUMNS + 8 };
    typedef tensor_side<Left, ROWS, depth> a_side;
    typedef tensor_right<Right, COLUMNS, depth, down, across> b_side;
    static_assert(warps_r * (COLUMNS / WARP_C) * 32 == BLOCK, "a warp has its sums");
    static_assert(warps_r * 16 * line * 4 <= stages * stage, "sums of a turn fit");
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int warp_row = warp % warps_r * WARP_R, warp_column = warp / warps_r * WARP_C;
    const uint32_t room = shared_at(shared);
    float sums[down][across][4];
#pragma unroll
    for (int i = 0; i < down; i++)
#pragma unroll
        for (int j = 0; j < across; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[i][j][c] = 0.0f;
    const int steps = (int)((end - k + depth - 1) / depth);
    const auto copy = [&](int step) {
        const uint32_t to = room + step % stages * stage;
        if (step < steps) {
            a_side::copy(left, row0, rows, k + (index_t)step * depth, end, to);
            b_side::copy(right, column0, columns, k + (index_t)step * depth, end, to + left_bytes);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const index_t my_column = column0 + warp_column + lane % 4 * 2;
    b_side now, next;
    if (steps > 0) next.read(right, my_column, columns, k);
#pragma unroll(Right::coded ? 1 : 8)
    for (int step = 0; step < stages - 1; step++) copy(step);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        now = next;
        if (step + 1 < steps) next.read(right, my_column, columns, k + (index_t)(step + 1) * depth);
        asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2) : "memory");
        __syncthreads(); /* the step is there for all, and the one before it is read */
        copy(step + stages - 1);
        const int from = step % stages * stage;
        now.template add<a_side>(sums, room + from, warp_row, room + from + left_bytes, (const char *)shared + from + left_bytes, warp_column);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    /* Sixteen rows of each warp at a time, so that what follows runs along rows. */
#pragma unroll
    for (int i = 0; i < down; i++) {
        float *const mine = shared + (warp % warps_r * 16 + lane / 4) * line + warp_column + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < across; j++) {
            *(two *)(mine + j * 8) = {sums[i][j][0], sums[i][j][1]};
            *(two *)(mine + j * 8 + 8 * line) = {sums[i][j][2], sums[i][j][3]};
        }
        __syncthreads();
#pragma unroll 1
        for (int at = (int)threadIdx.x; at < warps_r * 16 * COLUMNS; at += BLOCK) {
            const int of = at / COLUMNS, column = at % COLUMNS, row = of / 16 * WARP_R + i * 16 + of % 16;
            if (row0 + row < rows && column0 + column < columns) store(row0 + row, column0 + column, shared[of * line + column]);
        }
        __syncthreads();
    }
}

/* True where tensor cores make the products of these sides: of bf16, or of bf16 by codes, on devices that have such. */
template <class Left, class Right> METHOD constexpr bool by_tensor_cores() {
#if __CUDA_ARCH__ >= 800
    return Left::eights && Right::eights;
#else
    return false;
#endif
}

/* Floats of shared memory that a tile of these sides takes. */
template <class Left, class Right> METHOD constexpr int product_floats(int rows, int columns) {
    const int bytes = tensor_bytes<Left, Right>(rows, columns);
    return by_tensor_cores<Left, Right>() ? tensor_stages(bytes) * bytes / 4 : tile_floats(rows, columns);
}

/* The sums of a tile, by tensor cores where they can; a thread has MINE_R by MINE_C of them. */
template <int ROWS, int COLUMNS, int MINE_R, int MINE_C, class Left, class Right, class Store>
METHOD void product_sums(const Left &left, const Right &right, index_t row0, index_t rows, index_t column0, index_t columns, index_t k,
                         index_t end, float *shared, const Store &store) {
    if constexpr (by_tensor_cores<Left, Right>())
        tensor_sums<ROWS, COLUMNS, ROWS / 2, COLUMNS / (BLOCK / 64)>(left, right, row0, rows, column0, columns, k, end, shared, store);
    else
        tile_sums<ROWS, COLUMNS, MINE_R, MINE_C>(left, right, row0, rows, column0, columns, k, end, shared, store);
}

struct alignas(16) tensor_piece {
    uint32_t x, y, z, w;
};
struct alignas(8) two_words {
    uint32_t x, y;
};

/* Eight terms of a line as they lie in memory, from the k-th on, and as bf16. */
template <class Side> struct tensor_eight {
    typedef tensor_piece raw;
    static METHOD raw read(const Side &of, index_t i, index_t k) { return *(const raw *)of.address(i, k); }
    static METHOD tensor_piece widen(raw x) { return x; }
};
template <class Code> METHOD tensor_piece tensor_widen(uint32_t x) {
    return {Code::pair(x & 255), Code::pair(x >> 8 & 255), Code::pair(x >> 16 & 255), Code::pair(x >> 24)};
}
template <class Code> METHOD tensor_piece tensor_widen(two_words x) {
    return {Code::pair(x.x & 0xffff), Code::pair(x.x >> 16), Code::pair(x.y & 0xffff), Code::pair(x.y >> 16)};
}
template <int PER> struct tensor_words {
    typedef two_words type;
};
template <> struct tensor_words<2> {
    typedef uint32_t type;
};
template <class Code, class Scale, int GROUP, bool OFFSETS> struct tensor_eight<coded_side<Code, Scale, GROUP, OFFSETS>> {
    typedef typename tensor_words<Code::per>::type raw;
    static METHOD raw read(const coded_side<Code, Scale, GROUP, OFFSETS> &of, index_t i, index_t k) {
        return *(const raw *)(of.row(i) + k / Code::per);
    }
    static METHOD tensor_piece widen(raw x) { return tensor_widen<Code>(x); }
};

/* All rows of a left side that has at most EIGHTS times eight, by COLUMNS, eight or sixteen, from column0 on; both sides' sums run along memory,
 * and the warps of a block share them. The right side's columns are rows of the products, read from memory in whole sectors: a lane has eight
 * terms of a column, of which the first four count as terms 2t, 2t + 1, 2t + 8, 2t + 9 of an mma, in both operands. What a warp reads is on its
 * way before the first of it is used: nothing else hides the time that memory takes. */
template <int EIGHTS, int COLUMNS, class Left, class Right, class Store>
METHOD void tensor_few(const Left &left, const Right &right, index_t rows, index_t column0, index_t columns, index_t end, float *shared,
                       const Store &store) {
    enum { narrow = !Right::offset_too && (COLUMNS == 8 || Right::coded), at_once = EIGHTS == 1 && narrow ? 8 : 4 };
    enum { halves = COLUMNS / 8, part = EIGHTS * 8 * COLUMNS };
    typedef tensor_eight<Right> of_right;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, first = lane % 4 * 8;
    const auto last = [](index_t i, index_t n) { return i < n ? i : n - 1; };
    const tensor_piece nothing = {0, 0, 0, 0};
    index_t of[halves], by[EIGHTS];
    float sums[EIGHTS][4];
#pragma unroll
    for (int i = 0; i < halves; i++) of[i] = last(column0 + lane / 4 + i * 8, columns);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        by[e] = last(lane / 4 + e * 8, rows);
#pragma unroll
        for (int c = 0; c < 4; c++) sums[e][c] = 0.0f;
    }
#pragma unroll 1
    for (index_t k0 = warp * 32; k0 < end; k0 += at_once * BLOCK) {
        typename of_right::raw a[at_once][halves];
        tensor_piece b[at_once][EIGHTS];
        float scales[at_once][2], offsets[at_once][2];
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            const index_t k = k0 + u * BLOCK + first < end ? k0 + u * BLOCK + first : 0;
#pragma unroll
            for (int i = 0; i < halves; i++) a[u][i] = of_right::read(right, of[i], k);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) b[u][e] = tensor_eight<Left>::read(left, by[e], k);
            if constexpr (Right::coded)
#pragma unroll
                for (int i = 0; i < halves; i++) scales[u][i] = right.scale(of[i], k), offsets[u][i] = right.offset(of[i], k);
        }
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            const bool there = k0 + u * BLOCK + first < end;
            tensor_piece x[2] = {nothing, nothing};
#pragma unroll
            for (int i = 0; i < halves; i++) x[i] = there ? of_right::widen(a[u][i]) : nothing;
            const uint32_t begin[4] = {x[0].x, x[1].x, x[0].y, x[1].y}, rest[4] = {x[0].z, x[1].z, x[0].w, x[1].w};
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) {
                const tensor_piece y = there ? b[u][e] : nothing;
                if constexpr (Right::coded) {
                    const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
                    float some[4] = {0.0f, 0.0f, 0.0f, 0.0f}, all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    tensor_mma(some, begin, y.x, y.y), tensor_mma(some, rest, y.z, y.w);
                    if (Right::offset_too) tensor_mma(all, ones, y.x, y.y), tensor_mma(all, ones, y.z, y.w);
#pragma unroll
                    for (int c = 0; c < 2 * halves; c++) {
                        if (Right::offset_too) sums[e][c] = FMA(all[c], offsets[u][c / 2], sums[e][c]);
                        sums[e][c] = FMA(some[c], scales[u][c / 2], sums[e][c]);
                    }
                } else {
                    tensor_mma(sums[e], begin, y.x, y.y), tensor_mma(sums[e], rest, y.z, y.w);
                }
            }
        }
    }
    float *const mine = shared + warp * part;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int c = 0; c < 2 * halves; c++) mine[(e * 8 + lane % 4 * 2 + c % 2) * COLUMNS + lane / 4 + c / 2 * 8] = sums[e][c];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < part; at += BLOCK) {
        const int row = at / COLUMNS, column = at % COLUMNS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < BLOCK / 32; w++) sum += shared[w * part + at];
        if (row < rows && column0 + column < columns) store(row, column0 + column, sum);
    }
    __syncthreads();
}

/* Whether tensor cores multiply so many rows: of one by codes they have more to widen than to add. */
template <class Left, class Right> METHOD constexpr bool few_by_tensor_cores(index_t rows) {
    return by_tensor_cores<Left, Right>() && !(Right::coded && rows <= 1);
}

/* Columns of a unit; WIDE by tensor cores. */
template <int WIDE, class Left, class Right> METHOD constexpr int few_columns(index_t rows) {
    return few_by_tensor_cores<Left, Right>(rows) ? WIDE : BLOCK / 32 * 4;
}

/* All of at most MOST rows, MOST up to 16, by the columns of a unit. */
template <int MOST, int WIDE, class Left, class Right, class Store>
METHOD void few_sums(const Left &left, const Right &right, index_t rows, index_t unit, index_t columns, index_t end, float *shared,
                     const Store &store) {
    const index_t column0 = unit * few_columns<WIDE, Left, Right>(rows);
    constexpr bool tensor = by_tensor_cores<Left, Right>();
    if (tensor ? !few_by_tensor_cores<Left, Right>(rows) : MOST <= 1 || rows <= 1) {
        few_rows<1, 4>(left, right, rows, column0, columns, end, shared, store);
    } else if constexpr (tensor) {
        if (MOST <= 8 || rows <= 8)
            tensor_few<1, WIDE>(left, right, rows, column0, columns, end, shared, store);
        else
            tensor_few<2, WIDE>(left, right, rows, column0, columns, end, shared, store);
    } else if (MOST <= 4 || rows <= 4) {
        few_rows<4, 4>(left, right, rows, column0, columns, end, shared, store);
    } else {
        few_rows<16, 4>(left, right, rows, column0, columns, end, shared, store);
    }
}
