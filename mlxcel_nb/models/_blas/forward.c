/* Hands MLX's three BLAS calls to a faster library, chosen at run time.
 *
 * MLX's Linux CPU wheel imports cblas_sgemm, cblas_dgemm and cblas_cgemm and finds them in the reference BLAS beside
 * it. Loaded with RTLD_GLOBAL before MLX, this object is found first. It links nothing, not even libc, so that one
 * binary serves glibc and musl: Python looks the four functions up in the fast library and passes them to
 * mlxcel_blas_bind, which must be called before the first product.
 *
 * Products of a few rows are made here (few_rows.h). Where this processor has no instructions for that, one of a single
 * row is a matrix by a vector: sgemv reads the matrix once, where sgemm packs it first.
 *
 * Large products are shared out among threads that Python starts (helpers.h), also those that the fast library makes,
 * which is told to use one thread: its own threads wait for each other at every block, so that on a machine where others
 * work too a product took up to a hundred times as long.
 *
 * BLAS is the only foreign code that MLX calls on its thread, in the midst of its own work. So exponentials come this
 * way too (exponentials.h): a product by one of two known 1 x 1 matrices is no product but a function of each element.
 * They hold NaN.
 *
 * To rebuild both binaries, in the repository's root: `make shim` (Debian: gcc and gcc-aarch64-linux-gnu), which runs
 *   $ARCH-linux-gnu-gcc -O2 -shared -fPIC -nostdlib -fno-tree-loop-distribute-patterns -fno-stack-protector \
 *       -fno-asynchronous-unwind-tables \
 *       -fvisibility=hidden -Wl,--build-id=none,-s,-z,norelro,-z,noseparate-code,--hash-style=gnu,-soname,mlxcel-forward \
 *       -o forward-$ARCH.so forward.c
 * for x86_64 and, with -mno-outline-atomics, aarch64. The result does not depend on the time or the folder.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef void (*sgemm_t)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void (*dgemm_t)(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *, int);
typedef void (*cgemm_t)(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *, void *, int);
typedef void (*sgemv_t)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static sgemm_t sgemm;
static dgemm_t dgemm;
static cgemm_t cgemm;
static sgemv_t sgemv;
static unsigned long calls;

typedef void (*few_t)(int, int, int, float, const float *, long, const float *, long, float, float *, long);

#include "helpers.h"

enum {
    PIECE = 1 << 15,        /* elements of the matrix that are taken at a time of a product of few rows */
    LEAST_PIECE = 64,       /* columns or rows that are taken of any other; each time the other matrix is packed anew */
    WORTH_SHARING = 1 << 20, /* multiplications of any other: some 30 us */
    WORTH_HELP = 1 << 17, /* elements of the matrix, some 20 us: about as long as it takes to wake somebody */
    LONG = 128            /* elements of a row; of shorter ones the sums at the end cost too much for sgemm to be slower */
};

typedef void (*each_t)(long, const float *, float *);

static few_t few, few_plain; /* these four are null where this processor has no instructions for them */
static each_t power, silu;
static const float *power_mark, *silu_mark; /* a product by one of these is that function */
static int width;
static int threads;
static int few_rows;   /* more are faster by sgemm, unless the matrix is large and ... */
static int few_floats; /* ... all rows together are no more than this, which the second cache holds */

#define PASTE_(name, isa) name##_##isa
#define PASTE(name, isa) PASTE_(name, isa)
#define NAMED(name) PASTE(name, ISA)

#if defined(__x86_64__)
#include <cpuid.h>

#pragma GCC push_options
#pragma GCC target("avx512f")
#define ISA avx512
#define WIDTH 16
#define BESIDE 4
#define ROWS 4
#define FEW_ROWS 32
#define FEW_FLOATS (1 << 18)
#include "kernels.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define ISA avx2
#define WIDTH 8
#define BESIDE 4
#define ROWS 3
#define FEW_ROWS 32
#define FEW_FLOATS (1 << 16)
#include "kernels.h"
#pragma GCC pop_options

static void choose(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return;
    int fma = (c & bit_FMA) != 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* registers that the system saves */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    if ((b & bit_AVX512F) && (low & 0xe6) == 0xe6) choose_avx512();
    else if (fma && (b & bit_AVX2) && (low & 6) == 6) choose_avx2();
}
#elif defined(__aarch64__)
#define ISA neon
#define WIDTH 4
#define BESIDE 4
#define ROWS 4
#define FEW_ROWS 12 /* not measured */
#define FEW_FLOATS 0
#include "kernels.h"

static void choose(void) { choose_neon(); }
#else
static void choose(void) {}
#endif

#define EXPORT __attribute__((visibility("default")))

/* All four; with a null sgemv a matrix by a vector that is not made here goes to sgemm too. */
EXPORT void mlxcel_blas_bind(sgemm_t s, dgemm_t d, cgemm_t c, sgemv_t v) {
    sgemm = s;
    dgemm = d;
    cgemm = c;
    sgemv = v;
    choose();
}

/* How many threads make a product. The fast library has been told to use one. */
EXPORT void mlxcel_blas_threads(int count) { __atomic_store_n(&threads, count, __ATOMIC_RELAXED); }

/* Help with large products of few rows: for threads that have nothing else to do, for it does not return. */
EXPORT void mlxcel_blas_help(void) { help(); }

/* From now on, a product by the element at one of these addresses is 2 ** x, or x / (1 + exp(-x)), of each element of the
 * other matrix, (n, 1). They stay where they are until others are named, or null. 0 where there are no such functions. */
EXPORT int mlxcel_blas_marks(const float *of_power, const float *of_silu) {
    if (!power) return 0;
    power_mark = of_power, silu_mark = of_silu;
    return 1;
}

/* Products forwarded so far: how a test or `status` sees that MLX really comes this way. */
EXPORT unsigned long mlxcel_blas_calls(void) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

static void count(void) { __atomic_store_n(&calls, __atomic_load_n(&calls, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED); }

static void few_columns(const job_t *x, int j, int n) {
    few(x->m, n, x->k, x->alpha, x->a, x->lda, x->b + (long)j * x->ldb, x->ldb, x->beta, x->c + j, x->ldc);
}

static void columns(const job_t *x, int j, int n) {
    const float *b = x->b + (x->tb == NO_TRANS ? j : (long)j * x->ldb);
    sgemm(ROW_MAJOR, x->ta, x->tb, x->m, n, x->k, x->alpha, x->a, x->lda, b, x->ldb, x->beta, x->c + j, x->ldc);
}

static void rows(const job_t *x, int i, int m) {
    const float *a = x->a + (x->ta == NO_TRANS ? (long)i * x->lda : i);
    float *c = x->c + (long)i * x->ldc;
    sgemm(ROW_MAJOR, x->ta, x->tb, m, x->n, x->k, x->alpha, a, x->lda, x->b, x->ldb, x->beta, c, x->ldc);
}

/* c = alpha * a * b' + beta * c, all row by row, and nothing if that is not for `few`. */
static int made_here(job_t *x) {
    int large = (long)x->n * x->k >= WORTH_HELP;
    if (x->m > few_rows && !(large && x->k >= LONG && (long)x->m * x->k <= few_floats)) return 0;
    x->make = few_columns, x->all = x->n, x->piece = (PIECE / x->k + 8) & ~7;
    if (!large || x->wanted < 1 || !make_together(x)) few_columns(x, 0, x->n);
    return 1;
}

/* The same of any product by the fast library, or nothing if that is not worth while: two pieces for each thread, so
 * that one which is late keeps the others waiting for no more than one. */
static int made_together(job_t *x) {
    if (x->wanted < 1 || (long)x->m * x->n * x->k < WORTH_SHARING) return 0;
    int wide = x->n >= x->m, pieces = 2 * (x->wanted + 1);
    x->make = wide ? columns : rows, x->all = wide ? x->n : x->m;
    x->piece = ((x->all + pieces - 1) / pieces + 15) & ~15;
    if (x->piece < LEAST_PIECE) x->piece = LEAST_PIECE;
    return make_together(x);
}

/* The same by b. */
static int made_plain_here(int m, int n, int k, float alpha, const float *a, long lda, const float *b, long ldb,
                           float beta, float *c, long ldc) {
    if (m > few_rows || n <= 0 || n % width || (long)n * k >= WORTH_HELP) return 0;
    few_plain(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return 1;
}

EXPORT void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                        const float *b, int ldb, float beta, float *c, int ldc) {
    count();
    if (power && n == 1 && k == 1 && alpha == 1 && beta == 0 && (ta == TRANS || lda == 1)) {
        if (b == power_mark) return power(m, a, c);
        if (b == silu_mark) return silu(m, a, c);
    }
    int wanted = __atomic_load_n(&threads, __ATOMIC_RELAXED) - 1;
    job_t asked = {0, 0, 0, wanted, ta, tb, m, n, k, alpha, beta, a, b, c, lda, ldb, ldc};
    if (few && order == ROW_MAJOR && ta == NO_TRANS && alpha != 0 && m > 0 && k > 0) {
        if (tb == TRANS && made_here(&asked)) return;
        if (tb == NO_TRANS && made_plain_here(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)) return;
    }
    if (sgemv && order == ROW_MAJOR && m == 1 && k > 0 && (tb == NO_TRANS || tb == TRANS)) {
        /* c[n] = alpha * op(b)' a + beta * c; the row of a is contiguous, or a column with stride lda. */
        int step = ta == NO_TRANS ? 1 : lda;
        if (tb == NO_TRANS)
            sgemv(order, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
        else
            sgemv(order, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
        return;
    }
    if (order == ROW_MAJOR && m > 0 && n > 0 && made_together(&asked)) return;
    sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda,
                        const double *b, int ldb, double beta, double *c, int ldc) {
    count();
    dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORT void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                        const void *b, int ldb, const void *beta, void *c, int ldc) {
    count();
    cgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
