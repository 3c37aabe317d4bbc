/* Products of a few rows by the transpose of a large matrix, which is what a decode step is made of, and by a matrix as
 * it is, which is how attention adds up values.
 *
 * sgemm packs the matrix before it multiplies; with so few rows that takes longer than the product. Here BESIDE rows of
 * the matrix at a time are read from where they are, once from memory, and multiplied by all the rows there are. An
 * element is the same whatever stands beside it: its sum goes in the same order for one row and for as many as come here.
 *
 * Included once for each instruction set, with FEW the function's name (and FEW_plain, by a matrix as it is), WIDTH the floats of a register, and BESIDE how
 * many rows of the matrix go together (4 x BESIDE sums are kept in registers).
 *
 * SPDX-License-Identifier: Apache-2.0
 */

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define VEC PASTE(FEW, _vec)
#define TILE PASTE(FEW, _tile)

#define SUM PASTE(FEW, _sum)
#define PLAIN PASTE(FEW, _plain)
#define PLAIN_TILE PASTE(FEW, _plain_tile)

typedef float VEC __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Of all lanes: the upper half is added to the lower one until two are left. */
static inline __attribute__((always_inline)) float SUM(VEC v) {
    typedef float quarter __attribute__((vector_size(16)));
#if WIDTH == 16
    typedef float half __attribute__((vector_size(32)));
    half e = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif WIDTH == 8
    VEC e = v;
#endif
#if WIDTH > 4
    quarter q = __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
#else
    quarter q = v;
#endif
    return (q[0] + q[2]) + (q[1] + q[3]);
}

/* c[i][j] for R rows of a and C of b; `ahead` fetches the C rows of b after these. */
static inline __attribute__((always_inline)) void TILE(const int R, const int C, const int ahead, int k, float alpha,
                                                       const float *a, long lda, const float *b, long ldb, float beta,
                                                       float *c, long ldc) {
    VEC sums[4][BESIDE];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sums[i][j] = (VEC){0};
    int p = 0;
    for (; p + WIDTH <= k; p += WIDTH) {
        VEC x[4];
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) x[i] = *(const VEC *)(a + i * lda + p);
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            VEC y = *(const VEC *)(b + j * ldb + p);
            if (ahead) __builtin_prefetch(b + (j + C) * ldb + p, 0, 3);
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) sums[i][j] += x[i] * y;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            float sum = SUM(sums[i][j]), *to = c + i * ldc + j;
            for (int q = p; q < k; q++) sum += a[i * lda + q] * b[j * ldb + q];
            *to = alpha * sum + (beta == 0 ? 0 : beta * *to);
        }
}

static void FEW(int m, int n, int k, float alpha, const float *a, long lda, const float *b, long ldb, float beta,
                float *c, long ldc) {
    int j = 0;
    for (; j + BESIDE <= n; j += BESIDE, b += BESIDE * ldb, c += BESIDE) {
        if (m < 4) {
            if (m == 3) TILE(3, BESIDE, 1, k, alpha, a, lda, b, ldb, beta, c, ldc);
            if (m == 2) TILE(2, BESIDE, 1, k, alpha, a, lda, b, ldb, beta, c, ldc);
            if (m == 1) TILE(1, BESIDE, 1, k, alpha, a, lda, b, ldb, beta, c, ldc);
            continue;
        }
        TILE(4, BESIDE, 1, k, alpha, a, lda, b, ldb, beta, c, ldc);
        int i = 4;
        for (; i + 4 <= m; i += 4) TILE(4, BESIDE, 0, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
        const float *rest = a + i * lda;
        float *to = c + i * ldc;
        if (m - i == 3) TILE(3, BESIDE, 0, k, alpha, rest, lda, b, ldb, beta, to, ldc);
        if (m - i == 2) TILE(2, BESIDE, 0, k, alpha, rest, lda, b, ldb, beta, to, ldc);
        if (m - i == 1) TILE(1, BESIDE, 0, k, alpha, rest, lda, b, ldb, beta, to, ldc);
    }
    for (; j < n; j++, b += ldb, c++)
        for (int i = 0; i < m; i++) TILE(1, 1, 0, k, alpha, a + i * lda, lda, b, ldb, beta, c + i * ldc, ldc);
}

/* R rows and C registers of c: each row of b is read once for R rows of a. */
static inline __attribute__((always_inline)) void PLAIN_TILE(const int R, const int C, int k, float alpha,
                                                             const float *a, long lda, const float *b, long ldb,
                                                             float beta, float *c, long ldc) {
    VEC sums[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sums[i][j] = (VEC){0};
    for (int p = 0; p < k; p++, b += ldb) {
        VEC y[4];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) y[j] = *(const VEC *)(b + j * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) sums[i][j] += a[i * lda + p] * y[j];
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
static void PLAIN(int m, int n, int k, float alpha, const float *a, long lda, const float *b, long ldb, float beta,
                  float *c, long ldc) {
    for (int j = 0; j < n; j += 4 * WIDTH, b += 4 * WIDTH, c += 4 * WIDTH)
        for (int i = 0; i < m; i += 4) {
            const float *rows = a + i * lda;
            float *to = c + i * ldc;
#define ROWS(C)                                                                              if (m - i == 1) PLAIN_TILE(1, C, k, alpha, rows, lda, b, ldb, beta, to, ldc);            else if (m - i == 2) PLAIN_TILE(2, C, k, alpha, rows, lda, b, ldb, beta, to, ldc);       else if (m - i == 3) PLAIN_TILE(3, C, k, alpha, rows, lda, b, ldb, beta, to, ldc);       else PLAIN_TILE(4, C, k, alpha, rows, lda, b, ldb, beta, to, ldc)
            if (n - j >= 4 * WIDTH) { ROWS(4); }
            else if (n - j >= 3 * WIDTH) { ROWS(3); }
            else if (n - j >= 2 * WIDTH) { ROWS(2); }
            else { ROWS(1); }
#undef ROWS
        }
}

#undef VEC
#undef TILE
#undef SUM
#undef PLAIN
#undef PLAIN_TILE
#undef FEW
#undef WIDTH
#undef BESIDE
