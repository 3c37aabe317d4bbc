/* Threads that help to make a product: each takes pieces of its columns, or rows, until none is left.
 *
 * Nobody waits for a helper that has not begun: whoever asked for the product takes pieces too, and has made it alone if
 * need be. A helper that has nothing to do spins for a moment, since the next product of a step comes soon, then sleeps
 * in the kernel. Python starts the threads (`mlxcel_blas_help`), which never come back; there is no libc here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

#if defined(__x86_64__)
enum { SYS_FUTEX = 202, SYS_YIELD = 24 };
static long system_call(long number, const void *a, long b, long c, long d) {
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}
static void pause_a_bit(void) { __asm__ volatile("pause"); }
#elif defined(__aarch64__)
enum { SYS_FUTEX = 98, SYS_YIELD = 124 };
static long system_call(long number, const void *a, long b, long c, long d) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = (long)a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}
static void pause_a_bit(void) { __asm__ volatile("yield"); }
#endif

enum { WAIT_PRIVATE = 128, WAKE_PRIVATE = 129, SPINS = 2000 };

typedef struct job job_t;
struct job {
    void (*make)(const job_t *, int first, int count);
    int all, piece, wanted; /* columns or rows, and those of a piece; helpers that may take some */
    int ta, tb, m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    int lda, ldb, ldc;
};

static job_t job;
static int asking;  /* somebody's product is being made */
static int turn;    /* counts jobs; what helpers sleep on */
static int open_;   /* there are pieces to take */
static int taken;   /* columns or rows */
static int places;  /* of the job's helpers, that have been given away */
static int at_work; /* helpers that may be looking at the job */
static int sleepers;
static int helpers; /* all that there are */

static void take_pieces(void) {
    for (;;) {
        int first = __atomic_fetch_add(&taken, job.piece, __ATOMIC_RELAXED);
        if (first >= job.all) return;
        job.make(&job, first, job.all - first < job.piece ? job.all - first : job.piece);
    }
}

/* Make a product together with the helpers; 0 if they are at another one, which somebody else has asked for. */
static int make_together(const job_t *asked) {
    if (__atomic_exchange_n(&asking, 1, __ATOMIC_SEQ_CST)) return 0;
    job = *asked;
    taken = places = 0;
    __atomic_store_n(&open_, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&turn, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) system_call(SYS_FUTEX, &turn, WAKE_PRIVATE, job.wanted, 0);
    take_pieces();
    __atomic_store_n(&open_, 0, __ATOMIC_SEQ_CST);
    for (int spun = 0; __atomic_load_n(&at_work, __ATOMIC_SEQ_CST); spun++) {
        if (spun < SPINS) pause_a_bit();
        else system_call(SYS_YIELD, 0, 0, 0, 0); /* it has been put aside in the middle of a piece */
    }
    __atomic_store_n(&asking, 0, __ATOMIC_SEQ_CST);
    return 1;
}

static void help(void) {
    int seen = 0;
    __atomic_fetch_add(&helpers, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        for (int spun = 0; __atomic_load_n(&turn, __ATOMIC_SEQ_CST) == seen && spun < SPINS; spun++) pause_a_bit();
        __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) == seen) system_call(SYS_FUTEX, &turn, WAIT_PRIVATE, seen, 0);
        __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
        seen = __atomic_load_n(&turn, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&at_work, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&open_, __ATOMIC_SEQ_CST) && __atomic_fetch_add(&places, 1, __ATOMIC_RELAXED) < job.wanted)
            take_pieces();
        __atomic_fetch_sub(&at_work, 1, __ATOMIC_SEQ_CST);
    }
}
