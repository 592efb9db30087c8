/* Reductions over the threads of a block.
 *
 * Enters: scalar.c; BLOCK, a multiple of 32. Leaves: block_sum, block_max, block_min and block_prod of float and int64_t,
 * which all threads of a block call together and which give every thread the result. The tree depends on BLOCK alone.
 */
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
