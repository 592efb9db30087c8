/* Attention forward by tensor cores: queries, keys and values in bf16, scores, weights' sums and results in f32. Codes of keys and values, all of
 * which bf16 holds, wait in shared memory as they are; scores and weights are multiplied by their scales.
 *
 * Enters: attention.cu, tensor.cu; its constants, of which BLOCK is 128 and tiles have at most 64 rows: a warp has sixteen. D and DV are
 * multiples of 16; TENSOR_FLOATS is the shared memory that a launch asks for. Leaves: attention_tensor_unit. Weights are powers of two by
 * ex2.approx, within 2 units in the last place, and rounded to bf16 before they meet values. In tiles with keys that some row may not see,
 * values that are no finite numbers are added apart, for a hidden one times zero would be NaN; keys before the window of all rows are not
 * read.
 */
enum { TENSOR_KEYS = 64 };

/* Lines of heads in shared memory, pieces of 16 bytes; swizzled or padded, so that the eight lines of an ldmatrix meet in no bank. */
template <int SIZE> struct tensor_heads {
    enum { pieces = SIZE / 8, swizzled = (pieces & (pieces - 1)) == 0, line = pieces + !swizzled, bytes = TENSOR_KEYS * line * 16 };

    static METHOD int place(int of, int piece) {
        const int by = !swizzled ? 0 : pieces >= 8 ? of % 8 : pieces == 4 ? of / 2 % 4 : of / 4 % 2;
        return (of * line + (piece ^ by)) * 16;
    }

    /* Starts copies of lines first .. count, at least one, and zeros around them. */
    template <class Line> static METHOD void copy(const Line &at, int first, int count, uint32_t to) {
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < TENSOR_KEYS * pieces; i += BLOCK) {
            const int of = i / pieces, piece = i % pieces;
            const bool there = of >= first && of < count;
            tensor_copy(to + place(of, piece), at(there ? of : first) + piece * 8, there);
        }
    }

    /* Puts zeros where elements are infinite or NaN, as far as this thread looks; true where there were any. */
    static METHOD bool finite(char *lines) {
        bool found = false;
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < TENSOR_KEYS * pieces; i += BLOCK) {
            tensor_piece *const at = (tensor_piece *)(lines + place(i / pieces, i % pieces));
            const tensor_piece all = *at;
            const uint32_t words[4] = {all.x, all.y, all.z, all.w};
            uint32_t bad[4], any = 0;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                bad[w] = ((words[w] & 0x7f80u) == 0x7f80u ? 0xffffu : 0u) | ((words[w] & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0u);
                any |= bad[w];
            }
            if (any == 0) continue;
            *at = {all.x & ~bad[0], all.y & ~bad[1], all.z & ~bad[2], all.w & ~bad[3]};
            found = true;
        }
        return found;
    }

    /* Four 8 x 8 blocks: lines of, of + 8 and elements first, first + 8; of ACROSS transposed. LINES_FIRST: the second block has the next
     * lines. */
    template <bool ACROSS, bool LINES_FIRST> static METHOD void fetch(uint32_t (&x)[4], uint32_t from, int lane, int of, int first) {
        const int block = lane / 8;
        const int next_line = LINES_FIRST ? block % 2 : block / 2, next_piece = LINES_FIRST ? block / 2 : block % 2;
        tensor_fetch<ACROSS>(x, from + place(of + next_line * 8 + lane % 8, first / 8 + next_piece));
    }
};

/* Lines of heads on their way to shared memory: copied to `to`. */
template <class Element, int SIZE> struct tensor_lines {
    template <class Line> static METHOD void copy(const Line &at, int first, int count, uint32_t to, uint32_t) {
        tensor_heads<SIZE>::copy(at, first, count, to);
    }
    static METHOD void widen(const char *, char *) {}
};

/* Codes, copied to `codes`; a thread widens what it copied. */
template <class Element, int SIZE> struct tensor_code_lines {
    enum { pieces = SIZE / 16 };

    template <class Line> static METHOD void copy(const Line &at, int first, int count, uint32_t, uint32_t codes) {
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < TENSOR_KEYS * pieces; i += BLOCK) {
            const bool there = i / pieces >= first && i / pieces < count;
            tensor_copy(codes + i * 16, at(there ? i / pieces : first) + i % pieces * 16, there);
        }
    }

    static METHOD void widen(const char *codes, char *to) {
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < TENSOR_KEYS * pieces; i += BLOCK) {
            const tensor_piece all = *(const tensor_piece *)(codes + i * 16);
            const int of = i / pieces, piece = i % pieces * 2;
            const auto two = [](uint32_t low, uint32_t high) -> tensor_piece {
                return {Element::pair(low & 0xffff), Element::pair(low >> 16), Element::pair(high & 0xffff), Element::pair(high >> 16)};
            };
            *(tensor_piece *)(to + tensor_heads<SIZE>::place(of, piece)) = two(all.x, all.y);
            *(tensor_piece *)(to + tensor_heads<SIZE>::place(of, piece + 1)) = two(all.z, all.w);
        }
    }
};
template <int SIZE> struct tensor_lines<i8_of, SIZE> : tensor_code_lines<i8_of, SIZE> {};
template <int SIZE> struct tensor_lines<f8_of, SIZE> : tensor_code_lines<f8_of, SIZE> {};

/* Starts copies of the scales of lines first .. count; zeros around them. */
template <class Line> METHOD void tensor_scales(const Line &at, int first, int count, uint32_t to) {
    const int j = (int)threadIdx.x;
    if (j >= TENSOR_KEYS) return;
    const bool there = j >= first && j < count;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + j * 4), "l"(at(there ? j : first)), "r"(there ? 4 : 0));
}

/* Where codes and scales wait, in bytes from where shared memory begins. */
enum {
    TENSOR_K_CODES = tensor_heads<D>::bytes * 2 + tensor_heads<DV>::bytes,
    TENSOR_V_CODES = TENSOR_K_CODES + CODES * TENSOR_KEYS * D,
    TENSOR_SCALES = TENSOR_V_CODES + CODES * TENSOR_KEYS * DV,
};
static_assert(TENSOR_SCALES + CODES * TENSOR_KEYS * 8 == TENSOR_FLOATS * 4, "the launch asks for what is taken");

/* 2^x. */
METHOD float tensor_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

METHOD uint32_t tensor_pair(float low, float high) { return f32_to_bf16(low) | (uint32_t)f32_to_bf16(high) << 16; }

/* What rounding to bf16 leaves of a finite number. */
METHOD float tensor_rest(float x) {
    const float rest = x - bf16_to_f32(f32_to_bf16(x));
    return rest - rest == 0.0f ? rest : 0.0f;
}

/* Of the four lanes that share a row. */
METHOD float tensor_row_max(float x) {
    float y = __shfl_xor_sync(0xffffffffu, x, 1);
    x = y > x ? y : x, y = __shfl_xor_sync(0xffffffffu, x, 2);
    return y > x ? y : x;
}
METHOD float tensor_row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Like attention_unit. */
METHOD void attention_tensor_unit(const attention_in &in, index_t unit, index_t slots, int splits, float *part, float *shared) {
    typedef tensor_heads<D> of_keys;
    typedef tensor_heads<DV> of_values;
    const attention_task task = attention_task_of(in, unit, slots, splits, TENSOR_KEYS);
    if (task.rows == 0) return;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, rows = task.rows;
    const uint32_t room_q = shared_at(shared), room_k = room_q + of_keys::bytes, room_v = room_k + of_keys::bytes;
    const int from = task.from, to = task.to;
    const auto row_of = [&](int key) {
        if (PAGE > 0) return (index_t)(in.tables[task.sequence * TABLE_PAGES + key / (PAGE > 0 ? PAGE : 1)] * PAGE + key % (PAGE > 0 ? PAGE : 1));
        return (index_t)(task.start + key);
    };
    const auto keys = [&](int key0) {
        const int count = to - key0 < TENSOR_KEYS ? to - key0 : TENSOR_KEYS, first = task.see0 > key0 ? task.see0 - key0 : 0;
        const auto at = [&](int j) { return in.k.of(row_of(key0 + j), task.key_head); };
        if (first < count) tensor_lines<k_of, D>::copy(at, first, count, room_k, room_q + TENSOR_K_CODES);
        if (CODES && first < count)
            tensor_scales([&](int j) { return in.k_scales.of(row_of(key0 + j), task.key_head); }, first, count, room_q + TENSOR_SCALES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const auto values = [&](int key0) {
        const int count = to - key0 < TENSOR_KEYS ? to - key0 : TENSOR_KEYS, first = task.see0 > key0 ? task.see0 - key0 : 0;
        const auto at = [&](int j) { return in.v.of(row_of(key0 + j), task.key_head); };
        if (first < count) tensor_lines<v_of, DV>::copy(at, first, count, room_v, room_q + TENSOR_V_CODES);
        if (CODES && first < count)
            tensor_scales([&](int j) { return in.v_scales.of(row_of(key0 + j), task.key_head); }, first, count, room_q + TENSOR_SCALES + TENSOR_KEYS * 4);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const float *const scales = shared + TENSOR_SCALES / 4 + lane % 4 * 2;
    __syncthreads(); /* the last unit's memory is read */
    of_keys::copy([&](int r) { return in.q.of(task.start + task.query0 + r / task.heads, task.head_of(r)); }, 0, rows, room_q);
    keys(from), values(from);

    uint32_t q[D / 16][4];
    float sums[DV / 8][4], top[2] = {-INF_F, -INF_F}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = 0.0f;
    /* Positions of the thread's two rows, and the keys that all rows of the tile see. */
    const int mine = warp * 16 + lane / 4, position[2] = {task.position0 + mine / task.heads, task.position0 + (mine + 8) / task.heads};
    const int sees_all = CAUSAL ? task.position0 : to - 1, sees_from = WINDOW > 0 ? task.position0 + task.queries - WINDOW : 0;
#pragma unroll 1
    for (int key0 = from; key0 < to; key0 += TENSOR_KEYS) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        tensor_lines<k_of, D>::widen((const char *)shared + TENSOR_K_CODES, (char *)shared + of_keys::bytes);
        __syncthreads();
        /* The lane, of which the compiler may assume nothing: kept from step to step, the addresses of all that is fetched would take sixty
         * registers. */
        int fetching = lane;
        asm volatile("" : "+r"(fetching));
        if (key0 == from)
#pragma unroll
            for (int k = 0; k < D / 16; k++) of_keys::template fetch<false, true>(q[k], room_q, lane, warp * 16, k * 16);
        float s[TENSOR_KEYS / 8][4];
#pragma unroll
        for (int n = 0; n < TENSOR_KEYS / 8; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) s[n][c] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 16; n++) {
                uint32_t b[4];
                of_keys::template fetch<false, false>(b, room_k, fetching, n * 16, k * 16);
                tensor_mma(s[2 * n], q[k], b[0], b[1]);
                tensor_mma(s[2 * n + 1], q[k], b[2], b[3]);
            }
        if (CODES) {
#pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[n][c] *= scales[n * 8 + c % 2];
        }
        __syncthreads(); /* keys are read */
        keys(key0 + TENSOR_KEYS);
        const int last = (key0 + TENSOR_KEYS < to ? key0 + TENSOR_KEYS : to) - 1;
        const bool hides = last > sees_all || (key0 > task.see0 ? key0 : task.see0) < sees_from;
        const bool whole = key0 + TENSOR_KEYS <= to && !hides && key0 >= sees_from;
        const auto sees = [&](int half, int key) {
            return key < to && (!CAUSAL || key <= position[half]) && (WINDOW == 0 || position[half] - key < WINDOW);
        };
#pragma unroll
        for (int n = 0; n < TENSOR_KEYS / 8; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const bool seen = whole || sees(c / 2, key0 + n * 8 + lane % 4 * 2 + c % 2);
                s[n][c] = seen ? attention_score(s[n][c]) : -INF_F;
            }
        const float log2e = 1.4426950408889634f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INF_F;
#pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) most = s[n][2 * half + c] > most ? s[n][2 * half + c] : most;
            most = tensor_row_max(most), most = top[half] > most ? top[half] : most;
            /* A row that saw no key has nothing to keep. */
            const float base = most == -INF_F ? 0.0f : most * log2e, keep = tensor_exp2(FMA(top[half], log2e, -base));
            top[half] = most, sum[half] *= keep;
#pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float p = tensor_exp2(FMA(s[n][2 * half + c], log2e, -base));
                    s[n][2 * half + c] = p, sum[half] += p;
                }
#pragma unroll
            for (int n = 0; n < DV / 8; n++) sums[n][2 * half] *= keep, sums[n][2 * half + 1] *= keep;
        }
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        tensor_lines<v_of, DV>::widen((const char *)shared + TENSOR_V_CODES, (char *)shared + 2 * of_keys::bytes);
        __syncthreads();
        if (CODES) {
            /* A key that is not seen may have any scale. */
#pragma unroll
            for (int n = 0; n < TENSOR_KEYS / 8; n++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[n][c] = s[n][c] == 0.0f ? 0.0f : s[n][c] * scales[TENSOR_KEYS + n * 8 + c % 2];
        }
        const bool apart = hides && __syncthreads_or(of_values::finite((char *)shared + 2 * of_keys::bytes));
#pragma unroll
        for (int k = 0; k < TENSOR_KEYS / 16; k++) {
            const uint32_t p[4] = {tensor_pair(s[2 * k][0], s[2 * k][1]), tensor_pair(s[2 * k][2], s[2 * k][3]),
                                   tensor_pair(s[2 * k + 1][0], s[2 * k + 1][1]), tensor_pair(s[2 * k + 1][2], s[2 * k + 1][3])};
            uint32_t rest[4]; /* codes are as exact as f32 */
#pragma unroll
            for (int i = 0; CODES && i < 4; i++) rest[i] = tensor_pair(tensor_rest(s[2 * k + i / 2][i % 2 * 2]), tensor_rest(s[2 * k + i / 2][i % 2 * 2 + 1]));
#pragma unroll
            for (int n = 0; n < DV / 16; n++) {
                uint32_t b[4];
                of_values::template fetch<true, true>(b, room_v, fetching, k * 16, n * 16);
                tensor_mma(sums[2 * n], p, b[0], b[1]);
                tensor_mma(sums[2 * n + 1], p, b[2], b[3]);
                if (CODES) tensor_mma(sums[2 * n], rest, b[0], b[1]), tensor_mma(sums[2 * n + 1], rest, b[2], b[3]);
            }
        }
        if (apart) {
#pragma unroll 1
            for (int key = key0 > task.see0 ? key0 : task.see0; key <= last; key++) {
                const v_of::type *const at = in.v.of(row_of(key), task.key_head) + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < DV / 8; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const float value = v_of::number(at[n * 8 + c % 2]);
                        if (value - value != 0.0f && sees(c / 2, key)) sums[n][c] += value;
                    }
            }
        }
        __syncthreads(); /* values are read */
        values(key0 + TENSOR_KEYS);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = mine + 8 * half;
        const float all = tensor_row_sum(sum[half]);
        if (r >= rows) continue;
        const int head = task.head_of(r);
        const index_t result = (index_t)(task.start + task.query0 + r / task.heads) * HEADS + head;
        const int first = lane % 4 * 2;
        if (MOST_SPLITS > 1 && splits > 1) {
            float *const left = part + (result * splits + task.split) * PART;
#pragma unroll
            for (int n = 0; n < DV / 8; n++) left[n * 8 + first] = sums[n][2 * half], left[n * 8 + first + 1] = sums[n][2 * half + 1];
            if (first == 0) left[DV] = top[half], left[DV + 1] = all;
            continue;
        }
        const float keep = attention_close(in, result, head, top[half], all, first == 0);
#pragma unroll
        for (int n = 0; n < DV / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) in.o[result * DV + n * 8 + first + c] = o_of::element(sums[n][2 * half + c] * keep);
    }
}
