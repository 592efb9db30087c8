/* What the lanes of a warp and the threads of a block do together.
 *
 * Enters: scalar.c; BLOCK, a multiple of 32. Leaves: block_sum, block_max, block_min and block_prod of float and int64_t,
 * which all threads of a block call together and which give every thread the result; block_any; warp_sum and warp_max of float. The
 * trees depend on BLOCK alone. four_of, four neighbours in one access, whose address is a multiple of theirs.
 */
template <class Element> struct alignas(4 * sizeof(Element)) four_of {
    Element x[4];
};

#define BLOCK_REDUCE(name, type, join)                                                             \
    INLINE type name(type x) {                                                                     \
        __shared__ type part[BLOCK / 32];                                                          \
        for (int half = 16; half; half /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, half));   \
        if (BLOCK == 32) return x;                                                                 \
        __syncthreads(); /* the last reduction's parts are read */                                 \
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;                                     \
        __syncthreads();                                                                           \
        x = part[0];                                                                               \
        for (int warp = 1; warp < BLOCK / 32; warp++) x = join(x, part[warp]);                     \
        return x;                                                                                  \
    }
#define JOIN_SUM(a, b) ((a) + (b))
#define JOIN_PROD(a, b) ((a) * (b))
BLOCK_REDUCE(block_sum, float, JOIN_SUM)
BLOCK_REDUCE(block_sum, int64_t, JOIN_SUM)
BLOCK_REDUCE(block_prod, float, JOIN_PROD)
BLOCK_REDUCE(block_prod, int64_t, JOIN_PROD)
BLOCK_REDUCE(block_max, float, m_max)
BLOCK_REDUCE(block_max, int64_t, i_max)
BLOCK_REDUCE(block_min, float, m_min)
BLOCK_REDUCE(block_min, int64_t, i_min)

INLINE float warp_sum(float x) {
    for (int half = 16; half; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

/* The greatest number; a NaN is passed over. */
INLINE float warp_max(float x) {
    for (int half = 16; half; half /= 2) {
        float y = __shfl_xor_sync(0xffffffffu, x, half);
        x = y > x ? y : x;
    }
    return x;
}

/* True in all threads where it holds in one. */
INLINE bool block_any(bool holds) {
    __shared__ uint32_t votes[BLOCK / 32];
    uint32_t vote = __ballot_sync(0xffffffffu, holds);
    __syncthreads(); /* the last votes are read */
    if (threadIdx.x % 32 == 0) votes[threadIdx.x / 32] = vote;
    __syncthreads();
    uint32_t any = 0;
    for (int warp = 0; warp < BLOCK / 32; warp++) any |= votes[warp];
    return any != 0;
}

/* The numbers of the threads in which something holds, ascending, and how many they are. All threads call it, and read
 * `found` before the next barrier of theirs. */
INLINE int block_list(bool holds, index_t number, int32_t *found, int32_t *counts) {
    uint32_t vote = __ballot_sync(0xffffffffu, holds), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) counts[warp] = __popc(vote);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < BLOCK / 32; w++) {
        if (w < (int)warp) before += counts[w];
        all += counts[w];
    }
    if (holds) found[before + __popc(vote & ((1u << lane) - 1))] = (int32_t)number;
    __syncthreads();
    return all;
}
