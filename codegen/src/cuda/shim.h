/* CUDA's execution model on the host, for tests.
 *
 * Enters: a CUDA program as C++ and a launch. Leaves: the kernel's effects. The threads of a block are fibers that run in a
 * seeded random order between barriers; blocks run one after another. A missing barrier or a dependence on the order of
 * threads shows as a difference between seeds. Shared memory is filled with NaN bits before every block. A barrier that
 * some threads of a block miss, or a shuffle or vote that some lanes of a warp miss, is an error.
 *
 * Fibers start by makecontext and then change by _setjmp and _longjmp, which spare the system calls of swapcontext.
 */
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <ucontext.h>

#define ASTRAI_SHIM
#define __global__
#define __device__
#define __forceinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared")))

/* The section exists even where no kernel has shared memory. */
__attribute__((section("shim_shared"), used)) static uint64_t shim_anchor;
extern char __start_shim_shared[], __stop_shim_shared[];
/* What launches ask for: as much as any multiprocessor has. */
alignas(16) static float shim_dynamic[58 * 1024];

struct shim_index { unsigned x, y, z; };
static shim_index threadIdx, blockIdx, blockDim, gridDim;

enum shim_state { SHIM_READY, SHIM_BARRIER, SHIM_SHUFFLE, SHIM_DONE };
enum { SHIM_MOST = 1024, SHIM_STACK = 64 * 1024 };

struct shim_fiber {
    jmp_buf at;
    ucontext_t first;
    bool started;
    shim_state state;
    int line;
    uint64_t shuffles;
    uint64_t sent[2];
};

static shim_fiber shim_fibers[SHIM_MOST];
static char shim_stacks[SHIM_MOST][SHIM_STACK] __attribute__((aligned(64)));
static jmp_buf shim_scheduler;
static unsigned shim_now;
static void (*shim_body)(void *const *, const int64_t *);
static void *const *shim_bufs;
static const int64_t *shim_dims;

static void shim_wait(shim_state state, int line) {
    shim_fiber *f = &shim_fibers[shim_now];
    f->state = state;
    f->line = line;
    if (_setjmp(f->at) == 0) _longjmp(shim_scheduler, 1);
}

static void shim_enter() {
    shim_body(shim_bufs, shim_dims);
    shim_fibers[shim_now].state = SHIM_DONE;
    _longjmp(shim_scheduler, 1);
}

#define __syncthreads() shim_wait(SHIM_BARRIER, __LINE__)

/* What a lane sends lies in two places by turns: it is overwritten only when all lanes have come one shuffle further. */
template <class T> static T shim_shuffle(T x, unsigned lane, int line) {
    shim_fiber *f = &shim_fibers[shim_now];
    unsigned turn = f->shuffles++ & 1, from = shim_now / 32 * 32 + lane;
    memcpy(&f->sent[turn], &x, sizeof x);
    shim_wait(SHIM_SHUFFLE, line);
    memcpy(&x, &shim_fibers[from].sent[turn], sizeof x);
    return x;
}

#define __shfl_xor_sync(mask, value, m) shim_shuffle(value, (threadIdx.x % 32) ^ (unsigned)(m), __LINE__)
#define __ballot_sync(mask, value) shim_ballot(value, __LINE__)
#define __syncwarp() shim_ballot(0, __LINE__)
#define __popc(x) __builtin_popcount(x)

static uint32_t shim_ballot(bool holds, int line) {
    unsigned first = shim_now / 32 * 32, turn = shim_fibers[shim_now].shuffles & 1;
    shim_shuffle((uint64_t)holds, threadIdx.x % 32, line);
    uint32_t vote = 0;
    for (unsigned lane = 0; lane < 32; lane++) vote |= (uint32_t)(shim_fibers[first + lane].sent[turn] & 1) << lane;
    return vote;
}

/* Calls an entry: pointers are the buffers in order, other parameters the sizes. */
template <class T> static T shim_next(void *const *&bufs, const int64_t *&dims) {
    if constexpr (std::is_pointer_v<T>) return (T)*bufs++;
    else return (T)*dims++;
}
template <class... T> static void shim_apply(void (*f)(T...), void *const *bufs, const int64_t *dims) {
    std::apply(f, std::tuple<T...>{shim_next<T>(bufs, dims)...});
}
template <auto F> static void shim_call(void *const *bufs, const int64_t *dims) { shim_apply(F, bufs, dims); }

static uint64_t shim_random(uint64_t *s) {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    return *s ^= *s << 17;
}

/* Makes fibers `first .. last` ready when all of them wait in `state` on one line. */
static void shim_release(unsigned first, unsigned last, shim_state state) {
    for (unsigned i = first; i < last; i++)
        if (shim_fibers[i].state != state || shim_fibers[i].line != shim_fibers[first].line) return;
    for (unsigned i = first; i < last; i++) shim_fibers[i].state = SHIM_READY;
}

/* Runs one block; 0, or the line where some threads wait for others that do not come. */
static int shim_block(unsigned threads, uint64_t *seed) {
    memset(__start_shim_shared, 0xff, (size_t)(__stop_shim_shared - __start_shim_shared));
    memset(shim_dynamic, 0xff, sizeof shim_dynamic);
    for (unsigned i = 0; i < threads; i++) {
        shim_fibers[i].state = SHIM_READY;
        shim_fibers[i].started = false;
        shim_fibers[i].shuffles = 0;
    }
    static unsigned ready[SHIM_MOST];
    for (;;) {
        unsigned n = 0;
        for (unsigned i = 0; i < threads; i++)
            if (shim_fibers[i].state == SHIM_READY) ready[n++] = i;
        if (n == 0) {
            unsigned done = 0;
            for (unsigned i = 0; i < threads; i++) done += shim_fibers[i].state == SHIM_DONE;
            if (done == threads) return 0;
            for (unsigned w = 0; w < threads; w += 32) shim_release(w, w + 32, SHIM_SHUFFLE);
            shim_release(0, threads, SHIM_BARRIER);
            bool stuck = true;
            for (unsigned i = 0; i < threads; i++) stuck &= shim_fibers[i].state != SHIM_READY;
            for (unsigned i = 0; stuck && i < threads; i++)
                if (shim_fibers[i].state != SHIM_DONE) return shim_fibers[i].line;
            continue;
        }
        /* Every ready fiber runs once, in random order. */
        static volatile unsigned left;
        for (left = n; left > 0;) {
            unsigned pick = (unsigned)(shim_random(seed) % left);
            shim_now = ready[pick];
            ready[pick] = ready[left - 1];
            left = left - 1;
            threadIdx.x = shim_now;
            shim_fiber *f = &shim_fibers[shim_now];
            if (_setjmp(shim_scheduler) == 0) {
                if (f->started) _longjmp(f->at, 1);
                f->started = true;
                getcontext(&f->first);
                f->first.uc_stack.ss_sp = shim_stacks[shim_now];
                f->first.uc_stack.ss_size = SHIM_STACK;
                f->first.uc_link = 0;
                makecontext(&f->first, shim_enter, 0);
                setcontext(&f->first);
            }
        }
    }
}

/* Runs a grid of blocks; 0, or the line where threads wait for ever. */
static int shim_launch(void (*body)(void *const *, const int64_t *), void *const *bufs, const int64_t *dims, int64_t blocks,
                       unsigned threads, uint64_t seed) {
    shim_body = body;
    shim_bufs = bufs;
    shim_dims = dims;
    blockDim.x = threads;
    gridDim.x = (unsigned)blocks;
    static uint64_t state;
    state = seed * 0x9e3779b97f4a7c15u + 1;
    static unsigned block;
    for (block = 0; block < blocks; block++) {
        blockIdx.x = block;
        int line = shim_block(threads, &state);
        if (line) return line;
    }
    return 0;
}
