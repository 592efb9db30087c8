/* A tile of a product of bf16 by tensor cores, mma.sync of 16 x 8 sums in f32; and a tile by what its sides allow.
 *
 * Enters: tile.cu; BLOCK. Leaves: product_floats, product_sums; few_columns, few_sums, where the left side has at most sixteen rows. Tensor cores
 * want sides whose neighbours in memory come eight at once.
 *
 * Steps of DEPTH terms wait in shared memory, several on their way at a time (cp.async). A side lies there as in memory, lines of its
 * runs; pieces of 16 bytes are swizzled, so that the eight rows of an ldmatrix meet in no bank. Terms ascend by sixteens: the bits depend on
 * nothing but the operands.
 */
enum { TENSOR_DEPTH = 32, TENSOR_MOST = 48 << 10 };

METHOD constexpr int tensor_bytes(int rows, int columns) { return (rows + columns) * TENSOR_DEPTH * 2; }
METHOD constexpr int tensor_stages(int rows, int columns) {
    return TENSOR_MOST / tensor_bytes(rows, columns) < 6 ? TENSOR_MOST / tensor_bytes(rows, columns) : 6;
}

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

/* ROWS lines, or columns, of a side by TENSOR_DEPTH terms. */
template <class Side, int ROWS> struct tensor_side {
    /* Pieces of 16 bytes in a line of shared memory, and lines. */
    enum { pieces = (Side::along ? TENSOR_DEPTH : ROWS) / 8, lines = Side::along ? ROWS : TENSOR_DEPTH };

    /* Byte of a piece. */
    static METHOD int place(int line, int piece) {
        const int by = pieces == 4 ? line / 2 % 4 : line % 8;
        return (line * pieces + (piece ^ by)) * 16;
    }

    /* Starts copies of terms k0 .. k0 + TENSOR_DEPTH; zeros beyond the last row and term. */
    static METHOD void copy(const Side &from, index_t row0, index_t rows, index_t k0, index_t end, uint32_t to) {
#pragma unroll
        for (int at = (int)threadIdx.x; at < lines * pieces; at += BLOCK) {
            const int line = at / pieces, piece = at % pieces;
            const index_t row = row0 + (Side::along ? line : piece * 8), k = k0 + (Side::along ? piece * 8 : line);
            const bool there = row < rows && k < end;
            tensor_copy(to + place(line, piece), from.address(there ? row : 0, there ? k : 0), there);
        }
    }

    /* Registers of an operand of mma: four 8 x 8 blocks from row0, k0 on. SECOND_ROW: the block after the first has the next
     * rows; else the next terms. */
    template <bool SECOND_ROW> static METHOD void fetch(uint32_t (&x)[4], uint32_t from, int row0, int k0) {
        const int lane = (int)threadIdx.x % 32, block = lane / 8, in = lane % 8;
        const int rows = row0 + (SECOND_ROW ? block % 2 : block / 2) * 8, k = k0 + (SECOND_ROW ? block / 2 : block % 2) * 8;
        tensor_fetch<!Side::along>(x, from + (Side::along ? place(rows + in, k / 8) : place(k + in, rows / 8)));
    }
};

/* Like tile_sums; a warp has WARP_R by WARP_C sums. */
template <int ROWS, int COLUMNS, int WARP_R, int WARP_C, class Left, class Right, class Store>
METHOD void tensor_sums(const Left &left, const Right &right, index_t row0, index_t rows, index_t column0, index_t columns, index_t k,
                        index_t end, float *shared, const Store &store) {
    enum { warps_r = ROWS / WARP_R, stages = tensor_stages(ROWS, COLUMNS), stage = tensor_bytes(ROWS, COLUMNS) };
    enum { down = WARP_R / 16, across = WARP_C / 8, line = COLUMNS + 8 };
    typedef tensor_side<Left, ROWS> a_side;
    typedef tensor_side<Right, COLUMNS> b_side;
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
    const int steps = (int)((end - k + TENSOR_DEPTH - 1) / TENSOR_DEPTH);
    const auto copy = [&](int step) {
        const uint32_t to = room + step % stages * stage;
        if (step < steps) {
            a_side::copy(left, row0, rows, k + (index_t)step * TENSOR_DEPTH, end, to);
            b_side::copy(right, column0, columns, k + (index_t)step * TENSOR_DEPTH, end, to + ROWS * TENSOR_DEPTH * 2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int step = 0; step < stages - 1; step++) copy(step);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(stages - 2) : "memory");
        __syncthreads(); /* the step is there for all, and the one before it is read */
        copy(step + stages - 1);
        const uint32_t from = room + step % stages * stage;
#pragma unroll
        for (int kk = 0; kk < TENSOR_DEPTH; kk += 16) {
            uint32_t a[down][4], b[across / 2][4];
#pragma unroll
            for (int i = 0; i < down; i++) a_side::template fetch<true>(a[i], from, warp_row + i * 16, kk);
#pragma unroll
            for (int j = 0; j < across / 2; j++)
                b_side::template fetch<false>(b[j], from + ROWS * TENSOR_DEPTH * 2, warp_column + j * 16, kk);
#pragma unroll
            for (int i = 0; i < down; i++)
#pragma unroll
                for (int j = 0; j < across; j++) tensor_mma(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
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

/* True where tensor cores make the products of these sides: of bf16, on devices that have such. */
template <class Left, class Right> METHOD constexpr bool by_tensor_cores() {
#if __CUDA_ARCH__ >= 800
    return Left::eights && Right::eights;
#else
    return false;
#endif
}

/* Floats of shared memory that a tile of these sides takes. */
template <class Left, class Right> METHOD constexpr int product_floats(int rows, int columns) {
    return by_tensor_cores<Left, Right>() ? tensor_stages(rows, columns) * tensor_bytes(rows, columns) / 4 : tile_floats(rows, columns);
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

/* All rows of a left side that has at most EIGHTS times eight, by sixteen columns from column0 on; both sides' sums run along memory, and the
 * warps of a block share them. The right side's columns are rows of the products, read from memory in whole sectors: a lane has eight terms of
 * a column, of which the first four count as terms 2t, 2t + 1, 2t + 8, 2t + 9 of an mma, in both operands. */
template <int EIGHTS, class Left, class Right, class Store>
METHOD void tensor_few(const Left &left, const Right &right, index_t rows, index_t column0, index_t columns, index_t end, float *shared,
                       const Store &store) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const auto last = [](index_t i, index_t n) { return i < n ? i : n - 1; };
    const bf16 *of[2], *by[EIGHTS];
    float sums[EIGHTS][4];
#pragma unroll
    for (int i = 0; i < 2; i++) of[i] = right.address(last(column0 + lane / 4 + i * 8, columns), lane % 4 * 8);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        by[e] = left.address(last(lane / 4 + e * 8, rows), lane % 4 * 8);
#pragma unroll
        for (int c = 0; c < 4; c++) sums[e][c] = 0.0f;
    }
#pragma unroll 4
    for (index_t k = warp * 32; k < end; k += BLOCK) {
        const bool there = k + lane % 4 * 8 < end;
        tensor_piece a[2] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, b[EIGHTS];
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (there) a[i] = *(const tensor_piece *)(of[i] + k);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            b[e] = {0, 0, 0, 0};
            if (there) b[e] = *(const tensor_piece *)(by[e] + k);
        }
        const uint32_t first[4] = {a[0].x, a[1].x, a[0].y, a[1].y}, second[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) tensor_mma(sums[e], first, b[e].x, b[e].y), tensor_mma(sums[e], second, b[e].z, b[e].w);
    }
    float *const mine = shared + warp * EIGHTS * 128;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int c = 0; c < 4; c++) mine[(e * 8 + lane % 4 * 2 + c % 2) * 16 + lane / 4 + c / 2 * 8] = sums[e][c];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < EIGHTS * 128; at += BLOCK) {
        const int row = at / 16, column = at % 16;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < BLOCK / 32; w++) sum += shared[w * EIGHTS * 128 + at];
        if (row < rows && column0 + column < columns) store(row, column0 + column, sum);
    }
    __syncthreads();
}

/* Columns of a unit. */
template <class Left, class Right> METHOD constexpr int few_columns() { return by_tensor_cores<Left, Right>() ? 16 : BLOCK / 32 * 4; }

/* All of at most MOST rows, MOST up to 16, by the columns of a unit. */
template <int MOST, class Left, class Right, class Store>
METHOD void few_sums(const Left &left, const Right &right, index_t rows, index_t unit, index_t columns, index_t end, float *shared,
                     const Store &store) {
    const index_t column0 = unit * few_columns<Left, Right>();
    if constexpr (by_tensor_cores<Left, Right>()) {
        if (MOST <= 8 || rows <= 8)
            tensor_few<1>(left, right, rows, column0, columns, end, shared, store);
        else
            tensor_few<2>(left, right, rows, column0, columns, end, shared, store);
    } else {
        if (MOST <= 1 || rows <= 1)
            few_rows<1, 4>(left, right, rows, column0, columns, end, shared, store);
        else if (MOST <= 4 || rows <= 4)
            few_rows<4, 4>(left, right, rows, column0, columns, end, shared, store);
        else
            few_rows<16, 4>(left, right, rows, column0, columns, end, shared, store);
    }
}
