/* Products of matrices, a tile of the result a block; arithmetic and sums in f32.
 *
 * Enters: values.cu; BLOCK. Leaves: side, an operand in memory, and coded_side, one of codes; tile_sums, a tile from shared memory with a
 * block of the result in each thread's registers; few_rows, where the left side has few rows and the sums are shared by a warp. Both
 * hand every sum of the tile to `store(row, column, sum)`, neighbouring threads neighbouring columns.
 *
 * Every sum has one accumulator, terms ascending (few_rows: one a lane, joined in a tree), whatever the grid.
 */
enum { TILE_DEPTH = 16, TILE_PAD = 4 };

/* Element (i, k) lies at i * line + k where ALONG, else at i + k * line. TOGETHER: as many neighbours in memory as come at once, which
 * their number and all steps allow: 1, 4 or, of bf16, 8. `eights`: tensor cores may multiply it. */
template <class Element, bool ALONG, int TOGETHER> struct side {
    typedef typename Element::type type;
    enum { along = ALONG, vector = TOGETHER >= 4, eights = TOGETHER >= 8, coded = 0, offset_too = 0, bits = 8 * sizeof(typename Element::type) };
    const type *at;
    index_t line;
    METHOD side moved(index_t by) const { return {at + by, line}; }
    METHOD const type *address(index_t i, index_t k) const { return at + (ALONG ? i * line + k : i + k * line); }
    METHOD float number(index_t i, index_t k) const { return Element::number(*address(i, k)); }
    METHOD quad four(index_t i, index_t k) const { return Element::four(address(i, k)); }
};

/* Element (i, k) of a matrix that is stored as codes, `line` to a row; GROUP neighbours share a scale and, with OFFSETS, an offset. Four
 * neighbours always do. */
template <class Code, class Scale, int GROUP, bool OFFSETS> struct coded_side {
    typedef typename Code::type type;
    typedef typename Scale::type scale_type;
    enum { along = true, vector = true, eights = GROUP % 32 == 0, coded = 1, offset_too = OFFSETS, bits = 8 / Code::per };
    const type *at;
    const scale_type *scales, *offsets;
    index_t line;
    METHOD coded_side moved(index_t by) const {
        const index_t rows = by / (line / Code::per), groups = rows * (line / GROUP);
        return {at + by, scales + groups, OFFSETS ? offsets + groups : nullptr, line};
    }
    METHOD const type *row(index_t i) const { return at + i * (line / Code::per); }
    METHOD float scale(index_t i, index_t k) const { return Scale::number(scales[i * (line / GROUP) + k / GROUP]); }
    METHOD float offset(index_t i, index_t k) const { return OFFSETS ? Scale::number(offsets[i * (line / GROUP) + k / GROUP]) : 0.0f; }
    METHOD float number(index_t i, index_t k) const { return FMA(Code::number(row(i), k), scale(i, k), offset(i, k)); }
    METHOD quad four(index_t i, index_t k) const {
        const quad q = Code::four(row(i), k);
        const float s = scale(i, k), o = offset(i, k);
        return {FMA(q.x, s, o), FMA(q.y, s, o), FMA(q.z, s, o), FMA(q.w, s, o)};
    }
};

/* Where number (row, k) of a block lies in shared memory, from the start of line k on: rows of the second half of lines are swapped by
 * eights, so that stores of a warp which go to four lines meet in no bank. */
METHOD constexpr int tile_swapped(int row, int k) { return row ^ (k & TILE_DEPTH / 2); }

/* A block of ROWS by TILE_DEPTH numbers on its way: from memory to registers, thence to shared memory, as [k][row]. A warp reads whole
 * sectors, and neither its stores nor the loads of tile_sums meet in a bank; only stores of numbers one at a time along the sum do, two
 * at a time. */
template <class Side, int ROWS> struct tile_load {
    enum { count = ROWS * TILE_DEPTH / BLOCK, line = ROWS + TILE_PAD, wide = sizeof(typename Side::type) == 4 };
    float x[count];

    /* The row and k of a thread's piece. */
    static METHOD void place(int piece, int &row, int &k) {
        const int at = (int)threadIdx.x + piece * BLOCK;
        if (Side::vector && Side::along && wide) {
            row = at % 16 + at / 64 * 16, k = at / 16 % 4 * 4;
        } else if (Side::vector && Side::along) {
            row = at % 8 + at / 32 * 8, k = at / 8 % 4 * 4;
        } else if (Side::vector) {
            row = at % (ROWS / 4) * 4, k = at / (ROWS / 4);
        } else if (Side::along) {
            row = at / TILE_DEPTH, k = at % TILE_DEPTH;
        } else {
            row = at % ROWS, k = at / ROWS;
        }
    }

    METHOD void read(const Side &from, index_t row0, index_t rows, index_t k0, index_t end) {
        enum { step = Side::vector ? 4 : 1 };
#pragma unroll
        for (int piece = 0; piece < count / step; piece++) {
            int row, k;
            place(piece, row, k);
            bool there = row0 + row < rows && k0 + k < end;
            if (Side::vector) {
                quad q = {0.0f, 0.0f, 0.0f, 0.0f};
                if (there) q = from.four(row0 + row, k0 + k);
                x[piece * 4 % count] = q.x, x[(piece * 4 + 1) % count] = q.y, x[(piece * 4 + 2) % count] = q.z, x[(piece * 4 + 3) % count] = q.w;
            } else {
                x[piece] = there ? from.number(row0 + row, k0 + k) : 0.0f;
            }
        }
    }

    METHOD void keep(float *to) const {
        enum { step = Side::vector ? 4 : 1 };
#pragma unroll
        for (int piece = 0; piece < count / step; piece++) {
            int row, k;
            place(piece, row, k);
            float *const at = to + k * line + tile_swapped(row, k);
            if (Side::vector && !Side::along) {
                *(quad *)at = {x[piece * 4 % count], x[(piece * 4 + 1) % count], x[(piece * 4 + 2) % count], x[(piece * 4 + 3) % count]};
            } else {
#pragma unroll
                for (int i = 0; i < step; i++) at[i * line] = x[(piece * step + i) % count];
            }
        }
    }
};

/* The place of a thread's i-th row (or column) among those of the tile, of which COUNT threads have runs of four at most. */
template <int COUNT, int MINE> METHOD int tile_place(int thread, int i) {
    enum { run = MINE < 4 ? MINE : 4 };
    return thread * run + i % run + i / run * (COUNT * run);
}

struct alignas(8) two {
    float x, y;
};

/* The numbers of a thread's rows in a line of shared memory, from its first on. */
template <int COUNT, int MINE> METHOD void tile_fetch(float (&x)[MINE], const float *line) {
    static_assert(MINE == 2 || MINE % 4 == 0, "whole accesses");
    if (MINE == 2) {
        const two q = *(const two *)line;
        x[0] = q.x, x[1 % MINE] = q.y;
        return;
    }
#pragma unroll
    for (int i = 0; i < MINE; i += 4) {
        const quad q = *(const quad *)(line + i * COUNT);
        x[i] = q.x, x[(i + 1) % MINE] = q.y, x[(i + 2) % MINE] = q.z, x[(i + 3) % MINE] = q.w;
    }
}

/* Floats of shared memory that a tile takes. */
METHOD constexpr int tile_floats(int rows, int columns) { return TILE_DEPTH * (rows + columns + 2 * TILE_PAD); }

/* The group that owns a slot: group e has those from starts[e] / run + e on, one more than whole runs at least. */
METHOD index_t slot_of(const int32_t *starts, index_t groups, index_t slot, index_t run) {
    index_t low = 0, high = groups;
    while (high - low > 1) {
        index_t middle = (low + high) / 2;
        if (starts[middle] / run + middle <= slot) low = middle; else high = middle;
    }
    return low;
}

/* Rows row0 .. row0 + ROWS below `rows`, columns likewise, terms k .. end; each thread has MINE_R by MINE_C sums. */
template <int ROWS, int COLUMNS, int MINE_R, int MINE_C, class Left, class Right, class Store>
METHOD void tile_sums(const Left &left, const Right &right, index_t row0, index_t rows, index_t column0, index_t columns, index_t k,
                      index_t end, float *shared, const Store &store) {
    enum { across = COLUMNS / MINE_C, down = ROWS / MINE_R, line_a = ROWS + TILE_PAD, line_b = COLUMNS + TILE_PAD, line = COLUMNS + 16 };
    static_assert(across * down == BLOCK, "a thread has its sums");
    static_assert(down * line <= tile_floats(ROWS, COLUMNS), "sums of a turn fit");
    const int tx = (int)threadIdx.x % across, ty = (int)threadIdx.x / across;
    float *const a = shared, *const b = shared + TILE_DEPTH * line_a;
    float sums[MINE_R][MINE_C];
#pragma unroll
    for (int i = 0; i < MINE_R; i++)
#pragma unroll
        for (int j = 0; j < MINE_C; j++) sums[i][j] = 0.0f;
    tile_load<Left, ROWS> next_a;
    tile_load<Right, COLUMNS> next_b;
    /* Numbers that come one at a time have an address each: read ahead, these would not fit beside the sums. Nor would any where the left
     * side's elements are narrower than the right side's: no address of one helps the other. */
    enum { narrower = sizeof(typename Left::type) < sizeof(typename Right::type) };
    enum { ahead_a = Left::vector && !narrower, ahead_b = Right::vector && !narrower };
    if (ahead_a) next_a.read(left, row0, rows, k, end);
    if (ahead_b) next_b.read(right, column0, columns, k, end);
    for (; k < end; k += TILE_DEPTH) {
        if (!ahead_a) next_a.read(left, row0, rows, k, end);
        if (!ahead_b) next_b.read(right, column0, columns, k, end);
        next_a.keep(a), next_b.keep(b);
        __syncthreads();
        if (k + TILE_DEPTH < end) {
            if (ahead_a) next_a.read(left, row0, rows, k + TILE_DEPTH, end);
            if (ahead_b) next_b.read(right, column0, columns, k + TILE_DEPTH, end);
        }
        /* A line at a time: of more, ptxas keeps loads in registers that the sums want. */
#pragma unroll 1
        for (int half = 0; half < TILE_DEPTH; half += TILE_DEPTH / 2) {
            const float *const from_a = a + half * line_a + tile_swapped(tile_place<down, MINE_R>(ty, 0), half);
            const float *const from_b = b + half * line_b + tile_swapped(tile_place<across, MINE_C>(tx, 0), half);
#pragma unroll 1
            for (int kk = 0; kk < TILE_DEPTH / 2; kk++) {
                float x[MINE_R], y[MINE_C];
                tile_fetch<down, MINE_R>(x, from_a + kk * line_a), tile_fetch<across, MINE_C>(y, from_b + kk * line_b);
#pragma unroll
                for (int i = 0; i < MINE_R; i++)
#pragma unroll
                    for (int j = 0; j < MINE_C; j++) sums[i][j] = FMA(x[i], y[j], sums[i][j]);
            }
        }
        __syncthreads();
    }
    /* A row of each thread at a time, so that what follows runs along rows. */
#pragma unroll
    for (int i = 0; i < MINE_R; i++) {
        float *const mine = shared + ty * line + tile_place<across, MINE_C>(tx, 0);
        if (MINE_C == 2) *(two *)mine = {sums[i][0], sums[i][1]};
#pragma unroll
        for (int j = 0; j + 4 <= MINE_C; j += 4) *(quad *)(mine + j * across) = {sums[i][j], sums[i][(j + 1) % MINE_C], sums[i][(j + 2) % MINE_C], sums[i][(j + 3) % MINE_C]};
        __syncthreads();
#pragma unroll 1
        for (int at = (int)threadIdx.x; at < down * COLUMNS; at += BLOCK) {
            int of = at / COLUMNS, column = at % COLUMNS, row = tile_place<down, MINE_R>(of, i);
            if (row0 + row < rows && column0 + column < columns) store(row0 + row, column0 + column, shared[of * line + column]);
        }
        __syncthreads();
    }
}

/* All `rows` of a left side that has at most ROWS, by MINE columns for each warp from column0 on. Both sides' sums run along
 * memory. */
template <int ROWS, int MINE, class Left, class Right, class Store>
METHOD void few_rows(const Left &left, const Right &right, index_t rows, index_t column0, index_t columns, index_t end, float *shared,
                     const Store &store) {
    enum { both = Left::vector && Right::vector, step = both ? 4 : 1, width = BLOCK / 32 * MINE };
    const int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * MINE;
    float sums[ROWS][MINE];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < MINE; c++) sums[r][c] = 0.0f;
    index_t of[MINE]; /* beyond the last column that one again */
#pragma unroll
    for (int c = 0; c < MINE; c++) of[c] = column0 + first + c < columns ? column0 + first + c : columns - 1;
#pragma unroll(ROWS > 4 ? 1 : 4)
    for (index_t k = lane * step; k < end; k += 32 * step) {
        float y[MINE][4];
#pragma unroll
        for (int c = 0; c < MINE; c++) {
            if (both) {
                quad q = right.four(of[c], k);
                y[c][0] = q.x, y[c][1] = q.y, y[c][2] = q.z, y[c][3] = q.w;
            } else {
                y[c][0] = right.number(of[c], k);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            float x[4];
            if (both) {
                quad q = left.four(r, k);
                x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
            } else {
                x[0] = left.number(r, k);
            }
#pragma unroll
            for (int i = 0; i < step; i++)
#pragma unroll
                for (int c = 0; c < MINE; c++) sums[r][c] = FMA(x[i], y[c][i], sums[r][c]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < MINE; c++) {
            float sum = warp_sum(sums[r][c]);
            if (lane == 0) shared[r * width + first + c] = sum;
        }
    __syncthreads();
    for (int at = (int)threadIdx.x; at < ROWS * width; at += BLOCK) {
        int row = at / width, column = at % width;
        if (row < rows && column0 + column < columns) store(row, column0 + column, shared[at]);
    }
    __syncthreads();
}
