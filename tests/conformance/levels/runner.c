/* Runs kernels outside of astrai's process, on a bare Linux of any architecture. Comes after them in their unit, with a table
 * `runners` of their functions.
 *
 * Enters, on standard input: the number of words that follow; words: bytes of memory and of scratch, the number of symbols, their
 * values and places for the round and the threads, the number of launches, and of each its kernel, its rounds, how many phases it
 * has and the units of each (-1: the kernel counts them), how many buffers, and where in memory they begin; then the memory. Leaves: the memory, on standard output.
 */
#if defined(__aarch64__)
enum { READ = 63, WRITE = 64, EXIT = 93 };
static long call3(long number, long a, long b, long c) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}
__asm__(".globl _start\n_start: bl begin\n");
#else
enum { READ = 0, WRITE = 1, EXIT = 60 };
static long call3(long number, long a, long b, long c) {
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return number;
}
__asm__(".globl _start\n_start: and $-16, %rsp\n call begin\n");
#endif

/* Kernels call these, and no other function of a C library. Volatile, so that none becomes a call of itself. */
void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++) ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}
void *memmove(void *to, const void *from, size_t n) {
    if ((uintptr_t)to <= (uintptr_t)from) return memcpy(to, from, n);
    for (size_t i = n; i-- > 0;) ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}
void *memset(void *to, int c, size_t n) {
    for (size_t i = 0; i < n; i++) ((volatile char *)to)[i] = (char)c;
    return to;
}

static char memory[1 << 26] __attribute__((aligned(64))), scratch[1 << 26] __attribute__((aligned(64)));
static int64_t words[1 << 16];

static void leave(int code) {
    for (;;) call3(EXIT, code, 0, 0);
}

/* All of so many bytes, in or out, or the end. */
static void move(int number, void *at, int64_t bytes) {
    for (int64_t done = 0, n; done < bytes; done += n) {
        n = call3(number, number == WRITE, (long)((char *)at + done), bytes - done);
        if (n <= 0) leave(1);
    }
}

__attribute__((used)) static void begin(void) {
    int64_t count = 0;
    move(READ, &count, 8);
    if (count < 4 || count > (int64_t)(sizeof words / 8)) leave(2);
    move(READ, words, count * 8);
    int64_t bytes = words[0], room = words[1], symbols = words[2], *dims = words + 3, *at = dims + symbols + 2;
    if (bytes > (int64_t)sizeof memory || room > (int64_t)sizeof scratch) leave(3);
    move(READ, memory, bytes);
#ifdef DOT_AMX_ROWS
    dot_amx_request(); /* nobody else runs what a library does when it is loaded */
#endif
    for (int64_t left = *at++; left > 0; left--) {
        const struct runner *k = runners + *at++;
        void *bufs[256];
        int64_t rounds = *at++, phases = *at++, *units = at, n = *(at += phases);
        at++;
        if (n > 256) leave(4);
        for (int64_t i = 0; i < n; i++) bufs[i] = memory + *at++;
        for (dims[symbols] = 0; dims[symbols] < rounds; dims[symbols]++)
            for (int64_t p = 0; p < phases; p++)
                k->phase[p](bufs, dims, scratch, 0, units[p] < 0 ? k->units[p](dims) : units[p]);
    }
    move(WRITE, memory, bytes);
    leave(0);
}
