/* Products of a few rows by the transpose of a large matrix, which is what a decode step is made of, and by a matrix as
 * it is, which is how attention adds up values.
 *
 * sgemm packs the matrix before it multiplies; with so few rows that takes longer than the product. Here BESIDE rows of
 * the matrix at a time are read from where they are, once from memory, and multiplied by all the rows there are. An
 * element is the same whatever stands beside it, beta being 0 or 1: its sum goes in the same order for one row and for
 * as many as come here.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

typedef float SOME __attribute__((vector_size(4 * BESIDE), aligned(4), may_alias));

/* Of all lanes: the upper half is added to the lower one until one is left. */
static inline __attribute__((always_inline)) float SUM(VEC v) {
    float sums[WIDTH];
    *(VEC *)sums = v;
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

/* Of each of BESIDE registers, in the same order of additions, with few instructions for all of them. */
static inline __attribute__((always_inline)) SOME SUMS(const VEC *v) {
#if WIDTH == 16
    VEC a = __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    VEC b = __builtin_shufflevector(v[2], v[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
            __builtin_shufflevector(v[2], v[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    a = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
        __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    a += __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return __builtin_shufflevector(a, a, 0, 4, 8, 12);
#elif WIDTH == 8
    VEC a = __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 8, 9, 10, 11) +
            __builtin_shufflevector(v[0], v[1], 4, 5, 6, 7, 12, 13, 14, 15);
    VEC b = __builtin_shufflevector(v[2], v[3], 0, 1, 2, 3, 8, 9, 10, 11) +
            __builtin_shufflevector(v[2], v[3], 4, 5, 6, 7, 12, 13, 14, 15);
    a = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    return __builtin_shufflevector(a, a, 0, 2, 4, 6) + __builtin_shufflevector(a, a, 1, 3, 5, 7);
#else
    VEC a = __builtin_shufflevector(v[0], v[1], 0, 1, 4, 5) + __builtin_shufflevector(v[0], v[1], 2, 3, 6, 7);
    VEC b = __builtin_shufflevector(v[2], v[3], 0, 1, 4, 5) + __builtin_shufflevector(v[2], v[3], 2, 3, 6, 7);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/* c[i][j] for R rows of a and C of b, which is 1 or BESIDE; meanwhile F rows of b from `next` on are fetched, `step` bytes
 * of each for every register of a row. */
static inline __attribute__((always_inline)) void TILE(const int R, const int C, const int F, int step, int k,
                                                       float alpha, const float *a, long lda, const float *b, long ldb,
                                                       const char *next, float beta, float *c, long ldc) {
    VEC sums[ROWS][BESIDE];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sums[i][j] = (VEC){0};
    int p = 0;
    for (; p + WIDTH <= k; p += WIDTH) {
        VEC x[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) x[i] = *(const VEC *)(a + i * lda + p);
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            VEC y = *(const VEC *)(b + j * ldb + p);
            if (j < F) __builtin_prefetch(next + 4 * j * ldb, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) sums[i][j] += x[i] * y;
        }
        next += step;
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) {
        float *to = c + i * ldc;
        SOME sum = {0};
        if (C == BESIDE) sum = SUMS(sums[i]);
        else sum[0] = SUM(sums[i][0]);
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            for (int q = p; q < k; q++) sum[j] += a[i * lda + q] * b[j * ldb + q];
            if (C != BESIDE) *to = alpha * sum[0] + (beta == 0 ? 0 : beta * *to);
        }
        if (C == BESIDE) *(SOME *)to = beta == 0 ? alpha * sum : alpha * sum + beta * *(SOME *)to;
    }
}

/* BESIDE rows of b at a time are multiplied by ROWS rows of a, by the next ones, and so on. Each of these passes fetches
 * its share of the BESIDE rows of b that come after, into the second cache. Into the first one a core fetches fewer lines
 * at a time than memory could give it: that was half as fast. Many passes fetch as if the rows lay behind one another,
 * which they do, or some are not fetched beforehand. */
static void NAMED(few)(int m, int n, int k, float alpha, const float *a, long lda, const float *b, long ldb,
                       float beta, float *c, long ldc) {
    int passes = (m + ROWS - 1) / ROWS, many = passes >= BESIDE;
    int step = many ? 4 * WIDTH * BESIDE / passes : 4 * WIDTH, j = 0;
    for (; j + BESIDE <= n; j += BESIDE, b += BESIDE * ldb, c += BESIDE) {
        const float *rows = a;
        const char *next = (const char *)(b + BESIDE * ldb);
        float *to = c;
        for (int i = 0, left = BESIDE; i < m; i += ROWS, rows += ROWS * lda, to += ROWS * ldc) {
            int passes_left = (m - i + ROWS - 1) / ROWS, fetch = many ? 1 : (left + passes_left - 1) / passes_left;
#define PASS(R, F) TILE(R, BESIDE, F, step, k, alpha, rows, lda, b, ldb, next, beta, to, ldc)
            if (m - i == 1) PASS(1, fetch);
            else if (m - i == 2) PASS(2, fetch);
            else if (ROWS == 4 && m - i == 3) PASS(3, fetch);
            else if (fetch == 1) PASS(ROWS, 1);
            else if (fetch == 2) PASS(ROWS, 2);
            else PASS(ROWS, BESIDE);
#undef PASS
            next += many ? (long)step * (k / WIDTH) : 4 * fetch * ldb;
            left -= fetch;
        }
    }
    for (; j < n; j++, b += ldb, c++)
        for (int i = 0; i < m; i++)
            TILE(1, 1, 0, 0, k, alpha, a + i * lda, lda, b, ldb, (const char *)b, beta, c + i * ldc, ldc);
}

/* R rows and C registers of c: each row of b is read once for R rows of a. */
static inline __attribute__((always_inline)) void PLAIN_TILE(const int R, const int C, int k, float alpha,
                                                             const float *a, long lda, const float *b, long ldb,
                                                             float beta, float *c, long ldc) {
    VEC sums[ROWS][4];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sums[i][j] = (VEC){0};
    for (int p = 0; p < k; p++, b += ldb) {
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            VEC y = *(const VEC *)(b + j * WIDTH);
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) sums[i][j] += a[i * lda + p] * y;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            VEC *to = (VEC *)(c + i * ldc + j * WIDTH);
            VEC sum = alpha * sums[i][j];
            if (beta != 0) sum += beta * *to; /* else it may be anything */
            *to = sum;
        }
}

/* n is a multiple of WIDTH. */
static void NAMED(few_plain)(int m, int n, int k, float alpha, const float *a, long lda, const float *b, long ldb,
                             float beta, float *c, long ldc) {
    for (int j = 0; j < n; j += 4 * WIDTH, b += 4 * WIDTH, c += 4 * WIDTH)
        for (int i = 0; i < m; i += ROWS) {
            const float *rows = a + i * lda;
            float *to = c + i * ldc;
            int registers = (n - j) / WIDTH;
#define PASS(R, C) PLAIN_TILE(R, C, k, alpha, rows, lda, b, ldb, beta, to, ldc)
#define PASSES(C)                   \
    if (m - i == 1) PASS(1, C);      \
    else if (m - i == 2) PASS(2, C); \
    else if (ROWS == 4 && m - i == 3) PASS(3, C); \
    else PASS(ROWS, C)
            if (registers == 1) { PASSES(1); }
            else if (registers == 2) { PASSES(2); }
            else if (registers == 3) { PASSES(3); }
            else { PASSES(4); }
#undef PASS
#undef PASSES
        }
}
