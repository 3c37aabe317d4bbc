/* What is made here of a matrix's or an array's floats, for one instruction set.
 *
 * Included once for each, with ISA its name, WIDTH the floats of a register, BESIDE the rows of a matrix that go together
 * with ROWS of the other one (ROWS x BESIDE sums are kept in registers), and FEW_ROWS and FEW_FLOATS as few_rows and few_floats in forward.c.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

#define VEC NAMED(vec)
#define INTS NAMED(ints)
#define SOME NAMED(some)
#define SUM NAMED(sum)
#define SUMS NAMED(sums)
#define TILE NAMED(tile)
#define PLAIN_TILE NAMED(plain_tile)
#define BOUNDED NAMED(bounded)
#define POWER_OF NAMED(power_of)
#define SILU_OF NAMED(silu_of)

typedef float VEC __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#include "few_rows.h"
#include "exponentials.h"

static void NAMED(choose)(void) {
    few = NAMED(few), few_plain = NAMED(few_plain), power = NAMED(power), silu = NAMED(silu);
    width = WIDTH, few_rows = FEW_ROWS, few_floats = FEW_FLOATS;
}

#undef VEC
#undef INTS
#undef SOME
#undef SUM
#undef SUMS
#undef TILE
#undef PLAIN_TILE
#undef BOUNDED
#undef POWER_OF
#undef SILU_OF
#undef ISA
#undef WIDTH
#undef BESIDE
#undef ROWS
#undef FEW_ROWS
#undef FEW_FLOATS
